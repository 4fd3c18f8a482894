"""How the ranks of a run agree: on stages and deadlines over the store, on values over a CPU group.

Each stage of the start-up is finished by all ranks or by none; in the loop each rank says what it does and how long that
may take. Reference: torchtitan (two collective timeouts).
"""

import json
import os
import time
from contextlib import contextmanager
from datetime import timedelta

from .board import GRACE, LOST, NEIGHBOURS, POLL, Board, Ending, Launcher, StopSignals, Watchdog
from .failures import NOBODY, RankFailed, StartupError, describe, exit_code_of, first_line

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
            board.check()
            late = time.monotonic() - until
            if late > 2 * POLL:  # others than those that never joined get the time to speak for themselves
                if never := board.without("pid"):
                    board.record(f"ranks {never} never arrived", rank=never[0], stage=name)
                elif late > board.lost + 2 * NEIGHBOURS and (absent := board.without(key)):
                    board.record(f"ranks {absent} did not finish", rank=NOBODY, stage=name)
            self._check_stop(key)
            time.sleep(min(0.01 * board.world, POLL))
        board.check()
        if board.rank == 0:
            seconds = [float(board.store.get(f"{key}/{r}")) for r in range(board.world)]
            slow = max(range(board.world), key=seconds.__getitem__)
            self.log(f"stage {name} ok in {seconds[slow]:.1f} s (slowest: rank {slow})")

    def _check_stop(self, key: str = ""):
        """A signal during start-up ends it as stopped. torchrun also sends one when a rank dies: that rank goes first."""
        if not self.signals.name:
            return
        while not self.board.known() and time.monotonic() < self.signals.when + GRACE:
            time.sleep(POLL)
        absent = self.board.without(key) if key else []
        why = f"{self.signals.name} during start-up" + (f"; ranks {absent} not finished" if absent else "")
        self.board.failure = self.board.record(why, 3, reason=self.signals.name)
        self.board.check()

    def tick(self, what: str, seconds: float):
        """The loop starts `what`, which takes less than `seconds`. Raises if another rank has failed."""
        if self.board.failure:  # the watchdog has seen it: no question to the store in each step
            self.board.check()
        self.board.task = (what, time.monotonic() + seconds)

    def busy(self, seconds: float):
        """What the main thread does may take long, and goes on: its deadline is at least `seconds` away from now."""
        what, until = self.board.task
        if until is not None:
            self.board.task = (what, max(until, time.monotonic() + seconds))


def gather_json(value, group=None) -> list:
    """[value of rank 0, value of rank 1, …] on every rank of a CPU group."""
    import torch.distributed as dist

    texts = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, json.dumps(value), group=group)
    return [json.loads(text) for text in texts]


class Exchange:
    """Small JSON values between ranks, on a CPU group. Main thread only, same calls in the same order on all ranks."""

    def __init__(self, rank: int, world: int, group=None):
        self.rank, self.world, self.group = rank, world, group

    def gather(self, value) -> list:
        """[value of rank 0, value of rank 1, …] on every rank."""
        return gather_json(value, self.group)

    def broadcast(self, value):
        """Rank 0's value on every rank."""
        import torch.distributed as dist

        texts = [json.dumps(value) if self.rank == 0 else ""]
        dist.broadcast_object_list(texts, src=0, group=self.group)
        return json.loads(texts[0])

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
        try:
            value = call() if self.rank == 0 else None
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
        self.device, self.local_rank = None, launcher.local_rank
        self.ending = Ending(board, settings.out_dir, log)
        self.info, self.note = self.ending.info, self.ending.note
        self.watchdog = Watchdog(board, signals, self.ending.leave)
        self.watchdog.start()

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
