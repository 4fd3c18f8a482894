"""What the ranks write for each other in the launcher's store, and how a process ends once one of them has failed.

The one idea: ranks tell each other how they are over the launcher's key-value store, not over collectives. A collective
waits for the very rank that is stuck; the store answers while the main thread hangs in C++ and survives any worker.
The first failure that reaches the key `fail` is *the* failure: all ranks print it, write it to status.json and end. torch
is imported inside functions: this file is loaded before the environment is set. Reference: TCPStore of torch.distributed.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta

from . import failures
from .failures import NOBODY

POLL = 0.2  # seconds between looks
LOST = {
    "cpu": 10.0,
    "cuda": 30.0,
}  # seconds without a heartbeat; a CUDA call may hold the interpreter for a while
NEIGHBOURS = 3.0  # seconds more, in which a culprit, or its neighbour, speaks before its victims


class Launcher:
    """What this process was told when it was started: who it is among the ranks, and where the store is."""

    def __init__(self, environ, timeout: float):
        self.rank, self.world = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        self.local_rank = int(environ.get("LOCAL_RANK", 0))
        self.local_world = int(environ.get("LOCAL_WORLD_SIZE", 1))
        self.torchrun = environ.get("TORCHELASTIC_RUN_ID")
        self.address = environ.get("MASTER_ADDR", "127.0.0.1")
        self.port = int(environ.get("MASTER_PORT", 0)) if "RANK" in environ else 0
        self.timeout, self.server = timedelta(seconds=timeout), None

    def connect(self):
        """A connection of its own. torchrun's agent hosts the store before its workers start, and outlives them: if it
        does not answer within half a minute it is dead, and this worker an orphan. By hand rank 0 hosts it, and may start
        later than others; itself it reaches at once, or it has no loopback device."""
        import torch.distributed as dist

        soon = min(self.timeout, timedelta(seconds=30))
        options = dict(wait_for_workers=False, timeout=soon if self.torchrun is not None else self.timeout)
        if self.torchrun is None and self.rank == 0 and self.server is None:
            hosting = options | dict(is_master=True, timeout=soon)
            self.server = dist.TCPStore(self.address, self.port, **hosting)
            self.port = self.server.port
        store = dist.TCPStore(self.address, self.port, is_master=False, **options)
        store.set_timeout(self.timeout)
        return dist.PrefixStore(f"nova/{self.torchrun or ''}", store)


class Board:
    """The store as all ranks see it: `pid/RANK` who each is, `beat/RANK` and `bye/RANK` whether it lives, `fail` the
    failure; and what this rank is doing. Main thread and watchdog share it: the store's client takes one call at a time."""

    def __init__(self, launcher: Launcher, store):
        self.launcher, self.rank, self.world, self.store = launcher, launcher.rank, launcher.world, store
        self.failure = None
        self.task = ("start", None)  # what the main thread does, and until when (monotonic seconds)
        self.gpu = False
        card = dict(host=socket.gethostname(), table=process_table(), pid=os.getpid())
        card["state"] = process_state(os.getpid())
        store.set(f"pid/{self.rank}", json.dumps(card))
        store.set(f"beat/{self.rank}", "0")  # a rank that stops before its first beat must be visible

    @property
    def lost(self) -> float:
        """Seconds without a heartbeat after which a rank is lost."""
        return LOST["cuda" if self.gpu else "cpu"]

    def card(self, rank: int) -> dict | None:
        """{host, table, pid, state}: who the rank is; None before it has arrived."""
        return json.loads(self.store.get(f"pid/{rank}")) if self.store.check([f"pid/{rank}"]) else None

    def without(self, key: str) -> list[int]:
        """The ranks that have not written `key/RANK`."""
        return [r for r in range(self.world) if not self.store.check([f"{key}/{r}"])]

    def known(self) -> bool:
        """Has any rank failed?"""
        if self.failure is None and self.store.check(["fail"]):
            self.failure = json.loads(self.store.get("fail"))
        return self.failure is not None

    def record(self, why: str, code: int = 71, rank: int | None = None, stage: str | None = None, **more):
        """Write the failure unless one is written already. Returns the one that counts. `rank`: this one if None."""
        rank = self.rank if rank is None else rank
        note = dict(rank=rank, host="?", stage=stage or self.task[0], why=why, code=code, **more)
        try:
            note["host"] = (self.card(rank) or note)["host"]
            return json.loads(self.store.compare_set("fail", "", json.dumps(note)))
        except Exception:  # the store is gone: this rank's own view is all there is
            return note

    def record_error(self, error: BaseException) -> dict:
        """Record this rank's error. One that came out of a collective waits first for the culprit to be named."""
        self.task = (self.task[0], None)
        if failures.is_peer_loss(error):
            try:
                until = time.monotonic() + self.lost + NEIGHBOURS
                while time.monotonic() < until:
                    if self.known():
                        return self.failure
                    time.sleep(POLL)
            except RuntimeError as e:
                return self.store_lost(f"lost ({failures.first_line(e)})")
            return self.record(f"lost its peers in a collective: {failures.describe(error)}", rank=NOBODY)
        more = {"reason": error.reason} if isinstance(error, failures.Stopped) else {}
        return self.record(
            failures.describe(error), failures.exit_code_of(error), getattr(error, "rank", None), **more
        )

    def store_lost(self, how: str) -> dict:
        """The failure of whoever hosts the store; it can't be written there."""
        rank, host = 0, self.launcher.address
        if self.launcher.torchrun is not None:
            rank, host = NOBODY, f"the launcher on {host}"
        why = f"control store {how}: {host} is gone or unreachable"
        return dict(rank=rank, host=host, stage=self.task[0], why=why, code=71)

    def raise_failure(self):
        f = self.failure
        if f["code"] == 3:
            raise failures.Stopped(f.get("reason", "?"), f["why"])
        raise failures.RankFailed(f["rank"], self.sentence(f), f["code"])

    def sentence(self, f: dict) -> str:
        stop = f["code"] == 3
        if self.world == 1:
            return f"{'stopped' if stop else 'failed'} in '{f['stage']}': {f['why']}"
        who = f"rank {f['rank']} ({f['host']})" if f["rank"] != NOBODY else "no single rank to blame"
        return f"first {'to stop' if stop else 'failure'}: {who} in '{f['stage']}': {f['why']}"


