"""The drill (`--drill`): the run's whole cycle once, on its machine and with its settings, each part timed.

What does its parts is handed in. A later run in the folder above takes the times for its budget (`drilled`).
"""

import json
import os
import time

from .failures import StartupError, Stopped

STEPS = 4  # before the save; two more are done twice, before and after the load


def drill(train, evaluate, save, reload, export, store, metrics, exact: bool, log) -> dict[str, float]:
    """{part: seconds}. Raises StartupError unless the two losses after the reload are those before it (to the bit if
    `exact`), and HubError where the Hub takes no file.

    train(stop_at) trains up to that step and says why it stopped; the other parts take nothing. Nothing stays on the Hub,
    and of a drill that passed neither checkpoints nor export on the disk."""
    seconds = {"start-up": metrics.journal.used()}

    def timed(part: str, call):
        began = time.monotonic()
        value = call()
        seconds[part] = time.monotonic() - began
        return value

    def losses_to(step: int) -> list[float]:
        if (stop := train(step)) not in (None, "stop_at"):
            raise Stopped(stop, f"stopped by {stop} in a drill: nothing to resume, give it again")
        return list(metrics.totals.losses)[-2:]

    timed(f"{STEPS} steps", lambda: losses_to(STEPS))
    timed("evaluation", evaluate)
    timed("save", save)
    if store.failures:
        raise StartupError(f"drill: the save failed: {store.failures[-1]}")
    before = timed("2 steps", lambda: losses_to(STEPS + 2))
    timed("load in place", reload)
    after = timed("2 steps after it", lambda: losses_to(STEPS + 2))
    if max(abs(a - b) for a, b in zip(before, after, strict=True)) > (0 if exact else 1e-2):
        raise StartupError(f"drill: losses after the reload {after} are not those before it {before}")
    timed("export", export)
    store.close()
    if rate := store.trial():  # no checkpoint of a drill is published: 16 MB tell the rate
        seconds["upload of a checkpoint"] = store.receipts[-1]["bytes"] / rate
    for part, value in seconds.items():
        log(f"drill: {part:24} {value:8.2f} s")
    store.clear()
    how = "to the bit" if exact else "to rounding"
    log(f"drill passed: the two losses after a reload are those before it, {how}: {before}")
    return {part: round(value, 3) for part, value in seconds.items()}


def drilled(out_dir: str) -> dict[str, float]:
    """What a drill measured on this machine, in seconds, for the budget: better than the plan's assumptions."""
    try:
        with open(os.path.join(out_dir, "drill", "status.json"), encoding="utf-8") as f:
            seconds = json.load(f)["drill"]
    except (OSError, ValueError, KeyError):
        return {}
    names = {"whole save": "save", "evaluation": "evaluation", "upload": "upload of a checkpoint"}
    return {kind: seconds[part] for kind, part in names.items() if part in seconds}
