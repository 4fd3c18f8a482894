"""What a run shows of itself.

    metrics.py   the totals of a run; what each step, evaluation and save adds to them
    meters.py    the time, loss, speed and memory of a step; the loss on held-out rows
    rows.py      metrics.jsonl and time.json
    console.py   the lines that a person reads, and loss.png
    health.py    parameters that do not move, ranks that lag, and, when it ends badly, why

The invariant: everything here only looks; no number that it writes or prints changes the run.
"""

from .console import draw
from .health import Watcher, explained_memory
from .meters import LossMeter, StepTimer, evaluate, memory
from .metrics import Metrics, MetricsError, Step
from .rows import read_rows, reported

__all__ = [
    "LossMeter", "Metrics", "MetricsError", "Step", "StepTimer", "Watcher", "draw", "evaluate",
    "explained_memory", "memory", "read_rows", "reported",
]  # fmt: skip
