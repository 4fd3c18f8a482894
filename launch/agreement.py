"""How the ranks of a run agree: on stages and deadlines over the store, on values over a CPU group.

Each stage of the start-up is finished by all ranks or by none; in the loop each rank says what it does and how long that
may take. What cannot be said by the rank itself says its watchdog (`watchdog.py`), and all end with the first failure on
the board (`board.py`). Reference: torchtitan (two collective timeouts).
"""

import json
import os
import time
from contextlib import contextmanager
from datetime import timedelta

from .board import LOST, NEIGHBOURS, POLL, Board, Ending, Launcher
from .failures import NOBODY, RankFailed, StartupError, describe, exit_code_of, first_line
from .watchdog import GRACE, StopSignals, Watchdog

SAVER = "saver"  # description of the group that the store's saver threads talk over


class Stages:
    """What the main thread does and until when, on the board."""

    def __init__(self, board: Board, signals: StopSignals, settings, log=print):
        self.board, self.signals, self.settings, self.log = board, signals, settings, log
        self.count = 0

    @contextmanager
    def stage(self, name: str, timeout: float | None = None):
        """One start-up stage: all ranks finish it, or all ranks end with the first failure. timeout in seconds."""
        board, start, key = self.board, time.monotonic(), f"stage/{self.count}/{name}"
        self.count += 1
        board.task = (name, start + (timeout or self.settings.stage_timeout))
        if board.rank == 0:
            self.log(f"stage {name} ...")
        try:
            self._check_stop()
            yield
            if board.gpu:
                import torch

                torch.cuda.synchronize()  # an asynchronous error belongs to the stage that caused it
        except BaseException as e:
            board.failure = board.record_error(e)
            raise
        until = board.task[1]  # `busy` may have moved it
        board.task = (f"after {name}", None)  # now only the others can be late
        board.store.set(f"{key}/{board.rank}", f"{time.monotonic() - start:.3f}")
        board.store.add(key, 1)
        while board.store.add(key, 0) < board.world:
            self._check_failure()
            late = time.monotonic() - until
            if late > 2 * POLL:
                self._check_absent(key, name, late)
            self._check_stop(key)
            time.sleep(min(0.01 * board.world, POLL))
        self._check_failure()
        if board.rank == 0:
            seconds = [float(board.store.get(f"{key}/{r}")) for r in range(board.world)]
            slow = max(range(board.world), key=seconds.__getitem__)
            self.log(f"stage {name} ok in {seconds[slow]:.1f} s (slowest: rank {slow})")

    def _check_failure(self):
        if self.board.known():
            self.board.raise_failure()

    def _check_absent(self, key: str, name: str, late: float):
        """A stage is over for this rank but not for all, `late` seconds after its deadline. Ranks that never joined are
        named at once; others get the time in which they, or their neighbours, speak for themselves."""
        if never := self.board.without("pid"):
            self.board.record(f"ranks {never} never arrived", rank=never[0], stage=name)
        elif late > self.board.lost + 2 * NEIGHBOURS and (absent := self.board.without(key)):
            self.board.record(f"ranks {absent} did not finish", rank=NOBODY, stage=name)

    def _check_stop(self, key: str = ""):
        """A signal during start-up ends it as stopped. torchrun also sends one when a rank dies: that rank goes first."""
        if not self.signals.name:
            return
        while not self.board.known() and time.monotonic() < self.signals.when + GRACE:
            time.sleep(POLL)
        absent = self.board.without(key) if key else []
        why = f"{self.signals.name} during start-up" + (f"; ranks {absent} not finished" if absent else "")
        self.board.failure = self.board.record(why, 3, reason=self.signals.name)
        self.board.raise_failure()

    def tick(self, what: str, seconds: float):
        """The loop starts `what`, which takes less than `seconds`. Raises if another rank has failed."""
        if self.board.failure:
            self.board.raise_failure()
        self.board.task = (what, time.monotonic() + seconds)

    def busy(self, seconds: float):
        """What the main thread does may take long, and goes on: its deadline is at least `seconds` away from now."""
        what, until = self.board.task
        if until is not None:
            self.board.task = (what, max(until, time.monotonic() + seconds))


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
        note = problem and [describe(problem), exit_code_of(problem), getattr(problem, "rank", self.rank)]
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


