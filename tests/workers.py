"""Real gloo processes for tests: one pool per world size, kept for the whole run, a deadline on every call.

A failing or hanging rank fails the call with the traceback of every rank; its pool is killed, and a new one is started
for the next call. Importing torch costs seconds, so pools are reused.
"""

import atexit
import datetime
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback

TESTS = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(TESTS)
POOLS = {}


class WorkerError(AssertionError):
    """A rank raised, died or missed the deadline; the message holds every rank's traceback."""


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(connection, rank, world, port):
    """Body of one worker: join the group, then run what is asked until the connection closes."""
    sys.path[:0] = [p for p in (TESTS, ROOT) if p not in sys.path]
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    its = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in its.items()}, MASTER_ADDR="127.0.0.1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    connection.send(("ready", None))
    while True:
        try:
            function, kwargs = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            torch.manual_seed(0)
            connection.send(("ok", function(rank, world, **kwargs)))
        except BaseException:
            connection.send(("error", traceback.format_exc()))


class Pool:
    """`world` processes in one gloo group."""

    def __init__(self, world: int):
        self.world, port = world, free_port()
        context = multiprocessing.get_context("spawn")
        self.connections, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, port), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self.collect(120)

    def collect(self, deadline: float) -> list:
        """One answer of each rank, or WorkerError. A rank's error gives its peers 5 more seconds."""
        end, answers = time.monotonic() + deadline, [None] * self.world
        while any(a is None for a in answers) and time.monotonic() < end:
            for rank, connection in enumerate(self.connections):
                if answers[rank] is None and connection.poll(0.02):
                    try:
                        answers[rank] = connection.recv()
                    except (EOFError, OSError):
                        answers[rank] = ("error", f"exit code {self.processes[rank].exitcode}")
                    if answers[rank][0] == "error":
                        end = min(end, time.monotonic() + 5)
        if all(a and a[0] != "error" for a in answers):
            return [a[1] for a in answers]
        for rank, answer in enumerate(answers):
            if answer is None:
                os.kill(self.processes[rank].pid, signal.SIGUSR2)  # its stack, to stderr
        time.sleep(0.3)
        said = [a or ("error", "no answer (stack on stderr)") for a in answers]
        report = "\n".join(f"--- rank {r}: {a[1] if a[0] == 'error' else 'ok'}" for r, a in enumerate(said))
        self.close()
        raise WorkerError(f"world {self.world}, deadline {deadline:.0f} s\n{report}")

    def close(self):
        """End this pool's own processes."""
        POOLS.pop(self.world, None)
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)


def run(function, world: int, deadline: float = 60, **kwargs) -> list:
    """Run `function(rank, world, **kwargs)`, of a module's level, on every rank; the list of results by rank."""
    pool = POOLS.get(world) or POOLS.setdefault(world, Pool(world))
    for connection in pool.connections:
        connection.send((function, kwargs))
    return pool.collect(deadline)


@atexit.register
def close_all():
    for pool in list(POOLS.values()):
        pool.close()


class Rank:
    """Stands in for the run's agreement object where ranks are only simulated, or there is one."""

    def __init__(self, rank: int = 0, world: int = 1):
        self.rank, self.world = rank, world

    def broadcast(self, value):
        assert self.world == 1 or value is not None, "a simulated rank has nobody to hear from"
        return value

    def gather(self, value) -> list:
        return [value] * self.world

    def verdict(self, problem, what=""):
        if problem:
            raise problem if isinstance(problem, BaseException) else RuntimeError(str(problem))

    def barrier(self):
        pass

    def busy(self, seconds):
        pass
