"""A bounded folder of files that the processes of a node share.

A file is moved in in one step, fetched once per node (whoever holds its lock file fetches, everybody else waits), and
deleted, oldest first, only if this cache fetched it and nobody on the node uses it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path, PurePosixPath

from .client import HubError, Patience, bytes_below, part_of


def write(path: Path, text: str):
    """Atomically, so that another process never reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def receipt_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.receipt")


def complete(path: Path) -> bool:
    """Whether the file is here, whole, and ours."""
    try:
        return path.stat().st_size == json.loads(receipt_of(path).read_text())["size"]
    except (OSError, ValueError):
        return False


def try_lock(descriptor, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


class Cache:
    """Below `root`: files/ (each with a receipt) and locks/ (one empty file per file: held alone while it is fetched or
    deleted, shared while in use, freed by the kernel when its process dies)."""

    def __init__(self, root: Path, max_bytes: float, log):
        self.root, self.max_bytes, self.log, self.warned = root, max_bytes, log, False
        self.pins: dict[Path, tuple[str, int]] = {}  # cached file -> (name, its lock, held shared)
        self.mutex = threading.Lock()

    def take(self, name: str, key: str, patience: Patience, bring) -> str:
        """Local path of the file, kept until release(name). Any rank, any thread. `key` tells the contents of a name apart,
        so that an overwritten shard is another file. bring(folder): download it there -> (file, facts for the receipt)."""
        file = PurePosixPath(name)
        path = self.root / "files" / file.parent / f"{file.stem}.{key[:16]}{file.suffix}"
        with self.mutex:
            if path in self.pins:
                return str(path)
        lock = self._open_lock(path)
        try:
            while not (try_lock(lock, fcntl.LOCK_SH) and complete(path)):
                fcntl.flock(lock, fcntl.LOCK_UN)
                if try_lock(lock, fcntl.LOCK_EX):
                    if not complete(path):
                        self._fill(path, bring)
                elif patience.left > 0:  # somebody else of this node fetches it
                    time.sleep(0.05)
                    patience.seen(bytes_below(part_of(path)))
                else:
                    text = f"another process of this machine fetches it, without progress for {patience.seconds:.0f} s"
                    raise HubError(f"{self.root.name}: {name}: {text}: look at what that one waits for")
            with contextlib.suppress(OSError):
                os.utime(receipt_of(path))  # the age that eviction goes by
            with self.mutex:
                if path in self.pins:
                    os.close(lock)  # another thread of ours was faster
                else:
                    self.pins[path] = (name, lock)
        except BaseException:
            os.close(lock)
            raise
        self.evict()
        return str(path)

    def release(self, name: str):
        with self.mutex:
            for path in [p for p, (pinned, _) in self.pins.items() if pinned == name]:
                os.close(self.pins.pop(path)[1])
        self.evict()

    def _open_lock(self, path: Path) -> int:
        name = hashlib.sha256(str(path.relative_to(self.root)).encode()).hexdigest()[:24]
        path.parent.mkdir(parents=True, exist_ok=True)
        (self.root / "locks").mkdir(exist_ok=True)
        return os.open(self.root / "locks" / name, os.O_RDWR | os.O_CREAT, 0o666)

    def _fill(self, path: Path, bring):
        """With the lock held: download, check, receipt, rename. A receipt without its file means nothing."""
        if path.exists() and not receipt_of(path).exists():
            raise HubError(f"{path} exists, but this cache did not fetch it: move it away", final=True)
        try:
            got, facts = bring(part_of(path))
            write(receipt_of(path), json.dumps(facts | {"size": got.stat().st_size}))
            os.replace(got, path)
        finally:
            shutil.rmtree(part_of(path), ignore_errors=True)

    def evict(self):
        """Delete what was used longest ago until max_bytes are kept: only what has a receipt and nobody here uses."""
        try:
            turn = open(self.root / "locks" / "evict", "a")
        except OSError:
            return  # no cache yet
        with turn:
            if try_lock(turn, fcntl.LOCK_EX):  # else somebody is at it
                self._evict_alone()

    def _evict_alone(self):
        kept = []
        for base, folders, names in os.walk(self.root / "files"):
            folders[:] = [f for f in folders if not f.endswith(".part")]  # downloads come and go there
            for path in (Path(base, n[1 : -len(".receipt")]) for n in names if n.endswith(".receipt")):
                with contextlib.suppress(OSError):
                    if complete(path):
                        kept.append((receipt_of(path).stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= self.max_bytes:
                return
            lock = self._open_lock(path)
            if try_lock(lock, fcntl.LOCK_EX):
                path.unlink(missing_ok=True)
                receipt_of(path).unlink(missing_ok=True)
                total -= size
            os.close(lock)
        if total > self.max_bytes and not self.warned:
            self.warned = True
            text = f"{total / 1e9:.2f} GB of shards are in use at once, more than cache_gb={self.max_bytes / 1e9:g}"
            self.log(f"[hub] {text}: nothing that is needed is deleted; raise cache_gb if the disk allows")
