"""The Hugging Face Hub: reading a dataset repo, publishing to a model repo. Retries live in hubclient.py.

* `HubSource` reads shards at the commit that brought them. Each file is checked against its sha256 (the client compares
  only sizes), moved into the cache in one step, fetched once per node (whoever holds its lock file fetches, everybody
  else waits), and deleted, oldest first, only if this cache fetched it and nobody on the node uses it.
* `Publisher` writes a folder as one commit on a known parent. It looks before it writes, so a commit whose answer got
  lost, or a race with another writer, ends well; what it reports as published was read back from the Hub.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path, PurePosixPath

from hubclient import (
    FIRST_WAIT,
    USERS_FAULT,
    HubError,
    Patience,
    Remote,
    bounded,
    bytes_below,
    client,
    content_id,
    content_is,
    disk_errors,
    hashes,
    safe_name,
)

MIN_UPLOAD_RATE = 1_000_000  # bytes/s: an upload may take `patience` plus the time that this rate needs


def _write(path: Path, text: str):
    """Atomically, so that another process never reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _receipt(path: Path) -> Path:
    return path.with_name(f".{path.name}.receipt")


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


# --- reading ---------------------------------------------------------------------------------------------------
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
                    patience.seen(bytes_below(_part(path)))
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
            got = self.get(name, revision, content, _part(path), patience)
            fact = dict(name=name, revision=revision, id=content, size=got.stat().st_size)
            _write(_receipt(path), json.dumps(fact))
            os.replace(got, path)
        finally:
            shutil.rmtree(_part(path), ignore_errors=True)

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


