"""What a run shows of itself.

    metrics.py   console lines, metrics.jsonl, loss.png, report.json
    health.py    parameters that do not move, ranks that lag, and, when it ends badly, why

The invariant: everything here only looks; no number that it writes or prints changes the run.
"""

__all__ = ["health", "metrics"]
