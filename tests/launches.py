"""Start real runs as a user does (plain python, torchrun, two launchers, ranks by hand) and watch how they end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

from workers import ROOT, free_port

TOY = os.path.join(ROOT, "tests", "toy_run.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Launch:
    """Processes that the test started and the ranks below them. Ends only those."""

    def __init__(self, out, *options, ranks=1, nodes=0, by_hand=False, extra=()):
        self.out, self.ranks, self.processes = str(out), ranks, []
        os.makedirs(self.out, exist_ok=True)
        tail = [TOY, self.out, *options]
        if by_hand:  # no launcher: rank 0 hosts the store
            port = free_port()
            for r in range(ranks):
                own = dict(RANK=r, LOCAL_RANK=r, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_PORT=port)
                self._start([sys.executable, *tail], MASTER_ADDR="127.0.0.1", **own)
        elif nodes:
            shared = [f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}", "--rdzv-id=t", *extra]
            shared += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
            for n in range(nodes):
                host = f"--rdzv-conf=is_host={n == 0},last_call_timeout=1,join_timeout=60"
                self._start([*TORCHRUN, *shared, f"--node-rank={n}", host, *tail])
        elif ranks > 1:
            self._start([*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", *extra, *tail])
        else:
            self._start([sys.executable, *tail])

    def _start(self, command, **own):
        """In a clean environment, whatever the tests themselves run under."""
        theirs = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        }
        environ = theirs | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in own.items()}
        with open(self.path(f"log.{len(self.processes)}"), "wb") as log:
            how = dict(env=environ, stdout=log, stderr=log, start_new_session=True)
            self.processes.append(subprocess.Popen(command, **how))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in [p.pid for p in self.processes] + list(self.pids().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for p in self.processes:
            p.wait(30)

    def path(self, name: str) -> str:
        return os.path.join(self.out, name)

    def read(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError), open(self.path(name), errors="replace") as f:
            return f.read()
        return ""

    def status(self) -> dict:
        return json.loads(self.read("status.json"))

    def pids(self) -> dict[int, int]:
        """{rank: process id} of the ranks that have started."""
        names = [n for n in os.listdir(self.out) if n.startswith("pid.") and "tmp" not in n]
        return {int(n[4:]): int(self.read(n)) for n in names}

    def text(self) -> str:
        return "".join(self.read(f"log.{i}") for i in range(len(self.processes)))

    def wait_for(self, what, seconds: float = 60):
        """Wait until what() is true, or fail with the run's output."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"nothing happened for {seconds} s\n{self.text()}"
            time.sleep(0.02)

    def step_reached(self, step: int, rank: int = 0) -> bool:
        return int(self.read(f"step.{rank}") or 0) >= step

    def survivors_gone(self, but=(), seconds: float = 90) -> float:
        """Wait until all ranks but these have ended. -> seconds since the fault (the file `fault`)."""
        self.wait_for(lambda: os.path.exists(self.path("fault")))
        fault = os.path.getmtime(self.path("fault"))
        others = {r: p for r, p in self.pids().items() if r not in but}
        self.wait_for(lambda: not any(alive(p) for p in others.values()), seconds)
        return time.time() - fault

    def codes(self, seconds: float = 60) -> list[int]:
        return [p.wait(seconds) for p in self.processes]


def alive(pid: int) -> bool:
    """Is the process there, and not just waiting to be reaped?"""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] not in "ZX"
    return False