# --- writing ---------------------------------------------------------------------------------------------------
class Publisher(Remote):
    """A model repo that checkpoints and weights go to. Blocking: the caller runs it in a thread behind the training.

    Nothing local is ever deleted here. Deleting on the Hub removes files from the newest commit; their storage is freed
    only when the owner squashes the repo's history (its settings on the Hub)."""

    def __init__(self, repo: str, log=print, patience: float = 3600.0, endpoint=None, first_wait=FIRST_WAIT):
        super().__init__(repo, patience, log, endpoint, first_wait)

    def check_write(self):
        """Prove, leaving no trace, that this run may write to the repo; make it (private) if there is none."""
        hf, instead = client(), "or train with --publish=False"
        if not hf.get_token():
            text = f"publishing needs a token with write access, and HF_TOKEN is not set: set it, {instead}"
            raise HubError(f"{self.repo}: {text}", final=True)

        def attempt():
            try:
                self.head()
            except hf.errors.RepositoryNotFoundError as error:
                if isinstance(error, hf.errors.GatedRepoError) or error.response.status_code != 404:
                    raise
                self.api.create_repo(self.repo, private=True, exist_ok=True)
                self.log(f"[hub] {self.repo}: made, private")
            # asks how this file would be uploaded, which only a writer may; uploads nothing
            self.api.preupload_lfs_files(self.repo, [hf.CommitOperationAdd("config.json", b"{}")])

        try:
            self.patiently(attempt, "checking write access")
        except HubError as error:
            if not error.final:
                raise
            raise HubError(f"{error}. {self._who()}, {instead}", final=True) from None

    def _who(self) -> str:
        """Whose token it is and what it may do, for an error."""
        owner, settings = self.repo.split("/")[0], f"{self.api.endpoint}/settings/tokens"
        try:
            me = bounded(self.api.whoami, Patience(min(10.0, self.patience)))
        except Exception:
            return f"HF_TOKEN is not known to the Hub: make one with write access at {settings}"
        name, role = me.get("name"), me.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            return f"HF_TOKEN of {name} can only read: make one with write access at {settings}"
        if owner not in (name, *(org.get("name") for org in me.get("orgs", []))):
            return f"HF_TOKEN belongs to {name}, the repo to {owner}: set hf_model_repo to a repo of yours"
        return f"HF_TOKEN of {name} (role {role}) lacks write access to this repo: give it at {settings}"

    @disk_errors()
    def upload(self, folder, prefix: str) -> dict:
        """Publish all files of `folder` below `prefix` ("": the root) in one commit; a receipt, once verified there."""
        start, folder, files = time.monotonic(), Path(folder), {}
        for local in sorted(p for p in folder.rglob("*") if p.is_file()):
            remote = "/".join(filter(None, (prefix, local.relative_to(folder).as_posix())))
            files[safe_name(remote, self.repo)] = (local, local.stat().st_size, hashes(local))
        if not files:
            raise HubError(f"{folder}: there is nothing to publish", final=True)
        total = sum(size for _, size, _ in files.values())
        what = prefix or folder.name

        def missing(there) -> dict[str, Path]:
            return {
                remote: local
                for remote, (local, size, hashes) in files.items()
                if there.get(remote, (None, None))[0] != size or there[remote][1] not in hashes
            }

        def attempt() -> str:
            head = self.head()
            todo = missing(self.tree(prefix, head))
            if not todo:
                return head  # an earlier attempt whose answer was lost, or an earlier run
            adds = [client().CommitOperationAdd(remote, local) for remote, local in todo.items()]
            return self.api.create_commit(
                self.repo, adds, commit_message=f"Upload {what}", parent_commit=head
            ).oid

        patience = Patience(self.patience + total / MIN_UPLOAD_RATE)
        commit = self.patiently(attempt, f"upload of {what}", patience)
        wrong = missing(self.patiently(lambda: self.tree(prefix, commit), f"verification of {what}"))
        if wrong:
            text = (
                f"{len(wrong)} of {len(files)} files are not on the Hub as they are here, e.g. {min(wrong)}"
            )
            raise HubError(f"{self.repo}: after the upload, {text} (does a .gitignore there exclude it?)")
        receipt = {remote: dict(size=size, sha256=hashes[0]) for remote, (_, size, hashes) in files.items()}
        seconds = time.monotonic() - start
        return dict(repo=self.repo, prefix=prefix, commit=commit, bytes=total, seconds=seconds, files=receipt)

    def list(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """{path in the repo: (bytes, content id)} below `prefix` at the newest commit; `content_is` checks an id."""
        return self.patiently(lambda: self.tree(prefix, self.head()), f"listing of {prefix or 'the repo'}")

    @disk_errors()
    def download(self, prefix: str, folder) -> str:
        """All files below `prefix` at the newest commit, checked, into `folder`: it must not exist, and appears whole."""
        folder = Path(folder)
        if folder.exists():
            raise HubError(f"{folder} exists: a download never overwrites", final=True)
        head = self.patiently(self.head, "looking up the newest commit")
        found = self.patiently(lambda: self.tree(prefix, head), f"listing of {prefix}")
        if not found:
            raise HubError(f"{self.repo}: there is nothing below {prefix!r}", final=True)
        staging, part = _part(folder), folder.with_name(folder.name + ".file")
        for path, (_, content) in found.items():
            target = staging / safe_name(path, self.repo).removeprefix(prefix).lstrip("/")
            if target.exists() and content_is(target, content):
                continue  # of a download that was interrupted
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.get(path, head, content, part, Patience(self.patience)), target)
        shutil.rmtree(part, ignore_errors=True)
        os.replace(staging, folder)
        return str(folder)

    def trial(self, prefix: str, size: int = 16_000_000) -> float:
        """Publish `size` random bytes below the folder `prefix`, verify them there, delete them: bytes per second. A small
        part goes first by itself: what it takes is latency, of which a checkpoint of 65 GB has no more."""
        small, seconds = size // 32, []
        for n in (small, size):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "trial.bin").write_bytes(os.urandom(n))
                start = time.monotonic()
                self.upload(folder, f"{prefix}/{n}")
                seconds.append(time.monotonic() - start)
        self.delete(prefix)
        return (size - small) / max(seconds[1] - seconds[0], 0.1 * seconds[1])

    def delete(self, prefix: str) -> int:
        """Remove the files below the folder `prefix`, and nothing else, from the newest commit; how many there were."""
        safe_name(prefix, self.repo)  # refuses "", "/", "a/", "..": never the whole repo
        count = 0

        def attempt():
            nonlocal count
            head = self.head()
            paths = sorted(p for p in self.tree(prefix, head) if p.startswith(prefix + "/"))
            if paths:
                count = len(paths)
                gone = [client().CommitOperationDelete(p, is_folder=False) for p in paths]
                self.api.create_commit(self.repo, gone, commit_message=f"Delete {prefix}", parent_commit=head)

        self.patiently(attempt, f"deletion of {prefix}")
        return count