class Ending:
    """What stays when this process has ended: status.json, a line on stderr, the exit code."""

    def __init__(self, board: Board, out_dir: str, log):
        self.board, self.out_dir, self.log = board, out_dir, log
        self.info = {}  # facts for status.json
        self.guest = failures.occupied(out_dir)
        self.leaving = threading.Lock()

    def note(self, **info):
        """Facts for status.json, such as saved=STEP. The supervisor counts restarts that do not move `saved`."""
        self.info |= info
        if self.board.rank == 0 and not self.guest:
            try:
                failures.write_status(self.out_dir, "running", None, **self.info)
            except (
                OSError
            ) as e:  # a full disk ends no run; a folder that can't be written fails its own check
                self.log(f"status.json is not written: {e}")

    def write(self, f: dict):
        """status.json says how the run has failed or stopped."""
        if self.guest:
            return
        keep = {k: f[k] for k in ("rank", "host", "stage", "why", "reason") if k in f}
        try:
            failures.write_status(
                self.out_dir, failures.CODES.get(f["code"], "failed"), f["code"], **self.info, **keep
            )
        except OSError as e:
            print(f"[nova] rank {self.board.rank}: status.json not written: {e}", file=sys.stderr, flush=True)

    def leave(self, f: dict):
        """End this process now, whatever its main thread is in: say why, write the status, no unwinding."""
        self.leaving.acquire(timeout=5)  # watchdog and main thread may both come here
        end = threading.Timer(5, self.exit, (f["code"],))  # also if the file system hangs
        end.daemon = True
        end.start()
        rank = self.board.rank
        if f["rank"] == NOBODY and threading.current_thread() is not threading.main_thread():
            print(f"[nova] rank {rank} was at {whereabouts()[1]}", file=sys.stderr)
        who = f"rank {rank} stops; " if self.board.world > 1 else ""
        print(f"[nova] {who}{self.board.sentence(f)}", file=sys.stderr, flush=True)
        self.write(f)
        sys.stdout.flush()
        self.exit(f["code"])

    def exit(self, code: int):
        """Under torchrun an agreed stop exits 0: it would turn 3 into a failure. Python's own end can abort on threads
        that are inside C++: this one can't."""
        os._exit(0 if self.board.launcher.torchrun is not None and code == 3 else code)


def whereabouts(gpu: bool = False) -> tuple[bool, str]:
    """(does the main thread wait for other ranks, the line of ours that it is in)."""
    stack = sys._current_frames().get(threading.main_thread().ident)
    frames = traceback.extract_stack(stack)[::-1] if stack else []
    ours = [f for f in frames if f"{os.sep}torch{os.sep}" not in f.filename] or frames
    where = f"{os.path.basename(ours[0].filename)} line {ours[0].lineno}: {ours[0].line}" if ours else "?"
    return failures.in_collective(frames, gpu), where


def process_state(pid: int) -> list[str] | None:
    """[state letter, start time] of a process of this machine, or None."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            fields = f.read().rpartition(")")[2].split()
        return [fields[0], fields[19]]
    except (OSError, IndexError):
        return None


def process_table() -> str | None:
    """Names the process table that this process is in: two ranks that share it can see each other's process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as f:
            return f.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
