"""What went wrong, in words and codes: errors of the start-up, exit codes, status.json, and whether a rank is a victim.

A leaf: it is loaded before torch is, and imports nothing of this project.
"""

import fcntl
import json
import os
import re
import socket
import time
import traceback

CODES = {0: "done", 3: "stopped", 64: "settings", 65: "data", 70: "failed", 71: "system", 74: "io"}
CODES |= {130: "interrupted"}
NOBODY = -1  # the culprit where none can be named: unknown is allowed, wrong is not
# Files whose lines launch kernels: torch's and other packages', compiled code, and ours that compute.
LAUNCHES = r"/(torch|triton|torchao|bitsandbytes|torchinductor\w*)/|\b(model|muon)\.py$|\bkernels/\w+\.py$|^<"


class StartupError(RuntimeError):
    """A start-up check failed. `rank` is the rank that it points to, or NOBODY; None: the one that raises it."""

    def __init__(self, text: str, rank: int | None = None, exit_code: int = 71):
        super().__init__(text)
        self.exit_code = exit_code
        if rank is not None:
            self.rank = rank


class RankFailed(RuntimeError):
    """Another rank failed. Carries that rank and the exit code that its error asks for."""

    def __init__(self, rank: int, text: str, exit_code: int = 71):
        super().__init__(text)
        self.rank, self.exit_code = rank, exit_code


class Stopped(RuntimeError):
    """An agreed stop: saved and resumable. `reason` is a signal's name, job_hours or stop_at."""

    exit_code = 3

    def __init__(self, reason: str, text: str = ""):
        super().__init__(text or f"stopped by {reason}; resumable")
        self.reason = reason


def write_status(out_dir: str, status: str, exit_code: int | None, **info):
    """Replace out_dir/status.json: what the run is, or ended as. Atomic; any rank may write the same failure."""
    os.makedirs(out_dir, exist_ok=True)
    resumable = status in ("running", "stopped", "interrupted", "system", "io")
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    facts = dict(status=status, exit_code=exit_code, resumable=resumable, time=now)
    path = os.path.join(out_dir, "status.json")
    with open(f"{path}.{socket.gethostname()}.{os.getpid()}", "w", encoding="utf-8") as f:
        json.dump(facts | info, f, indent=1)
    os.replace(f.name, path)


def occupied(out_dir: str) -> bool:
    """Does another launch hold the folder (the store's lock)? Its status.json is not this launch's to write."""
    try:
        with open(os.path.join(out_dir, "checkpoints", ".lock"), encoding="utf-8") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # no run has been here; anything else is found out later
    return False


def describe(error: BaseException) -> str:
    """The error in a line or two, for a person: Nova's own errors say what to do, others say where they happened."""
    text = str(error)[:2000]
    if not isinstance(error, (RankFailed, Stopped)):
        text = f"{type(error).__name__}: {text}"
    if not hasattr(error, "exit_code") and error.__traceback__:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text += f" ({os.path.basename(frame.filename)} line {frame.lineno}, in {frame.name})"
    return text


def first_line(error: BaseException) -> str:
    return str(error).split("\n")[0][:200]


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(error, "exit_code", 74 if isinstance(error, OSError) else 70)


def inside_torch_distributed(frames: list) -> bool:
    return any(f"{os.sep}torch{os.sep}distributed{os.sep}" in f.filename for f in frames)


def in_collective(frames: list, gpu: bool = False) -> bool:
    """Do these stack entries, innermost first, wait for other ranks? Then the rank is a victim, not the culprit.

    On a GPU the host waits where it reads a result, and, since the device's queue is bounded, wherever it launches: while
    a peer is missing every rank stands in some kernel launch of its own, and nobody can say which one is to blame."""
    if not frames:
        return False
    reads = re.search(r"\.item\(|\.tolist\(|synchronize\(|\.cpu\(", frames[0].line or "")
    launches = gpu and re.search(LAUNCHES, frames[0].filename)
    return bool(reads or launches) or inside_torch_distributed(frames[:4])


def is_peer_loss(error: BaseException) -> bool:
    """Did a collective or the store fail under this rank? Then another rank, or the network, is to blame."""
    import torch.distributed as dist

    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
        return True
    words = re.search(r"gloo|nccl|connection|socket|timed out", str(error), re.IGNORECASE)
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    return type(error) is RuntimeError and bool(words) and inside_torch_distributed(frames)
