"""The drill (`--drill`): the run's whole cycle once, on its machine and with its settings, in a folder of its own.

Steps, evaluation, save, load in place, the same next losses, export, a trial upload, each timed; nothing stays on the Hub,
and of a drill that passed neither checkpoints nor export on the disk.
A later run in the folder above takes the times for its budget (`drilled`). The loop and its helpers are handed in:
train_nova.py knows this file, not the reverse.
"""

import json
import os
import shutil
import time

from launch import startup
from store import checkpoint

STEPS = 4  # before the save; two more are done twice, before and after the load


def drill(run, loop, evaluate, save, resume, export) -> dict:
    """Raises StartupError unless the two losses after the reload are those before it, and HubError where the Hub takes no
    file.

    -> facts for status.json: {"step", "drill": {part: seconds}}"""
    s, seconds = run.settings, {}
    clock = time.monotonic()

    def took(part: str):
        nonlocal clock
        seconds[part], clock = time.monotonic() - clock, time.monotonic()

    def train(steps: int):
        if (stop := loop(run, steps)) not in (None, "stop_at"):
            raise startup.Stopped(stop, f"stopped by {stop} in a drill: nothing to resume, give it again")

    seconds["start-up"] = run.metrics.used()
    train(STEPS)
    took(f"{STEPS} steps")
    evaluate(run, s.eval_rows)
    took("evaluation")
    save(run, "latest", wait=True)
    if run.checkpoints.failures:
        raise startup.StartupError(f"drill: the save failed: {run.checkpoints.failures[-1]}")
    took("save")
    train(STEPS + 2)
    before = list(run.metrics.totals.losses)[-2:]
    took("2 steps")
    path = os.path.join(run.checkpoints.folder, run.checkpoints.parent.split("/")[-1])
    saved = checkpoint.read_state(path)
    run.stream.load_state(saved["data"])
    resume(run, saved, path)
    took("load in place")
    train(STEPS + 2)
    after = list(run.metrics.totals.losses)[-2:]
    took("2 steps after it")
    exact = run.device.type == "cpu" or s.deterministic
    same = before == after if exact else all(abs(a - b) < 1e-2 for a, b in zip(before, after, strict=True))
    if not same:
        raise startup.StartupError(f"drill: losses after the reload {after} are not those before it {before}")
    export(run)
    took("export")
    run.checkpoints.close()
    if run.publisher:  # no checkpoint of a drill is published: 16 MB tell the rate
        rate = run.agree.on_rank_0(lambda: run.publisher.trial(f"drill-{os.getpid()}"), "Hub")
        run.log(f"drill: the Hub took {rate / 1e6:.1f} MB/s")
        seconds["upload of a checkpoint"] = run.receipts[-1]["bytes"] / rate
    for part, value in seconds.items():
        run.log(f"drill: {part:24} {value:8.2f} s")
    clear(run)
    how = "to the bit" if exact else "to rounding"
    run.log(f"drill passed: the two losses after a reload are those before it, {how}: {before}")
    return {"step": run.step, "drill": {k: round(v, 3) for k, v in seconds.items()}}


def clear(run):
    """Free the disk for the real run; status.json and the metrics stay. A drill that failed keeps all, to be looked at."""
    folders = [run.checkpoints.folder, run.export_folder]
    if run.agree.rank == 0:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    run.log(f"drill: deleted its {' and '.join(map(os.path.basename, folders))} in {run.settings.out_dir}")


def drilled(out_dir: str) -> dict:
    """What --drill measured on this machine, in seconds, for the budget: better than the plan's assumptions."""
    try:
        with open(os.path.join(out_dir, "drill", "status.json"), encoding="utf-8") as f:
            seconds = json.load(f)["drill"]
    except (OSError, ValueError, KeyError):
        return {}
    names = {"whole save": "save", "evaluation": "evaluation", "upload": "upload of a checkpoint"}
    return {kind: seconds[part] for kind, part in names.items() if part in seconds}