class Agreement(Stages, Exchange):
    """What a run holds of all this: its rank, its device, stages, values, and the facts that it notes in status.json."""

    def __init__(self, settings, environ=os.environ, log=print):
        import torch.distributed as dist

        launcher = Launcher(environ, settings.stage_timeout)
        try:
            store = launcher.connect()
        except (dist.DistNetworkError, dist.DistStoreError) as e:
            text = f"no answer from rank 0's store at {launcher.address}:{launcher.port}: {first_line(e)}"
            raise StartupError(text, rank=0) from None
        board, signals = Board(launcher, store), StopSignals(says=launcher.rank == 0)
        Stages.__init__(self, board, signals, settings, log)
        Exchange.__init__(self, launcher.rank, launcher.world)
        self.device = None
        self.ending = Ending(board, settings.out_dir, log)
        self.watchdog = Watchdog(board, signals, self.ending.leave)
        self.watchdog.start()

    @property
    def local_rank(self) -> int:
        """This process among those of its machine."""
        return self.board.launcher.local_rank

    @property
    def info(self) -> dict:
        """The facts noted so far."""
        return self.ending.info

    def note(self, **info):
        """Facts for status.json, such as saved=STEP."""
        self.ending.note(**info)

    def open_groups(self, device):
        """The default process group (nccl on GPUs, gloo on CPUs) and the gloo side group for agreement."""
        import torch
        import torch.distributed as dist

        self.device, self.board.gpu = device, device.type == "cuda"
        timeout = backstop(self.settings.init_timeout, device)
        options = dict(rank=self.rank, world_size=self.world, timeout=timeout, backend="gloo")
        if self.board.gpu:
            torch.cuda.set_device(device)
            options |= dict(backend="nccl", device_id=device)
        store = dist.PrefixStore("group", self.board.launcher.connect())
        dist.init_process_group(store=store, **options)
        self.group = dist.new_group(backend="gloo", timeout=timeout)

    def limit_collectives(self, seconds: float):
        """What a collective may take, on all groups but the saver's, whose ranks wait for each other's disks."""
        from torch.distributed import distributed_c10d as c10d

        for group in list(c10d._world.pg_map):
            if group.group_desc != SAVER:
                c10d._set_pg_timeout(backstop(seconds, self.device), group)

    def first_step_done(self):
        """Compilation and first connections are over: from here a collective may take step_timeout only."""
        self.barrier()
        self.limit_collectives(self.settings.step_timeout)

    def close(self):
        """Say goodbye and wait until all ranks have: the store's host leaves last."""
        import torch.distributed as dist

        board, until = self.board, time.monotonic() + 30
        board.task = ("close", None)
        try:
            board.store.set(f"bye/{self.rank}", "1")
            byes = [f"bye/{r}" for r in range(self.world)]
            while time.monotonic() < until and not board.store.check(byes):
                time.sleep(0.02)
            self.watchdog.stop()
            board.store.add("closed", 1)
            hosts = board.launcher.server is not None
            while hosts and time.monotonic() < until and board.store.add("closed", 0) < self.world:
                time.sleep(0.02)
            if dist.is_initialized():
                dist.destroy_process_group()
        except (dist.DistNetworkError, dist.DistStoreError):
            pass  # the others are gone already; there is nothing left to agree on


def backstop(seconds: float, device) -> timedelta:
    """The collectives' own timeout: later than the watchdog's, which knows whom to blame. NCCL aborts a victim."""
    return timedelta(seconds=seconds + 3 * LOST[device.type])
