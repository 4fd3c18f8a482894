"""The numbers of a run: its totals, and what each step, evaluation and save adds to rows, console and report.

The one idea: **speed is measured over training steps only, cost over everything.** The caller times each step
(evaluations and saves are not in it) and hands their pauses in separately, so tokens/s and MFU say how fast the
machine trains, while `seconds_by_part` in the report says where every second of the launch went.

`step` here counts finished steps: a checkpoint "at step n" follows row n. Every value is global; rank 0 writes.
"""

import functools
import importlib
import math
import os
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from .console import Console, draw, duration, perplexity
from .meters import PARTS, Machine, memory
from .rows import Journal, Rows, finite, read_rows, write_json, writing


class MetricsError(ValueError):
    """A tracker that was asked for and cannot be had."""

    exit_code = 64


@dataclass
class Step:
    """One optimizer step, as the loop hands it over when it is done."""

    step: int  # finished steps, with this one
    loss: float  # nats/token, mean over all ranks' tokens
    loss_by_domain: dict[str, float]
    grad_norm: float
    rates: tuple[float, float, float]  # schedule.rates: muon_lr, lr, momentum
    ctx: int  # tokens of a context
    tokens: int  # valid ones of this step, all ranks
    epochs: dict[str, float]  # of each domain's data
    seconds: dict[str, float] = field(default_factory=dict)  # StepTimer.read()

    @property
    def bad(self) -> bool:
        """A step that must not update anything."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


class Totals:
    """What a run has come to over all its launches: a checkpoint holds it."""

    def __init__(self):
        self.step = self.tokens = self.bad_steps = 0
        self.losses = deque(maxlen=50)  # of the last finite steps
        self.best: dict | None = None  # {"step", "loss"} of the best evaluation
        self.last_evaluation: dict | None = None
        self.time = Counter(dict.fromkeys((*PARTS, "evaluation", "save", "start-up"), 0.0))  # seconds
        self.trained = Counter(dict.fromkeys(("seconds", "tokens", "flops", "steps"), 0.0))  # of this launch
        self.trained_before = self.trained  # of the launch that saved what this one resumed

    def add(self, done: Step, flops: float | None):
        """flops: of one token."""
        seconds = done.seconds["total"]
        self.step = done.step
        self.tokens += done.tokens
        self.bad_steps += done.bad
        if math.isfinite(done.loss):
            self.losses.append(done.loss)
        self.time.update({part: done.seconds[part] for part in PARTS})
        self.trained.update(seconds=seconds, tokens=done.tokens, flops=done.tokens * (flops or 0), steps=1)

    def pace(self) -> float:
        """Seconds of a step of this launch, with evaluations and saves at the share that they had so far."""
        pauses = (self.time["evaluation"] + self.time["save"]) / max(1e-9, sum(self.time[p] for p in PARTS))
        return self.trained["seconds"] / max(1, self.trained["steps"]) * (1 + pauses)

    def state(self) -> dict:
        return {
            "tokens": self.tokens, "bad_steps": self.bad_steps, "losses": list(self.losses), "best": self.best,
            "time": self.time, "last_evaluation": self.last_evaluation, "trained": self.trained,
        }  # fmt: skip

    def load_state(self, state: dict):
        self.tokens, self.bad_steps = state["tokens"], state["bad_steps"]
        self.losses.extend(state["losses"])
        self.best, self.last_evaluation = state["best"], state["last_evaluation"]
        self.time = Counter({**self.time, **state["time"]})
        self.trained_before = state.get("trained", self.trained_before)


class Metrics:
    """See the top of the file. `main=False` (every rank but 0) makes all methods cheap and silent."""

    def __init__(
        self, settings, world, device, flops_per_token, log, main, launched, run_id, clock=time.monotonic
    ):
        out_dir, fresh = settings.out_dir, settings.resume == "never"
        log = log if main else lambda text: None
        self.settings, self.flops_per_token, self.totals = settings, flops_per_token, Totals()
        self.machine, self.console = Machine(device, world, measure=main), Console(log)
        self.say = functools.cache(log)  # each trouble once
        self.journal = Journal(out_dir, self.say, launched, clock, fresh)
        self.end_step = settings.steps
        self.tracker = open_tracker(settings, run_id) if main else None
        self.rows = Rows(out_dir, self.say, fresh, run_id) if main else None
        if main:
            self.journal.write()

    def row(self, kind: str, step: int, **values):
        if self.rows:
            self.rows.append(kind, step, **values)

    def track(self, values: dict, step: int | None = None):
        if self.tracker:
            numbers = {k: v for k, v in finite(values).items() if isinstance(v, (int, float))}
            self.tracker.log(numbers, step=step)

    def launch(self, step: int, end_step: int | None = None, **facts):
        """Start-up is over: training begins at `step` finished steps. Rows of later steps will be done again: dropped."""
        self.totals.step, self.end_step = step, end_step or self.end_step
        self.totals.time["start-up"] += self.journal.here()
        if self.rows:
            self.rows.begin(step)
        facts |= {"world": self.machine.world, "device": self.machine.name, "restarts": self.journal.restarts}
        self.row("launch", step, **facts)

    def state(self) -> dict:
        """JSON for the checkpoint."""
        return finite(self.totals.state() | {"used": self.journal.used()})

    def load_state(self, state: dict, folder: str = ""):
        """Continue with a checkpoint's totals, and with the rows in its `folder` where another machine wrote them; then
        call launch(step)."""
        if self.rows:
            self.rows.take_from(folder)
        self.totals.load_state(state)
        self.journal.used_before = max(self.journal.used_before, state["used"])

    def step(self, done: Step, seconds_left: float | None = None):
        """One optimizer step is done. seconds_left: of a budget."""
        flops = self.flops_per_token(done.ctx)
        self.totals.add(done, flops)
        if not self.rows:
            return
        self.console.window.update({**done.seconds, "tokens": done.tokens, "steps": 1})
        gb, (muon_lr, lr, momentum) = memory(self.machine.device), done.rates
        row = dict(
            loss=done.loss, loss_by_domain=done.loss_by_domain, grad_norm=done.grad_norm, muon_lr=muon_lr, lr=lr,
            momentum=momentum, ctx=done.ctx, tokens=self.totals.tokens,
            **self.machine.speed(done.tokens, done.seconds["total"], flops), seconds=done.seconds["total"],
            **{f"{part}_seconds": done.seconds[part] for part in PARTS}, memory_gb=gb["now"],
            memory_peak_gb=gb["peak"], epochs=done.epochs, bad=done.bad,
        )  # fmt: skip
        self.row("step", done.step, **row)
        self.track(row, done.step)
        self.journal.keep_young()
        first = self.totals.trained["steps"] == 1
        if done.step % self.settings.log_every == 0 or first or done.step == self.end_step:
            window = self.console.window
            speed = self.machine.speed(window["tokens"], window["total"], flops)
            left = "" if seconds_left is None else f" | {seconds_left / 3600:.2f}h left"
            ahead = f"ETA {duration(self.eta())}{left}"
            self.console.log(f"step {done.step:06d}/{self.end_step} | ctx {done.ctx} | {ahead}")
            self.console.step(done, self.totals.losses, speed, gb)

    def eta(self) -> float:
        """Seconds until end_step at this launch's pace."""
        seconds = max(0, self.end_step - self.totals.step) * self.totals.pace()
        if self.settings.max_hours:  # a wsd horizon moves late: until then end_step is what was wished for
            seconds = min(seconds, max(0.0, self.settings.max_hours * 3600 - self.journal.used()))
        return seconds

    def evaluation(self, step, loss, by_domain, bits_per_byte=None, seconds=0.0, final=False) -> bool:
        """An evaluation is done; True when it is the best so far: a loss that is no number never is. Draws loss.png."""
        totals, result = self.totals, dict(loss=loss, loss_by_domain=by_domain, bits_per_byte=bits_per_byte)
        totals.time["evaluation"] += seconds
        totals.last_evaluation = {"step": step, **result}
        best = math.isfinite(loss) and (totals.best is None or loss < totals.best["loss"])
        if best:
            totals.best = {"step": step, "loss": loss}
        self.row("evaluation", step, **result, seconds=seconds, final=final)
        self.console.evaluation(loss, by_domain, bits_per_byte, best)
        self.track({"val_loss": loss, **{f"val_loss/{d}": v for d, v in by_domain.items()}}, step)
        self.picture()
        return best

    def save(self, step: int, kind: str, receipt: dict):
        """A checkpoint was saved: receipt with bytes, seconds, pause (seconds that training waited)."""
        self.totals.time["save"] += receipt["pause"]
        numbers = {k: v for k, v in receipt.items() if k not in ("step", "kind")}
        self.row("save", step, **numbers, checkpoint=kind)

    def sample(self, step: int, text: str):
        self.row("sample", step, text=text)
        self.console.log("  sample: " + text.replace("\n", "\n          "))

    def event(self, event):
        """A schedule event (schedule.Event)."""
        horizon = event.horizon.as_dict() if event.horizon else {}
        self.row("event", event.step, event=event.kind, reason=event.reason, **horizon)
        self.end_step = horizon.get("end_step", self.end_step)
        self.console.log(f"[schedule] {event.reason}")

    def report(self, **facts) -> dict:
        """Write report.json, print its table, draw loss.png. `facts` (run, fp8, plan…) come first or replace ours."""
        ours = figures(self.totals, self.machine, self.journal)
        report = finite(facts | ours | facts)
        if self.rows:
            self.journal.write()
            write_json(os.path.join(self.settings.out_dir, "report.json"), report)
        self.console.report(report)
        self.picture()
        self.track({f"report/{k}": v for k, v in report.items()})
        return report

    def picture(self):
        """loss.png, or once the line that says how to get it."""
        if not self.rows:
            return
        folder = os.path.dirname(self.rows.path)
        path = os.path.join(folder, "loss.png")
        try:
            with writing(path, self.say):
                draw({os.path.basename(folder): read_rows(self.rows.path)}, path)
        except ImportError:
            how = "pip install matplotlib (the numbers are in metrics.jsonl)"
            self.say(f"loss.png needs matplotlib: {how}")

    def close(self):
        """The launch ends: the time of its last save and upload is journalled, the tracker told."""
        if self.rows:
            self.journal.write()
        if self.tracker:
            self.tracker.finish()


