"""Reading a dataset repo: shards at the commit that brought them, in a bounded cache.

Each file is checked against its sha256 (the client compares only sizes), moved into the cache in one step, fetched once
per node (whoever holds its lock file fetches, everybody else waits), and deleted, oldest first, only if this cache
fetched it and nobody on the node uses it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
import urllib.parse
from pathlib import Path, PurePosixPath

from .client import (
    FIRST_WAIT,
    USERS_FAULT,
    HubError,
    Patience,
    Remote,
    bytes_below,
    client,
    content_id,
    disk_errors,
    part_of,
    safe_name,
)


def _write(path: Path, text: str):
    """Atomically, so that another process never reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _receipt(path: Path) -> Path:
    return path.with_name(f".{path.name}.receipt")


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


class HubSource(Remote):
    """A dataset repo with the layout data/<domain>/*.npy + metadata.json, and the methods of shards.FolderSource.

    Below cache_dir/hub/<repo>: files/ (the shards, each with a receipt), locks/ (one empty file per shard: held alone
    while it is fetched or deleted, shared while in use, freed by the kernel when its process dies), listings/ and
    refs/ (what the Hub said). cache_gb must hold the current, the next and the validation shard of each domain."""

    kind, users_fault = "dataset", USERS_FAULT

    def __init__(
        self,
        repo: str,
        cache_dir: str,
        revision: str = "main",
        cache_gb: float = 64,
        patience: float = 240.0,
        log=print,
        endpoint: str | None = None,
        first_wait: float = FIRST_WAIT,
    ):
        super().__init__(repo, patience, log, endpoint, first_wait)
        self.branch, self.max_bytes = revision, cache_gb * 1e9
        self.root = Path(os.path.expanduser(cache_dir)) / "hub" / f"datasets--{repo.replace('/', '--')}"
        self.pins: dict[Path, tuple[str, int]] = {}  # cached file -> (name, its lock, held shared)
        self.mutex, self._revision, self._listings, self.warned = threading.Lock(), None, {}, False

    def __str__(self):
        return f"Hub dataset {self.repo}"

    @property
    def revision(self) -> str:
        """The commit that list() and metadata() speak of. Asking costs one request, once."""
        return self._revision or self.pin()

    def pin(self) -> str:
        """Look where the branch points now."""
        if re.fullmatch(r"[0-9a-f]{40}", self.branch):
            self._revision = self.branch  # a commit never moves: nothing to ask
            return self._revision
        memory = self.root / "refs" / urllib.parse.quote(self.branch, safe="")
        if client().is_offline_mode() and memory.exists():  # the user's own choice, but not in silence
            self._revision = memory.read_text()
            self.log(f"[hub] {self.repo}: HF_HUB_OFFLINE: {self.branch} as last seen, {self._revision[:8]}")
            return self._revision
        try:
            self._revision = self.patiently(lambda: self.head(self.branch), f"looking up {self.branch}")
        except HubError as error:
            if error.final or not memory.exists():
                raise
            text = f"{error}; HF_HUB_OFFLINE=1 goes on with {self.branch} as last seen and what is cached"
            raise HubError(text) from None
        self._keep(memory, self._revision)
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
                self._keep(memory, json.dumps(found))
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
        """Local path of the file as it is at `revision`, kept until release(name). Any rank, any thread."""
        safe_name(name, self.repo)
        revision = revision or self.revision
        path = self._place(name, id or hashlib.sha256(f"{revision} {name}".encode()).hexdigest())
        with self.mutex:
            if path in self.pins:
                return str(path)
        patience, lock = Patience(self.patience), self._open_lock(path)
        try:
            while not (_try_lock(lock, fcntl.LOCK_SH) and self._complete(path)):
                fcntl.flock(lock, fcntl.LOCK_UN)
                if _try_lock(lock, fcntl.LOCK_EX):
                    if not self._complete(path):
                        self._fetch_alone(name, revision, id, path, patience)
                elif patience.left > 0:  # somebody else of this node fetches it
                    time.sleep(0.05)
                    patience.seen(bytes_below(part_of(path)))
                else:
                    text = f"another process of this machine fetches it, without progress for {self.patience:.0f} s"
                    raise HubError(f"{self.repo}: {name}: {text}: look at what that one waits for")
            with contextlib.suppress(OSError):
                os.utime(_receipt(path))  # the age that eviction goes by
            with self.mutex:
                if path in self.pins:
                    os.close(lock)  # another thread of ours was faster
                else:
                    self.pins[path] = (name, lock)
        except BaseException:
            os.close(lock)
            raise
        self._evict()
        return str(path)

    def release(self, name: str):
        """This process does not need the file any more: it may be deleted when the cache is full."""
        with self.mutex:
            for path in [p for p, (pinned, _) in self.pins.items() if pinned == name]:
                os.close(self.pins.pop(path)[1])
        self._evict()

    def _place(self, name: str, key: str) -> Path:
        """Where the file lives: by name and content, so that an overwritten shard is another file."""
        file = PurePosixPath(name)
        return self.root / "files" / file.parent / f"{file.stem}.{key[:16]}{file.suffix}"

    def _open_lock(self, path: Path) -> int:
        name = hashlib.sha256(str(path.relative_to(self.root)).encode()).hexdigest()[:24]
        path.parent.mkdir(parents=True, exist_ok=True)
        (self.root / "locks").mkdir(exist_ok=True)
        return os.open(self.root / "locks" / name, os.O_RDWR | os.O_CREAT, 0o666)

    def _complete(self, path: Path) -> bool:
        """Whether the file is here, whole, and ours."""
        try:
            return path.stat().st_size == json.loads(_receipt(path).read_text())["size"]
        except (OSError, ValueError):
            return False

    def _fetch_alone(self, name: str, revision: str, content: str | None, path: Path, patience: Patience):
        """With the lock held: download, check, receipt, rename. A receipt without its file means nothing."""
        if path.exists() and not _receipt(path).exists():
            raise HubError(f"{path} exists, but this cache did not fetch it: move it away", final=True)
        content = content or self._content(name, revision, patience)
        try:
            got = self.get(name, revision, content, part_of(path), patience)
            fact = dict(name=name, revision=revision, id=content, size=got.stat().st_size)
            _write(_receipt(path), json.dumps(fact))
            os.replace(got, path)
        finally:
            shutil.rmtree(part_of(path), ignore_errors=True)

    def _content(self, name: str, revision: str, patience: Patience) -> str:
        """Content id of a file at a commit; from the listing if that commit is the listed one."""
        if known := self._listings.get(revision, {}).get(name):
            return known[1]
        for item in self.patiently(
            lambda: self.api.get_paths_info(self.repo, [name], repo_type=self.kind, revision=revision),
            f"looking up {name} at {revision[:8]}",
            patience,
        ):
            if item.path == name and hasattr(item, "blob_id"):
                return content_id(item)
        text = f"{self.repo}: {name} is not in the repo at commit {revision[:8]}"
        raise HubError(text, final=True, exit_code=USERS_FAULT)

    def _evict(self):
        """Delete what was used longest ago until cache_gb is kept: only what has a receipt and nobody here uses."""
        try:
            turn = os.open(self.root / "locks" / "evict", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return  # no cache yet
        try:
            if not _try_lock(turn, fcntl.LOCK_EX):
                return  # somebody is at it
            kept = []
            for base, folders, names in os.walk(self.root / "files"):
                folders[:] = [f for f in folders if not f.endswith(".part")]  # downloads come and go there
                for path in (Path(base, n[1 : -len(".receipt")]) for n in names if n.endswith(".receipt")):
                    with contextlib.suppress(OSError):
                        if self._complete(path):
                            kept.append((_receipt(path).stat().st_mtime, path.stat().st_size, path))
            total = sum(size for _, size, _ in kept)
            for _, size, path in sorted(kept):
                if total <= self.max_bytes:
                    return
                lock = self._open_lock(path)
                if _try_lock(lock, fcntl.LOCK_EX):
                    path.unlink(missing_ok=True)
                    _receipt(path).unlink(missing_ok=True)
                    total -= size
                os.close(lock)
            if total > self.max_bytes and not self.warned:
                self.warned = True
                text = f"{total / 1e9:.2f} GB of shards are in use at once, more than cache_gb={self.max_bytes / 1e9:g}"
                self.log(
                    f"[hub] {text}: nothing that is needed is deleted; raise cache_gb if the disk allows"
                )
        finally:
            os.close(turn)

    def _keep(self, path: Path, text: str):
        """Remember an answer of the Hub. Only a convenience: fetch() reports a disk that refuses."""
        with contextlib.suppress(OSError):
            _write(path, text)
