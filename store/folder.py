"""The folder of a run: its lock, whose it is, which checkpoints lie in it, and which of them go.

Everything in `Folder` is rank 0's work; the other ranks learn the run's id from it.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time

from .sealed import NAME, CheckpointError, read_manifest, to_json, write_text

ROTATED = ("latest", "best", "milestone")  # kinds of which the newest few are kept; `final` is never deleted
SLACK = 2  # local checkpoints of a kind kept beyond `keep` while the Hub has none of them yet
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def by_serial(names) -> list[str]:
    """The names of checkpoints among `names`, oldest save first."""
    return sorted((n for n in names if NAME.fullmatch(n)), key=serial_of)


def step_of(name: str) -> int:
    return int(NAME.search(name)[1])


def serial_of(name: str) -> int:
    """The number of the save in its run."""
    return int(NAME.search(name)[3])


def check_shared_folder(folder: str, agree, patience: float = 10.0):
    """Raise CheckpointError unless every rank sees what rank 0 writes: a checkpoint's files come from all of them."""
    problem, token, marker = None, secrets.token_hex(8), os.path.join(folder, ".shared-folder")
    if agree.rank == 0:
        try:
            os.makedirs(folder, exist_ok=True)
            write_text(marker, token)
        except OSError as e:
            problem = CheckpointError(f"out_dir {folder} can't be written: {e}; set --out_dir=FOLDER")
    agree.verdict(problem, "shared folder")
    token, seen, end = agree.broadcast(token), None, time.monotonic() + patience
    while seen != token and time.monotonic() < end:  # a network file system may show a new file late
        try:
            with open(marker, encoding="utf-8") as f:
                seen = f.read()
        except OSError:
            time.sleep(0.2)
    if seen != token:
        text = f"rank {agree.rank} does not see rank 0's files in {folder}"
        problem = CheckpointError(f"{text}: several nodes need one shared file system")
    agree.verdict(problem, "shared folder")
    if agree.rank == 0:
        os.unlink(marker)


class Folder:
    """The checkpoints of one run in one folder, which one process at a time may hold."""

    def __init__(self, path: str, keep: int, log):
        self.path, self.keep, self.log = os.path.abspath(path), keep, log
        self.run_id, self.serial, self.lock = "", 0, None

    def claim(self, resume: str, owner_elsewhere):
        """Lock the folder, decide which run it belongs to, clear away a killed save's leftovers.

        owner_elsewhere: called with the folder's name where nothing is here; the run to go on with, or None."""
        os.makedirs(self.path, exist_ok=True)
        self._lock()
        record = os.path.join(self.path, "run.json")
        owner, earlier = self._owner(record)
        if resume != "never":
            owner = owner or owner_elsewhere(self._stem())
        elif owner:
            owner, earlier = None, [*earlier, owner]
            self.log(f"--resume=never: a new run begins in {self.path}; those of {earlier} stay untouched")
        now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self.run_id = owner or f"{self._stem()}-{now}-{secrets.token_hex(2)}"
        if not RUN_ID.fullmatch(self.run_id):
            raise CheckpointError(f"run id {self.run_id!r}: use letters, digits, '.', '_' and '-'")
        write_text(record, to_json({"run_id": self.run_id, "earlier": earlier}, "run.json"))
        for name in os.listdir(self.path):  # `.part` is a download, which goes on
            path = os.path.join(self.path, name)
            if name.startswith(f".tmp-{self.run_id}+") and not name.endswith(".part"):
                self.log(f"removing {name}, left by a save that was killed")
                shutil.rmtree(path, ignore_errors=True)
            if name in ("run.json.tmp", "published.json.tmp"):
                os.unlink(path)
            if NAME.search(name):  # also of damaged and of other runs': a serial number is never used twice
                self.serial = max(self.serial, serial_of(name))

    def _lock(self):
        self.lock = open(os.path.join(self.path, ".lock"), "a+")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            self.lock.seek(0)
            text = f"{self.path} is in use by another run ({self.lock.read().strip()})"
            raise CheckpointError(f"{text}: stop that one, or choose another out_dir") from None
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {os.uname().nodename}, since {time.strftime('%F %T')}\n")
        self.lock.flush()

    def unlock(self):
        if self.lock is not None:
            self.lock.close()  # which releases it, as the end of the process does

    def _owner(self, record: str) -> tuple[str | None, list[str]]:
        """(the run that the folder belongs to, or None; the runs that were there before it)."""
        try:
            with open(record, encoding="utf-8") as f:
                data = json.load(f)
            return data["run_id"], data["earlier"]
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            self.log(f"{record} is damaged; the checkpoints beside it say whose they are")
        owners = sorted({m["run_id"] for m in self.manifests().values()})
        if len(owners) > 1:
            raise CheckpointError(f"{self.path} holds checkpoints of several runs and no run.json: {owners}")
        return (owners[0], []) if owners else (None, [])

    def _stem(self) -> str:
        """The run folder's name, with which run ids begin: that is how a run finds itself on the Hub."""
        parts = [p for p in self.path.split(os.sep) if p not in ("", "checkpoints")]
        return re.sub(r"[^A-Za-z0-9_]+", "_", parts[-1] if parts else "run").strip("_") or "run"

    def manifests(self) -> dict[str, dict]:
        """{name: manifest} of all folders here that have an intact manifest, of whatever run, oldest save first."""
        found = {}
        for name in by_serial(os.listdir(self.path)):
            try:
                manifest = read_manifest(os.path.join(self.path, name))
            except (CheckpointError, OSError):
                continue
            if manifest.get("name") == name:  # else a copy that somebody made
                found[name] = manifest
        return found

    def mine(self) -> dict[str, dict]:
        """`manifests` of this run."""
        return {n: m for n, m in self.manifests().items() if m["run_id"] == self.run_id}

    def rotate(self, kind: str, may_delete, full: bool = False):
        """Delete this run's oldest checkpoints of a kind that may_delete(name, it and all younger ones); on a `full` disk
        also the others. What it can't delete it only logs."""
        if kind not in ROTATED:
            return
        try:
            mine = [n for n, m in self.mine().items() if m["kind"] == kind]
            for i, name in enumerate(mine[: -self.keep]):
                if full:
                    self.log(f"deleting {name} to make room, on the Hub or not: the disk is full")
                if full or may_delete(name, mine[i:]):
                    doomed = os.path.join(self.path, f".tmp-{self.run_id}+deleting-{name}")
                    os.rename(os.path.join(self.path, name), doomed)  # a half-deleted checkpoint is not one
                    shutil.rmtree(doomed)
        except Exception as e:  # the save itself is done
            self.log(f"old checkpoints could not be deleted: {e}")

    def set_aside(self, name: str):
        """Rename a damaged checkpoint, so that rotation does not keep it in place of a good one."""
        try:
            os.rename(os.path.join(self.path, name), os.path.join(self.path, "damaged-" + name))
        except OSError as e:
            self.log(f"{name} stays where it is: {e}")

    def were_set_aside(self) -> list[str]:
        """This run's damaged checkpoints that earlier launches renamed. They too forbid a fresh start."""
        found = []
        for name in sorted(os.listdir(self.path)):
            if name.startswith("damaged-") and NAME.fullmatch(name.removeprefix("damaged-")):
                try:
                    owner = read_manifest(os.path.join(self.path, name))["run_id"]
                except (CheckpointError, OSError):
                    owner = self.run_id
                if owner == self.run_id:
                    found.append(name)
        return found
