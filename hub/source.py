"""Reading a dataset repo: shards at the commit that brought them, in a bounded cache.

Each file is checked against its sha256 (the client compares only sizes) before it counts.
"""

import contextlib
import hashlib
import json
import os
import re
import urllib.parse
from pathlib import Path

from .cache import Cache, write
from .client import USERS_FAULT, HubError, Patience, Remote, client, disk_errors, safe_name


class HubSource(Remote):
    """A dataset repo with the layout data/<domain>/*.npy + metadata.json, and the methods of text.FolderSource.

    Below cache_dir/hub/<repo>: the Cache of shards, listings/ and refs/ (what the Hub said). cache_gb must hold the current,
    the next and the validation shard of each domain."""

    kind, users_fault = "dataset", USERS_FAULT

    def __init__(self, repo: str, cache_dir: str, revision: str, cache_gb: float, patience: float, log):
        super().__init__(repo, log, patience)
        self.branch, self._revision, self._listings = revision, None, {}
        self.root = Path(os.path.expanduser(cache_dir)) / "hub" / f"datasets--{repo.replace('/', '--')}"
        self.cache = Cache(self.root, cache_gb * 1e9, log)

    def __str__(self):
        return f"Hub dataset {self.repo}"

    @property
    def revision(self) -> str:
        """The commit that list() and metadata() speak of. Asking costs one request, once."""
        return self._revision or self.pin()

    def pin(self) -> str:
        """Look where the branch points now."""
        memory = self.root / "refs" / urllib.parse.quote(self.branch, safe="")
        if re.fullmatch(r"[0-9a-f]{40}", self.branch):
            self._revision = self.branch  # a commit never moves: nothing to ask
        elif client().is_offline_mode() and memory.exists():  # the user's own choice, but not in silence
            self._revision = memory.read_text()
            self.log(f"[hub] {self.repo}: HF_HUB_OFFLINE: {self.branch} as last seen, {self._revision[:8]}")
        else:
            try:
                self._revision = self.patiently(lambda: self.head(self.branch), f"looking up {self.branch}")
            except HubError as error:
                if error.final or not memory.exists():
                    raise
                text = f"{error}; HF_HUB_OFFLINE=1 goes on with {self.branch} as last seen and what is cached"
                raise HubError(text) from None
            with contextlib.suppress(OSError):
                write(memory, self._revision)
        return self._revision

    def listing(self) -> dict[str, tuple[int, str]]:
        """{path: (bytes, content id)} of all files at the pinned commit; asked once per commit, then remembered."""
        revision = self.revision
        if revision not in self._listings:
            memory, found = self.root / "listings" / f"{revision}.json", {}
            with contextlib.suppress(OSError, ValueError):  # absent, or cut off by a power failure
                found = {path: tuple(entry) for path, entry in json.loads(memory.read_text()).items()}
            if not found:
                found = self.patiently(lambda: self.tree("", revision), f"listing at {revision[:8]}")
                for path in found:
                    safe_name(path if path.startswith("data/") else "elsewhere", self.repo)
                with contextlib.suppress(OSError):  # only a convenience: fetch() reports a disk that refuses
                    write(memory, json.dumps(found))
            self._listings = {revision: found}
        return self._listings[revision]

    def metadata(self) -> dict | None:
        """metadata.json at the pinned commit, None if the repo has none. ValueError if it is not JSON."""
        name = "metadata.json"
        if name not in self.listing():
            return None
        text = Path(self.fetch(name)).read_bytes()
        self.release(name)
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"{self.repo}/{name} at {self.revision[:8]} is not JSON: {error}") from None

    def domains(self) -> list[str]:
        """Folders below data/, for an error that names the nearest."""
        return sorted({p.split("/")[1] for p in self.listing() if re.match(r"data/[^/]+/", p)})

    def list(self, domain: str) -> dict[str, str]:
        """{"data/<domain>/x.npy": content id} at the pinned commit."""
        shard = re.compile(re.escape(f"data/{domain}/") + r"[^/.][^/]*\.npy")
        return {path: entry[1] for path, entry in sorted(self.listing().items()) if shard.fullmatch(path)}

    @disk_errors()
    def fetch(self, name: str, revision: str | None = None, id: str | None = None) -> str:
        """Local path of the file, kept until release(name): with content `id` at `revision`, or as it is at the pinned
        commit. Any rank, any thread."""
        safe_name(name, self.repo)
        revision = revision or self.revision
        key = id or hashlib.sha256(f"{revision} {name}".encode()).hexdigest()
        patience = Patience(self.patience)

        def bring(folder: Path) -> tuple[Path, dict]:
            content = id or self._content(name)
            got = self.get(name, revision, content, folder, patience)
            return got, dict(name=name, revision=revision, id=content)

        return self.cache.take(name, key, patience, bring)

    def release(self, name: str):
        """This process does not need the file any more: it may be deleted when the cache is full."""
        self.cache.release(name)

    def _content(self, name: str) -> str:
        """Content id of a file at the pinned commit."""
        if known := self.listing().get(name):
            return known[1]
        text = f"{self.repo}: {name} is not in the repo at commit {self.revision[:8]}"
        raise HubError(text, final=True, exit_code=USERS_FAULT)
