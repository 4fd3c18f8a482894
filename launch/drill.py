"""The drill (`--drill`): the run's whole cycle once, on its machine and with its settings, each part timed.

Steps, evaluation, save, load in place, the same next losses, export. What does these is handed in. A later run in the folder
above takes the times for its budget (`drilled`).
"""

import json
import os
import time

from .failures import StartupError

STEPS = 4  # before the save; two more are done twice, before and after the load


def drill(train, evaluate, save, load, export, exact: bool, seconds: dict[str, float]) -> list[float]:
    """The two losses after the reload. Raises StartupError unless they are those before it: to the bit if `exact`.

    train(step) trains to that step and returns its last two losses; the others take nothing. `seconds` of each part are
    filled in."""

    def timed(part: str, call):
        began = time.monotonic()
        value = call()
        seconds[part] = time.monotonic() - began
        return value

    timed(f"{STEPS} steps", lambda: train(STEPS))
    timed("evaluation", evaluate)
    timed("save", save)
    before = timed("2 steps", lambda: train(STEPS + 2))
    timed("load in place", load)
    after = timed("2 steps after it", lambda: train(STEPS + 2))
    if max(abs(a - b) for a, b in zip(before, after, strict=True)) > (0 if exact else 1e-2):
        raise StartupError(f"drill: losses after the reload {after} are not those before it {before}")
    timed("export", export)
    return before


def drilled(out_dir: str) -> dict[str, float]:
    """What a drill measured on this machine, in seconds, for the budget: better than the plan's assumptions."""
    try:
        with open(os.path.join(out_dir, "drill", "status.json"), encoding="utf-8") as f:
            seconds = json.load(f)["drill"]
    except (OSError, ValueError, KeyError):
        return {}
    names = {"whole save": "save", "evaluation": "evaluation", "upload": "upload of a checkpoint"}
    return {kind: seconds[part] for kind, part in names.items() if part in seconds}
