"""How the ranks of a run agree, and how all of them end when one fails.

The one idea: ranks tell each other how they are over the launcher's key-value store, not over collectives. A collective
waits for the very rank that is stuck; the store answers while the main thread hangs in C++ and survives any worker.
Every rank has a watchdog thread on a connection of its own. The first failure that reaches the key `fail` is *the*
failure: all ranks print it, write it to status.json and end, within seconds. Who is blamed:

* a rank that raises, or that passes its deadline outside a collective, names itself;
* a killed process is named by the ranks of its machine, a silent one by its neighbour in the ring of heartbeats;
* a rank inside a collective is a victim and speaks last; then nobody is named, rather than somebody innocent.

Values travel over a small CPU group beside the model's own (`Exchange`). torch is imported inside functions: this file
is loaded before the environment is set. References: TCPStore of torch.distributed; NVIDIA's nvidia-resiliency-ext
(section deadlines); torchtitan (two collective timeouts).
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
from contextlib import contextmanager
from datetime import timedelta

from .failures import (
    CODES,
    RankFailed,
    StartupError,
    Stopped,
    describe,
    exit_code_of,
    first_line,
    in_collective,
    is_peer_loss,
    occupied,
    write_status,
)

POLL = 0.2  # seconds between looks of the watchdog
GRACE = 2.0  # seconds for the main thread to leave by itself once a failure is known
# Seconds without a heartbeat; a CUDA call may hold the interpreter for a while.
LOST = {"cpu": 10.0, "cuda": 30.0}
SAVER = "saver"  # description of the group that checkpoint.py's saver threads talk over
NOBODY = -1  # the culprit where none can be named: unknown is allowed, wrong is not


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR1 only set a flag, which the ranks agree on. A second SIGINT leaves at once: python runs
    no handler while the main thread waits inside a collective, so the watchdog counts them on the wake-up pipe."""

    def __init__(self, says: bool = True):
        self.name, self.when, self.interrupts, self.says = None, 0.0, 0, says
        self.pipe, end = socket.socketpair()
        self.pipe.setblocking(False)
        end.setblocking(False)
        signal.set_wakeup_fd(end.detach(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number, frame=None):
        if self.name is None:
            self.name, self.when = signal.Signals(number).name, time.monotonic()
            if self.says:  # a step and its save can take a minute: nobody should wonder, or insist
                again = "; a second Ctrl-C ends it at once" if number == signal.SIGINT else ""
                print(
                    f"[nova] {self.name}: stops after this step or stage, nothing is lost{again}",
                    file=sys.stderr,
                    flush=True,
                )

    def insisted(self) -> bool:
        """Has SIGINT come twice? Called by the watchdog."""
        try:
            for number in self.pipe.recv(64):
                self.interrupts += number == signal.SIGINT
                if number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                    self._note(number)
        except BlockingIOError:
            pass
        return self.interrupts > 1


def process_state(pid: int) -> tuple[str, str] | None:
    """(state letter, start time) of a process of this machine, or None."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            fields = f.read().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None


def place() -> str | None:
    """Names the process table that this process is in: two ranks of the same place can see each other's process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as f:
            return f.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


class Control:
    """This rank's side of the control plane: two store connections, the watchdog, stages and deadlines."""

    def __init__(self, settings, environ=os.environ, log=print):
        import torch.distributed as dist

        self.settings, self.log, self.environ = settings, log, environ
        names = dict(rank="RANK", world="WORLD_SIZE", local_rank="LOCAL_RANK", local_world="LOCAL_WORLD_SIZE")
        for name, variable in names.items():
            setattr(self, name, int(environ.get(variable, "WORLD" in variable)))
        self.torchrun = "TORCHELASTIC_RUN_ID" in environ
        self.device, self.lost = None, LOST["cpu"]
        self.info, self.count, self.failure, self.closed = {}, 0, None, threading.Event()
        self.guest = occupied(settings.out_dir)
        self.task = ("start", None)  # what the main thread does, and until when (monotonic seconds)
        self.timeout = timedelta(seconds=settings.stage_timeout)
        self.address, hosts = environ.get("MASTER_ADDR", "127.0.0.1"), not self.torchrun and self.rank == 0
        self.port = int(environ.get("MASTER_PORT", 0)) if "RANK" in environ else 0
        self.prefix = f"nova/{environ.get('TORCHELASTIC_RUN_ID', '')}"
        try:
            if hosts:  # under torchrun the agent hosts it, and it outlives every worker
                # to reach itself: not without a loopback device
                soon = min(self.timeout, timedelta(seconds=30))
                self.server = dist.TCPStore(
                    self.address, self.port, is_master=True, wait_for_workers=False, timeout=soon
                )
                self.port = self.server.port
            self.store, watched = self._connect(), self._connect()
        except (dist.DistNetworkError, dist.DistStoreError) as e:
            text = f"no answer from rank 0's store at {self.address}:{self.port}: {first_line(e)}"
            raise StartupError(text, rank=0) from None
        self.place, state = place(), process_state(os.getpid())
        card = [self.place, os.getpid(), state and state[1], socket.gethostname()]
        self.store.set(f"pid/{self.rank}", json.dumps(card))
        self.store.set(f"beat/{self.rank}", "0")  # a rank that stops before its first beat must be visible
        self.signals, self.leaving = StopSignals(says=self.rank == 0), threading.Lock()
        self.pulse = time.monotonic()
        bodies = ((self._watch, (watched,)), (self._watch_the_watchdog, ()))
        self.threads = [threading.Thread(target=body, args=args, daemon=True) for body, args in bodies]
        for thread in self.threads:
            thread.start()

    def _connect(self):
        """A connection of its own. torchrun's store is there before its workers are: if it does not answer within
        half a minute its launcher is dead, and this worker an orphan. By hand, rank 0 may start later."""
        import torch.distributed as dist

        patience = min(self.timeout, timedelta(seconds=30)) if self.torchrun else self.timeout
        store = dist.TCPStore(
            self.address, self.port, is_master=False, wait_for_workers=False, timeout=patience
        )
        store.set_timeout(self.timeout)
        return dist.PrefixStore(self.prefix, store)

    # -- failures --
    def record(
        self, why: str, code: int = 71, rank: int | None = None, store=None, stage=None, **more
    ) -> dict:
        """Write the failure unless one is written already. Returns the one that counts."""
        rank, stage = self.rank if rank is None else rank, stage or self.task[0]
        note = dict(rank=rank, host=self._host_of(rank, store), stage=stage, why=why, code=code, **more)
        try:
            return json.loads((store or self.store).compare_set("fail", "", json.dumps(note)))
        except Exception:  # the store is gone: this rank's own view is all there is
            return note

    def _host_of(self, rank: int, store=None) -> str:
        try:
            store = store or self.store
            return json.loads(store.get(f"pid/{rank}"))[3] if store.check([f"pid/{rank}"]) else "?"
        except Exception:
            return "?"

    def record_error(self, error: BaseException) -> dict:
        """Record this rank's error. One that came out of a collective waits first for the culprit to be named."""
        self.task = (self.task[0], None)
        if is_peer_loss(error):
            try:
                until = time.monotonic() + self.lost + 3
                while time.monotonic() < until:
                    if self._known():
                        return self.failure
                    time.sleep(POLL)
            except RuntimeError as e:
                return self._store_lost(f"control store lost ({first_line(e)})")
            return self.record(f"lost its peers in a collective: {describe(error)}", rank=NOBODY)
        more = {"reason": error.reason} if isinstance(error, Stopped) else {}
        return self.record(describe(error), exit_code_of(error), getattr(error, "rank", None), **more)

    def _known(self, store=None) -> bool:
        store = store or self.store
        if self.failure is None and store.check(["fail"]):
            self.failure = json.loads(store.get("fail"))
        return self.failure is not None

    def raise_failure(self):
        f = self.failure
        if f["code"] == 3:
            raise Stopped(f.get("reason", "?"), f["why"])
        raise RankFailed(f["rank"], self.sentence(f), f["code"])

    def sentence(self, f: dict) -> str:
        if self.world == 1:
            return f"{'stopped' if f['code'] == 3 else 'failed'} in '{f['stage']}': {f['why']}"
        who = f"rank {f['rank']} ({f['host']})" if f["rank"] != NOBODY else "no single rank to blame"
        return f"first {'to stop' if f['code'] == 3 else 'failure'}: {who} in '{f['stage']}': {f['why']}"

    def leave(self, f: dict):
        """End this process now, whatever its main thread is in: say why, write the status, no unwinding."""
        self.leaving.acquire(timeout=5)  # watchdog and main thread may both come here
        end = threading.Timer(5, os._exit, (self.final_code(f["code"]),))  # also if the file system hangs
        end.daemon = True
        end.start()
        if f["rank"] == NOBODY and threading.current_thread() is not threading.main_thread():
            print(f"[nova] rank {self.rank} was at {self._whereabouts()[1]}", file=sys.stderr)
        who = f"rank {self.rank} stops; " if self.world > 1 else ""
        print(f"[nova] {who}{self.sentence(f)}", file=sys.stderr, flush=True)
        self.write_failure(f)
        sys.stdout.flush()
        os._exit(self.final_code(f["code"]))

    def write_failure(self, f: dict):
        if self.guest:
            return
        keep = {k: f[k] for k in ("rank", "host", "stage", "why", "reason") if k in f}
        try:
            status = CODES.get(f["code"], "failed")
            write_status(self.settings.out_dir, status, f["code"], **self.info, **keep)
        except OSError as e:
            print(f"[nova] rank {self.rank}: status.json not written: {e}", file=sys.stderr, flush=True)

    def final_code(self, code: int) -> int:
        """Under torchrun an agreed stop exits 0: it would turn 3 into a failure."""
        return 0 if self.torchrun and code == 3 else code

    def note(self, **info):
        """Facts for status.json, such as saved=STEP. The supervisor counts restarts that do not move `saved`."""
        self.info |= info
        if self.rank == 0 and not self.guest:
            try:
                write_status(self.settings.out_dir, "running", None, **self.info)
            except OSError as e:
                # a full disk ends no run; a folder that can't be written fails its own check
                self.log(f"status.json is not written: {e}")

    # -- watchdog thread --
    def _watch(self, store):
        import torch.distributed as dist

        neighbour, seen = (self.rank + 1) % self.world, (None, time.monotonic())
        beat, beaten, peers = 0, 0.0, {}
        while not self.closed.wait(POLL):
            now = time.monotonic()
            try:
                if self.signals.insisted():
                    self.leave(
                        self.record(
                            "second SIGINT: ended at once, unsaved", 130, store=store, reason="SIGINT"
                        )
                    )
                if self._known(store):
                    time.sleep(GRACE)
                    self.leave(self.failure)
                self._check_deadline(store, now)
                self._check_processes(store, peers)
                if now - beaten > 1:
                    beat, beaten = beat + 1, now
                    store.set(f"beat/{self.rank}", str(beat))
                    value = store.get(f"beat/{neighbour}") if store.check([f"beat/{neighbour}"]) else None
                    if value != seen[0] or value is None:
                        seen = (value, now)
                    elif now - seen[1] > self.lost and not store.check([f"bye/{neighbour}"]):
                        why = f"rank {neighbour} sent no heartbeat for {now - seen[1]:.0f} s"
                        self.leave(self.record(why, rank=neighbour, store=store))
                self.pulse = time.monotonic()
            except (dist.DistNetworkError, dist.DistStoreError) as e:
                if not self.closed.is_set():
                    self.leave(self._store_lost(f"control store lost ({first_line(e)})"))
                return

    def _check_deadline(self, store, now: float):
        what, until = self.task
        if until is None or now < until:
            return
        waits, where = self._whereabouts()
        if waits and now < until + self.lost + 3:
            return  # a victim: let the culprit, or its neighbour, speak first
        faulthandler.dump_traceback(all_threads=True)
        why = "still waiting for other ranks after the deadline" if waits else "deadline passed"
        self.leave(self.record(f"{why}, at {where}", rank=NOBODY if waits else None, store=store, stage=what))

    def _whereabouts(self) -> tuple[bool, str]:
        """(does the main thread wait for other ranks, the line of ours that it is in)."""
        stack = sys._current_frames().get(threading.main_thread().ident)
        frames = traceback.extract_stack(stack)[::-1] if stack else []
        ours = [f for f in frames if f"{os.sep}torch{os.sep}" not in f.filename] or frames
        where = f"{os.path.basename(ours[0].filename)} line {ours[0].lineno}: {ours[0].line}" if ours else "?"
        return in_collective(frames, gpu=self.device is not None and self.device.type == "cuda"), where

    def _check_processes(self, store, peers: dict):
        """A rank of this machine whose process is gone without a bye was killed: no need to wait for its heartbeat."""
        first = self.rank - self.local_rank
        for rank in range(first, first + self.local_world):
            if rank == self.rank:
                continue
            if rank not in peers and store.check([f"pid/{rank}"]):
                peers[rank] = json.loads(store.get(f"pid/{rank}"))
            where, pid, started, _ = peers.get(rank, (None, 0, None, None))
            if where is None or where != self.place:
                continue
            state = process_state(pid)
            gone = state is None or state[0] in "ZX" or state[1] != started
            # its own last word counts
            if gone and not store.check([f"bye/{rank}"]) and not self._known(store):
                self.leave(self.record(f"process {pid} of rank {rank} is gone", rank=rank, store=store))

    def _store_lost(self, why: str) -> dict:
        rank = NOBODY if self.torchrun else 0
        host = f"the launcher on {self.address}" if self.torchrun else self.address
        why = f"{why}: {host} is gone or unreachable"
        return dict(rank=rank, host=host, stage=self.task[0], why=why, code=71)

    def _watch_the_watchdog(self):
        """A store whose host vanished without closing the connection blocks the watchdog itself."""
        last = time.monotonic()
        while not self.closed.wait(1):
            now = time.monotonic()
            if now - last > 4:  # it was this process that stood still: count again from here
                self.pulse = now
            last = now
            if now - self.pulse > self.lost + GRACE:
                self.leave(self._store_lost(f"control store silent for {now - self.pulse:.0f} s"))

    # -- stages and deadlines of the main thread --
    @contextmanager
    def stage(self, name: str, timeout: float | None = None):
        """One start-up stage: all ranks finish it, or all ranks end with the first failure. timeout in seconds."""
        timeout = timeout or self.settings.stage_timeout
        start, key, self.count = time.monotonic(), f"stage/{self.count}/{name}", self.count + 1
        self.task = (name, start + timeout)
        if self.rank == 0:
            self.log(f"stage {name} ...")
        try:
            self._check_stop("")
            yield
            if self.device is not None and self.device.type == "cuda":
                import torch

                torch.cuda.synchronize()  # an asynchronous error belongs to the stage that caused it
        except BaseException as e:
            self.failure = self.record_error(e)
            raise
        until = self.task[1]  # `busy` may have moved it
        self.task = (f"after {name}", None)  # now only the others can be late
        self.store.set(f"{key}/{self.rank}", f"{time.monotonic() - start:.3f}")
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.world:
            if self._known():
                self.raise_failure()
            late = time.monotonic() - until
            if late > 2 * POLL:
                self._check_absent(key, name, late)
            self._check_stop(key)
            time.sleep(min(0.01 * self.world, POLL))
        if self._known():
            self.raise_failure()
        if self.rank == 0:
            seconds = [float(self.store.get(f"{key}/{r}")) for r in range(self.world)]
            slow = max(range(self.world), key=seconds.__getitem__)
            self.log(f"stage {name} ok in {seconds[slow]:.1f} s (slowest: rank {slow})")

    def _check_absent(self, key: str, name: str, late: float):
        """A stage is over for this rank but not for all, `late` seconds after its deadline. Ranks that never joined are
        named at once; others get the time in which they, or their neighbours, speak for themselves."""
        never = [r for r in range(self.world) if not self.store.check([f"pid/{r}"])]
        absent = [r for r in range(self.world) if not self.store.check([f"{key}/{r}"])]
        if never:
            self.record(f"ranks {never} never arrived", rank=never[0], stage=name)
        elif absent and late > self.lost + 6:
            self.record(f"ranks {absent} did not finish", rank=NOBODY, stage=name)

    def _check_stop(self, key: str):
        """A signal during start-up ends it as stopped. torchrun also sends one when a rank dies: that rank goes first."""
        if not self.signals.name:
            return
        while not self._known() and time.monotonic() < self.signals.when + GRACE:
            time.sleep(POLL)
        absent = [r for r in range(self.world) if key and not self.store.check([f"{key}/{r}"])]
        why = f"{self.signals.name} during start-up" + (f"; ranks {absent} not finished" if absent else "")
        self.failure = self.record(why, 3, reason=self.signals.name)
        self.raise_failure()

    def tick(self, what: str, seconds: float):
        """The loop starts `what`, which takes less than `seconds`. Raises if another rank has failed."""
        if self.failure:
            self.raise_failure()
        self.task = (what, time.monotonic() + seconds)

    def busy(self, seconds: float):
        """What the main thread does may take long, and goes on: its deadline is at least `seconds` away from now."""
        what, until = self.task
        if until is not None:
            self.task = (what, max(until, time.monotonic() + seconds))

    def close(self):
        """Say goodbye and wait until all ranks have: the store's host leaves last."""
        import torch.distributed as dist

        self.task = ("close", None)
        try:
            self.store.set(f"bye/{self.rank}", "1")
            until = time.monotonic() + 30
            while time.monotonic() < until and not self.store.check([f"bye/{r}" for r in range(self.world)]):
                time.sleep(0.02)
            self.closed.set()
            for thread in self.threads:  # inside the store while Python ends, one would abort the process
                thread.join(5)
            self.store.add("closed", 1)
            hosts = hasattr(self, "server")
            while hosts and time.monotonic() < until and self.store.add("closed", 0) < self.world:
                time.sleep(0.02)
            if dist.is_initialized():
                dist.destroy_process_group()
        except (dist.DistNetworkError, dist.DistStoreError):
            pass  # the others are gone already; there is nothing left to agree on


def gather_json(value, group=None) -> list:
    """[value of rank 0, value of rank 1, …] on every rank of a CPU group."""
    import torch
    import torch.distributed as dist

    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = int(max(sizes))
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    return [json.loads(row[: int(n)].numpy().tobytes()) for row, n in zip(rows, sizes, strict=True)]


class Exchange:
    """Small JSON values between ranks, on a CPU group. Main thread only, same calls in the same order on all ranks."""

    def __init__(self, rank: int, world: int, group=None):
        self.rank, self.world, self.group = rank, world, group

    def gather(self, value) -> list:
        """[value of rank 0, value of rank 1, …] on every rank."""
        return gather_json(value, self.group)

    def broadcast(self, value):
        """Rank 0's value on every rank."""
        import torch
        import torch.distributed as dist

        data = bytearray(json.dumps(value if self.rank == 0 else None).encode())
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self.group)
        data = data if self.rank == 0 else bytearray(int(size))
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0, group=self.group)
        return json.loads(data)

    def verdict(self, problem: Exception | None, what: str = ""):
        """If any rank has a problem all ranks raise: their own, or RankFailed with the first rank's."""
        note = (
            None
            if problem is None
            else [describe(problem), exit_code_of(problem), getattr(problem, "rank", self.rank)]
        )
        bad = [n for n in self.gather(note) if n]
        if problem is not None:
            raise problem
        if bad:
            text, code, rank = bad[0]
            more = f" (and {len(bad) - 1} more ranks)" if len(bad) > 1 else ""
            raise RankFailed(rank, f"{what or 'check'} failed on rank {rank}: {text}{more}", code)

    def on_rank_0(self, call, what: str = ""):
        """call()'s JSON-able value on every rank; an OSError (HubError is one) on rank 0 stops all ranks."""
        value = problem = None
        if self.rank == 0:
            try:
                value = call()
            except OSError as e:
                problem = e
        self.verdict(problem, what)
        return self.broadcast(value)

    def barrier(self):
        self.gather(None)

    def control(self, flags: list[int], sums: list[float] | None = None):
        """The per-step control word: elementwise maximum of `flags` over ranks, as ints; with `sums`, also their sums
        (in rank order, so the same bits everywhere): (flags, sums). One message."""
        import torch
        import torch.distributed as dist

        mine = torch.tensor([*flags, *(sums or [])], dtype=torch.float64)
        all_ranks = [torch.zeros_like(mine) for _ in range(self.world)]
        dist.all_gather(all_ranks, mine, group=self.group)
        table = torch.stack(all_ranks)  # (world, flags + sums)
        highest = [int(v) for v in table[:, : len(flags)].amax(0).tolist()] if flags else []
        return highest if sums is None else (highest, table[:, len(flags) :].sum(0).tolist())


