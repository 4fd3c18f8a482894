"""Nova against what people would use instead: `python -m bench`.

    __main__.py   the cases
    tools.py      how it measures: contenders that take turns, rows, peak bytes, ranks
    gpu.py        the script for one H200
    peers.py      what Nova is measured against

The invariant: contenders take turns in one process, and a row says no more than its spread allows.
"""
