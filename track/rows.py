"""What a run writes while it lasts: rows in metrics.jsonl, the time used in time.json. Rank 0 alone writes.

metrics.jsonl: one strict JSON object a line (a number that is not finite is null), told apart by "kind":
    launch      world, device, settings_digest            event   reason, decay_start, end_step
    step        loss, loss_by_domain, grad_norm, muon_lr, lr, momentum, ctx, tokens, tokens_per_second, …_per_gpu, mfu,
                seconds, {data,forward_backward,optimizer,other}_seconds, memory_gb, memory_peak_gb, epochs, bad
    evaluation  loss, loss_by_domain, bits_per_byte, seconds        save   checkpoint kind, bytes, seconds, pause
    sample      text
All rows also carry "step" (finished steps: the row of the first update has step 1) and "time" (unix seconds).
"""

import contextlib
import json
import math
import os
import shutil
import time

JOURNAL_SECONDS = 5.0  # how much time a kill may forget


def finite(value):
    """The value with every number that JSON does not know replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def write_json(path: str, value: dict):
    """Replace `path` by strict JSON, whole or not at all."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(finite(value), f, indent=2, allow_nan=False)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


def read_rows(path: str) -> list[dict]:
    """The rows of a metrics.jsonl, [] where there is none; a last line torn by a kill is left out."""
    rows = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as f:
        for line in f:
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def reported(path: str) -> int | None:
    """The step of a report.json, None where there is none."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as f:
        return json.load(f).get("step")


def last_step(path: str) -> int:
    """The last step that a metrics.jsonl has, -1 where there is none."""
    return max((row.get("step", -1) for row in read_rows(path)), default=-1)


@contextlib.contextmanager
def writing(path: str, say):
    """A full disk costs rows, not the run, as a failed save does: it is said."""
    try:
        yield
    except OSError as e:
        folder, name = os.path.split(path)
        say(f"{name} in {folder} is NOT WRITTEN ({e.strerror or e}); training goes on")


class Rows:
    """metrics.jsonl, without the rows of steps that will be done again. `fresh`: what lies there is another run's, and
    is put aside, as its checkpoints are."""

    def __init__(self, out_dir: str, say, fresh: bool, run_id: str | None):
        self.path, self.say = os.path.join(out_dir, "metrics.jsonl"), say
        os.makedirs(out_dir, exist_ok=True)
        if fresh and os.path.exists(self.path):
            os.replace(self.path, os.path.join(out_dir, f"metrics.before-{run_id}.jsonl"))

    def take_from(self, folder: str):
        """The rows that lie in a checkpoint's folder, where another machine wrote more of them."""
        there = os.path.join(folder, "metrics.jsonl")
        if last_step(there) > last_step(self.path):
            shutil.copy(there, self.path)

    def begin(self, step: int):
        """Append from here on: rows of steps after `step` are dropped, and so is a torn last line."""
        rows = [r for r in read_rows(self.path) if r.get("step", 0) <= step]
        with open(self.path + ".tmp", "w", encoding="utf-8") as f:
            f.writelines(json.dumps(r, allow_nan=False) + "\n" for r in rows)
        os.replace(self.path + ".tmp", self.path)
        self.file = open(self.path, "a", encoding="utf-8", buffering=1)

    def append(self, kind: str, step: int, **values):
        row = {"kind": kind, "step": step, "time": round(time.time(), 3), **finite(values)}
        with writing(self.path, self.say):
            self.file.write(json.dumps(row, allow_nan=False) + "\n")


class Journal:
    """The time that a run has used over all launches. time.json is so young that a kill loses almost none of it.

    `launched`: when the process began, on the monotonic `clock`, since start-up is paid for too."""

    def __init__(self, out_dir: str, say, launched: float, clock, fresh: bool):
        self.path, self.say, self.clock = os.path.join(out_dir, "time.json"), say, clock
        self.launched = launched
        self.used_before, self.restarts = (0.0, 0) if fresh else time_used(out_dir)

    def here(self) -> float:
        """Seconds of this launch."""
        return self.clock() - self.launched

    def used(self) -> float:
        """Seconds used by this run, over all launches."""
        return self.used_before + self.here()

    def write(self):
        self.written = self.clock()
        with writing(self.path, self.say):
            write_json(self.path, {"seconds": self.used(), "launches": self.restarts + 1})

    def keep_young(self):
        if self.clock() > self.written + JOURNAL_SECONDS:
            self.write()


def time_used(out_dir: str) -> tuple[float, int]:
    """(seconds, launches) that earlier launches of this run journalled, kills included."""
    try:
        with open(os.path.join(out_dir, "time.json"), encoding="utf-8") as f:
            journal = json.load(f)
        return float(journal["seconds"]), int(journal["launches"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, 0