class Agreement(Control, Exchange):
    """How the ranks of a run agree: stages and deadlines over the store, values over a CPU side group."""

    def __init__(self, settings, environ=os.environ, log=print):
        Control.__init__(self, settings, environ, log)
        self.group = None

    def open_groups(self, device):
        """The default process group (nccl on GPUs, gloo on CPUs) and the gloo side group for agreement."""
        import torch
        import torch.distributed as dist

        self.device, self.lost = device, LOST[device.type]
        timeout = self._backstop(self.settings.init_timeout)
        options = dict(rank=self.rank, world_size=self.world, timeout=timeout)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            options |= dict(backend="nccl", device_id=self.device)
        else:
            options |= dict(backend="gloo")
        dist.init_process_group(store=dist.PrefixStore("group", self._connect()), **options)
        self.group = dist.new_group(backend="gloo", timeout=timeout)

    def _backstop(self, seconds: float) -> timedelta:
        """The collectives' own timeout: later than the watchdog's, which knows whom to blame. NCCL aborts a victim."""
        return timedelta(seconds=seconds + 3 * self.lost)

    def limit_collectives(self, seconds: float):
        """What a collective may take, on all groups but the saver's, whose ranks wait for each other's disks."""
        from torch.distributed import distributed_c10d as c10d

        for group in list(c10d._world.pg_map):
            if group.group_desc != SAVER:
                c10d._set_pg_timeout(self._backstop(seconds), group)

    def first_step_done(self):
        """Compilation and first connections are over: from here a collective may take step_timeout only."""
        self.barrier()
        self.limit_collectives(self.settings.step_timeout)