def figures(totals: Totals, machine: Machine, journal: Journal) -> dict:
    """What the report knows of itself; the seed's names where it had them."""
    validation, best = totals.last_evaluation or {}, totals.best or {}
    trained = totals.trained if totals.trained["steps"] else totals.trained_before
    flops, loss, wall = trained["flops"] / max(1, trained["tokens"]), validation.get("loss"), journal.used()
    parts = {k: round(v, 3) for k, v in totals.time.items()}
    return {
        "step": totals.step,
        "train_loss": statistics.fmean(totals.losses) if totals.losses else None,
        "val_loss": loss,
        "val_ppl": None if loss is None else perplexity(loss),
        "val_loss_by_domain": validation.get("loss_by_domain"),
        "bits_per_byte": validation.get("bits_per_byte"),
        "best_val": best.get("loss"),
        "best_step": best.get("step"),
        "elapsed_h": wall / 3600,
        "tokens_seen": totals.tokens,
        "gpus": machine.world,
        "hardware": f"{machine.world}x {machine.name}",
        **machine.speed(trained["tokens"], trained["seconds"], flops),
        "seconds_per_step": trained["seconds"] / max(1, trained["steps"]),
        "seconds_by_part": parts | {"rest": round(max(0.0, wall - sum(parts.values())), 3)},
        "memory_peak_gb": memory(machine.device)["peak"],
        "memory_before_model_gb": machine.baseline,
        "restarts": journal.restarts,
        "bad_steps": totals.bad_steps,
    }


def open_tracker(settings, run_id: str | None):
    """The package that was asked for, its run open: a launch that goes on continues the same curves."""
    name = settings.tracker
    if name == "none":
        return None
    try:
        module = importlib.import_module(name)
    except ImportError as e:
        cure = f"pip install {name}, or --tracker=none"
        raise MetricsError(f"tracker={name!r} but {name} cannot be imported ({e}): {cure}") from None
    run = run_id or os.path.basename(os.path.normpath(settings.out_dir))
    same = {"id": run} if name == "wandb" else {}  # trackio knows a run by its name
    config = settings.as_dict()
    return module.init(project="nova", name=run, resume="allow", config=config, **same) or module
