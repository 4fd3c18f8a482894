"""What the ranks write for each other in the launcher's store, and the thread of each that ends it when one has failed.

The one idea: ranks tell each other how they are over the launcher's key-value store, not over collectives. A collective
waits for the very rank that is stuck; the store answers while the main thread hangs in C++ and survives any worker.
The first failure that reaches the key `fail` is *the* failure: all ranks print it, write it to status.json and end.

Who is blamed:
* a rank that raises, or that passes its deadline outside a collective, names itself;
* a killed process is named by the ranks of its machine, a silent one by its neighbour in the ring of heartbeats;
* a rank inside a collective is a victim and speaks last; then nobody is named, rather than somebody innocent.

torch is imported inside functions: this file is loaded before the environment is set. References: TCPStore of
torch.distributed; NVIDIA's nvidia-resiliency-ext (section deadlines).
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta

from . import failures
from .failures import NOBODY, first_line

POLL = 0.2  # seconds between looks
LOST = {"cpu": 10.0, "cuda": 30.0}  # without a heartbeat; a CUDA call may hold the interpreter for a while
NEIGHBOURS = 3.0  # seconds more, in which a culprit, or its neighbour, speaks before its victims
GRACE = 2.0  # seconds for the main thread to leave by itself once a failure is known
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


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

        by_hand, soon = self.torchrun is None, min(self.timeout, timedelta(seconds=30))
        options = dict(wait_for_workers=False, timeout=self.timeout if by_hand else soon)
        if by_hand and self.rank == 0 and self.server is None:
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
                return self.store_lost(f"lost ({first_line(e)})")
            return self.record(f"lost its peers in a collective: {failures.describe(error)}", rank=NOBODY)
        more = {"reason": error.reason} if isinstance(error, failures.Stopped) else {}
        code, rank = failures.exit_code_of(error), getattr(error, "rank", None)
        return self.record(failures.describe(error), code, rank, **more)

    def store_lost(self, how: str) -> dict:
        """The failure of whoever hosts the store; it can't be written there."""
        rank, host = 0, self.launcher.address
        if self.launcher.torchrun is not None:
            rank, host = NOBODY, f"the launcher on {host}"
        why = f"control store {how}: {host} is gone or unreachable"
        return dict(rank=rank, host=host, stage=self.task[0], why=why, code=71)

    def check(self):
        """Raise the failure that any rank has written."""
        if not self.known():
            return
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


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR1 only set a flag, which the ranks agree on. A second SIGINT leaves at once: python runs
    no handler while the main thread waits inside a collective, so the watchdog counts them on the wake-up pipe."""

    def __init__(self, says: bool = True):
        self.name, self.when, self.interrupts, self.says = None, 0.0, 0, says
        self.pipe, end = socket.socketpair()
        self.pipe.setblocking(False)
        end.setblocking(False)
        signal.set_wakeup_fd(end.detach(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number, frame=None):
        if self.name is None:
            self.name, self.when = signal.Signals(number).name, time.monotonic()
            if self.says:  # a step and its save can take a minute: nobody should wonder, or insist
                again = "; a second Ctrl-C ends it at once" if number == signal.SIGINT else ""
                text = f"[nova] {self.name}: stops after this step or stage, nothing is lost{again}"
                print(text, file=sys.stderr, flush=True)

    def insisted(self) -> bool:
        """Has SIGINT come twice? Called by the watchdog."""
        try:
            for number in self.pipe.recv(64):
                self.interrupts += number == signal.SIGINT
                if number in SIGNALS:
                    self._note(number)
        except BlockingIOError:
            pass
        return self.interrupts > 1


class Watchdog:
    """Looks at the board, at this rank's deadline and at its neighbours; `leave(failure)` ends the process."""

    def __init__(self, board: Board, signals: StopSignals, leave):
        self.board, self.signals, self.leave = board, signals, leave
        self.closed, self.pulse = threading.Event(), time.monotonic()
        self.table, self.peers = process_table(), {}  # {rank: its card}, of this machine's other ranks
        self.heard = (None, time.monotonic())  # the neighbour's last beat, and when it came
        bodies = self._watch, self._watch_the_watchdog
        self.threads = [threading.Thread(target=f, daemon=True) for f in bodies]

    def start(self):
        for thread in self.threads:
            thread.start()

    def stop(self):
        """Both threads are gone: inside the store while Python ends, one would abort the process."""
        self.closed.set()
        for thread in self.threads:
            thread.join(5)

    def _watch(self):
        import torch.distributed as dist

        beaten = 0.0
        while not self.closed.wait(POLL):
            now = time.monotonic()
            try:
                if self.signals.insisted():
                    self.blame("second SIGINT: ended at once, unsaved", code=130, reason="SIGINT")
                if self.board.known():
                    time.sleep(GRACE)
                    self.leave(self.board.failure)
                self.check_deadline(now)
                self.check_processes()
                if now - beaten > 1:
                    beaten = now
                    self.check_neighbour(now)
                self.pulse = time.monotonic()
            except (dist.DistNetworkError, dist.DistStoreError) as e:
                if not self.closed.is_set():
                    self.leave(self.board.store_lost(f"lost ({first_line(e)})"))
                return

    def blame(self, why: str, **more):
        self.leave(self.board.record(why, **more))

    def check_deadline(self, now: float):
        """Is the main thread late with what it does? A victim lets the culprit, or its neighbour, speak first."""
        until = self.board.task[1]
        if until is None or now < until:
            return
        waits, where = whereabouts(self.board.gpu)
        if waits and now < until + self.board.lost + NEIGHBOURS:
            return
        faulthandler.dump_traceback(all_threads=True)
        why = "still waiting for other ranks after the deadline" if waits else "deadline passed"
        self.blame(f"{why}, at {where}", rank=NOBODY if waits else None)

    def check_processes(self):
        """A rank of this machine whose process is gone without a bye was killed: no need to wait for its heartbeat."""
        launcher = self.board.launcher
        first = launcher.rank - launcher.local_rank
        for rank in range(first, first + launcher.local_world):
            if rank not in self.peers and rank != launcher.rank and (card := self.board.card(rank)):
                self.peers[rank] = card
        for rank, card in self.peers.items() if self.table else ():
            if card["table"] != self.table:
                continue
            state = process_state(card["pid"])
            gone = state is None or state[0] in "ZX" or state[1] != card["state"][1]
            said = gone and (self.board.store.check([f"bye/{rank}"]) or self.board.known())  # its last word
            if gone and not said:
                self.blame(f"process {card['pid']} of rank {rank} is gone", rank=rank)

    def check_neighbour(self, now: float):
        """Send a heartbeat, and listen for that of the next rank in the ring."""
        store, neighbour = self.board.store, (self.board.rank + 1) % self.board.world
        store.add(f"beat/{self.board.rank}", 1)
        beat = store.get(f"beat/{neighbour}") if store.check([f"beat/{neighbour}"]) else None
        if beat is None or beat != self.heard[0]:
            self.heard = (beat, now)
        elif now - self.heard[1] > self.board.lost and not store.check([f"bye/{neighbour}"]):
            self.blame(f"rank {neighbour} sent no heartbeat for {now - self.heard[1]:.0f} s", rank=neighbour)

    def _watch_the_watchdog(self):
        """A store whose host vanished without closing the connection blocks the watchdog itself."""
        last = time.monotonic()
        while not self.closed.wait(1):
            now = time.monotonic()
            if now - last > 4:  # it was this process that stood still: count again from here
                self.pulse = now
            last = now
            if now - self.pulse > self.board.lost + GRACE:
                self.leave(self.board.store_lost(f"silent for {now - self.pulse:.0f} s"))


class Ending:
    """What stays when this process has ended: status.json, a line on stderr, the exit code."""

    def __init__(self, board: Board, out_dir: str, log):
        self.board, self.out_dir, self.log = board, out_dir, log
        self.info = {}  # facts for status.json
        self.guest = failures.occupied(out_dir)
        self.leaving = threading.Lock()

    def note(self, **info):
        """Facts for status.json, such as saved=STEP. The supervisor counts restarts that do not move `saved`."""
        self.info.update(info)
        if self.board.rank == 0:
            self.write("running")

    def write(self, status: str, code: int | None = None, **more):
        """A full disk ends no run; a folder that can't be written fails its own check."""
        if not self.guest:
            try:
                failures.write_status(self.out_dir, status, code, **self.info, **more)
            except OSError as e:
                self.log(f"status.json is not written: {e}")

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
        keep = {k: f[k] for k in ("rank", "host", "stage", "why", "reason") if k in f}
        self.write(failures.CODES.get(f["code"], "failed"), f["code"], **keep)
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
