"""The numbers of a run: console lines, metrics.jsonl, loss.png, report.json. Rank 0 writes; every value is global.

The one idea: **speed is measured over training steps only, cost over everything.** The caller times each step
(evaluations and saves are not in it) and hands their pauses in separately, so tokens/s and MFU say how fast the
machine trains, while `time` in the report says where every second of the launch went.

    metrics = Metrics(settings, out_dir, world=8, device=device, flops_per_token=lambda ctx: …, main=agree.rank == 0)
    metrics.load_state(saved["metrics"])               # resume only
    metrics.launch(step)                               # opens metrics.jsonl, without the rows of steps after `step`
    timer = StepTimer(device); meter = LossMeter(settings.domains, device)
    each step:
        timer.start()
        for each micro-step:
            batch = …;                        timer.mark("data")
            loss, token_loss = model(x, y);   meter.add(token_loss, y, batch.domain)       # no host sync
            loss.backward();                  timer.mark("forward_backward")
        clip, step, zero_grad;                timer.mark("optimizer")
        loss, by_domain = meter.read(all_reduce)        # the step's one host sync
        metrics.step(step + 1, loss, by_domain, grad_norm, rates, ctx, tokens, timer.read(), epochs, seconds_left)
    metrics.evaluation(step, loss, by_domain, bits_per_byte, seconds)     metrics.sample(step, text)
    metrics.save(step, "latest", receipt)    metrics.event(event)    metrics.state() -> JSON for the checkpoint
    report = metrics.report(status="done", …)           # report.json, the table, loss.png

`step` here counts finished steps: the row of the first update has step 1, and a checkpoint "at step n" follows row n.

metrics.jsonl: one strict JSON object a line (a number that is not finite is null), told apart by "kind":
    launch      world, device, settings_digest            event   reason, decay_start, end_step
    step        loss, loss_by_domain, grad_norm, muon_lr, lr, momentum, ctx, tokens, tokens_per_second, …_per_gpu, mfu,
                seconds, {data,forward_backward,optimizer,other}_seconds, memory_gb, memory_peak_gb, epochs, bad
    evaluation  loss, loss_by_domain, bits_per_byte, seconds        save   checkpoint kind, bytes, seconds, pause
    sample      text
All rows also carry "step" and "time" (unix seconds).
"""

import contextlib
import importlib
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections import deque

import torch

from kernels import device_peak, host_memory

PARTS = ("data", "forward_backward", "optimizer", "other")
JOURNAL_SECONDS = 5.0  # how much time a kill may forget


class MetricsError(ValueError):
    """A tracker that was asked for and cannot be had."""

    exit_code = 64


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
    """The rows of a metrics.jsonl; a last line torn by a kill is left out."""
    rows = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            for line in f:
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    continue
    return rows


def last_step(path: str) -> int:
    """The last step that a metrics.jsonl has, -1 where there is none."""
    return max((row.get("step", -1) for row in read_rows(path)), default=-1)


class StepTimer:
    """Splits a step into parts. On a GPU by events in the stream, so that only time really lost counts and nothing
    is synchronised before `read`, which must follow the step's own sync (reading the loss)."""

    def __init__(self, device):
        self.cuda = torch.device(device).type == "cuda"
        self.marks: list[tuple[str | None, object]] = []

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self):
        self.begin = time.perf_counter()
        self.marks = [(None, self._now())]

    def mark(self, part: str):
        """What happened since the last mark was `part`."""
        self.marks.append((part, self._now()))

    def read(self) -> dict[str, float]:
        """{part: seconds}, with "other" and the whole step's wall time as "total"."""
        total = time.perf_counter() - self.begin
        parts = dict.fromkeys(PARTS, 0.0)
        if self.cuda:
            self.marks[-1][1].synchronize()
        for (_, a), (part, b) in zip(self.marks, self.marks[1:], strict=False):
            parts[part] = parts.get(part, 0.0) + (a.elapsed_time(b) / 1e3 if self.cuda else b - a)
        parts["other"] += max(0.0, total - sum(parts.values()))
        return {**parts, "total": total}


class LossMeter:
    """Sums of token losses per domain on the device, read once per step."""

    def __init__(self, domains: list[str], device):
        self.domains, self.sums = domains, torch.zeros(2, len(domains), dtype=torch.float64, device=device)

    def add(self, token_loss, targets, domain):
        """token_loss (B, T) with 0 where ignored, targets (B, T) with -1 where ignored, domain (B,) index."""
        rows = domain.to(self.sums.device)
        self.sums[0].index_add_(0, rows, token_loss.detach().sum(1, dtype=torch.float64))
        self.sums[1].index_add_(0, rows, (targets >= 0).sum(1, dtype=torch.float64))

    def read(self, all_reduce=None) -> tuple[float, dict[str, float], int]:
        """(mean loss, mean per domain seen, valid tokens), over all ranks when `all_reduce(tensor)` sums in place."""
        sums = self.sums.clone()
        self.sums.zero_()
        if all_reduce:
            all_reduce(sums)
        total, count = sums.tolist()
        means = {d: t / n for d, t, n in zip(self.domains, total, count, strict=True) if n}
        return sum(total) / max(sum(count), 1), means, int(sum(count))


def memory(device) -> dict[str, float]:
    """GB of this process: allocated now, peak since the start, what the device has. On a CPU: resident memory, and
    what the machine or container has."""
    if torch.device(device).type == "cuda":
        stats = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return {
            "now": stats[0] / 1e9,
            "peak": stats[1] / 1e9,
            "total": torch.cuda.mem_get_info(device)[1] / 1e9,
        }
    try:
        with open("/proc/self/status") as f:
            kib = {k: v.split()[0] for k, _, v in (line.partition(":") for line in f) if k.startswith("Vm")}
        # not getrusage's ru_maxrss, which a process inherits from the one that started it
        now, peak = (int(kib[name]) * 1024 / 1e9 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError):  # no Linux
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        now = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
    return {"now": now, "peak": peak, "total": host_memory() / 1e9}


def time_used(out_dir: str) -> tuple[float, int]:
    """(seconds, launches) that earlier launches of this run journalled, kills included."""
    try:
        with open(os.path.join(out_dir, "time.json"), encoding="utf-8") as f:
            journal = json.load(f)
        return float(journal["seconds"]), int(journal["launches"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, 0


class Metrics:
    """See the top of the file. `main=False` (every rank but 0) makes all methods cheap and silent."""

    def __init__(
        self, settings, out_dir, world=1, device="cpu", flops_per_token=None, log=print, main=True, launched=None,
        run_id=None, clock=time.monotonic,
    ):  # fmt: skip
        self.settings, self.out_dir, self.world, self.log, self.main = settings, out_dir, world, log, main
        self.device, self.clock = torch.device(device), clock
        self.flops_per_token = flops_per_token if callable(flops_per_token) else lambda ctx: flops_per_token
        # hand in the process's start: it is paid for too
        self.launched = clock() if launched is None else launched
        fresh = settings.resume == "never"
        # seconds: Budget's `used`, too
        self.used_before, self.restarts = (0.0, 0) if fresh else time_used(out_dir)
        self.losses = deque(maxlen=50)
        self.tokens = self.bad_steps = 0
        self.first_step = self.last = 0
        self.time = dict.fromkeys((*PARTS, "evaluation", "save", "start-up"), 0.0)  # seconds of all launches
        self.best: dict | None = None
        self.last_evaluation: dict | None = None
        # since the last console lines: seconds by part, "total", "tokens", "steps"
        self.window: dict[str, float] = {}
        # GB before the model: a CPU's resident memory holds Python and torch, too
        self.baseline = memory(device)["now"]
        self.trained = dict.fromkeys(("seconds", "tokens", "flops", "steps"), 0.0)  # of this launch
        self.trained_before = dict(self.trained)  # of the launch that saved what this one resumed
        self.peak, self.peak_source = device_peak(device) if main else (None, "")
        self.end_step = settings.steps
        self.tracker = self._tracker(run_id) if main else None
        self.complained: set[str] = set()  # files that could not be written, said once
        self.path = os.path.join(out_dir, "metrics.jsonl")
        if main:
            os.makedirs(out_dir, exist_ok=True)
            if fresh and os.path.exists(self.path):  # another run's, whose checkpoints stay as well
                os.replace(self.path, os.path.join(out_dir, f"metrics.before-{run_id}.jsonl"))
            self.journal()

    # --- the file -------------------------------------------------------------------------------------------
    def keep_rows_to(self, step: int):
        """Drop rows of steps after `step` (they will be done again), and a torn last line; then append."""
        rows = [r for r in read_rows(self.path) if r.get("step", 0) <= step]
        with open(self.path + ".tmp", "w", encoding="utf-8") as f:
            f.writelines(json.dumps(r, allow_nan=False) + "\n" for r in rows)
        os.replace(self.path + ".tmp", self.path)
        self.file = open(self.path, "a", encoding="utf-8", buffering=1)

    def row(self, kind: str, step: int, **values):
        """Append one row to metrics.jsonl."""
        if self.main:
            row = {"kind": kind, "step": step, "time": round(time.time(), 3), **finite(values)}
            with self.disk_trouble("metrics.jsonl"):
                self.file.write(json.dumps(row, allow_nan=False) + "\n")

    def journal(self):
        """Record the time used so that a kill cannot lose it."""
        self.journalled = self.clock()
        with self.disk_trouble("time.json"):
            write_json(
                os.path.join(self.out_dir, "time.json"),
                {"seconds": self.used(), "launches": self.restarts + 1},
            )

    @contextlib.contextmanager
    def disk_trouble(self, name: str):
        """A full disk costs rows, not the run: as a failed save does. Said once for each file."""
        try:
            yield
        except OSError as e:
            if name not in self.complained:
                self.log(f"{name} in {self.out_dir} is NOT WRITTEN ({e.strerror or e}); training goes on")
            self.complained.add(name)

    def used(self) -> float:
        """Seconds used by this run, over all launches."""
        return self.used_before + self.clock() - self.launched

    def launch(self, step: int = 0, **facts):
        """Start-up is over: training begins at `step` finished steps. Rows of later steps will be done again: dropped."""
        if self.main:
            self.keep_rows_to(step)
        self.first_step = self.last = step
        self.time["start-up"] += self.clock() - self.launched
        self.row("launch", step, world=self.world, device=self.peak_source, restarts=self.restarts, **facts)

    def state(self) -> dict:
        """JSON for the checkpoint."""
        return finite({
            "tokens": self.tokens, "bad_steps": self.bad_steps, "losses": list(self.losses), "best": self.best,
            "time": self.time, "last_evaluation": self.last_evaluation, "used": self.used(), "trained": self.trained,
        })  # fmt: skip

    def load_state(self, state: dict, folder: str = ""):
        """Continue with a checkpoint's totals, and with the rows in its `folder` where another machine wrote them; then
        call launch(step)."""
        rows = os.path.join(folder, "metrics.jsonl")
        if self.main and last_step(rows) > last_step(self.path):
            shutil.copy(rows, self.path)
        self.tokens, self.bad_steps = state["tokens"], state["bad_steps"]
        self.losses.extend(state["losses"])
        self.best, self.last_evaluation = state["best"], state["last_evaluation"]
        self.time = {**self.time, **state["time"]}
        self.used_before = max(self.used_before, state["used"])
        self.trained_before = state.get("trained", self.trained_before)

    # --- during the run -------------------------------------------------------------------------------------
    def step(
        self, step, loss, loss_by_domain, grad_norm, rates, ctx, tokens, timers, epochs=None, seconds_left=None,
        bad=False, end_step=None, slowest=None,
    ):  # fmt: skip
        """One optimizer step is done. rates = schedule.rates(…); tokens of this step, all ranks; timers from
        StepTimer.read(); `bad`: its update was skipped; slowest: watch.straggler's line, on logged steps."""
        timers = {"total": sum(timers.values()), **timers}
        seconds, flops = timers["total"], self.flops_per_token(ctx)
        for part in PARTS:
            self.time[part] += timers.get(part, 0.0)
        for name, value in {**timers, "tokens": tokens, "steps": 1}.items():
            self.window[name] = self.window.get(name, 0.0) + value
        done = {"seconds": seconds, "tokens": tokens, "flops": tokens * (flops or 0), "steps": 1}
        for name, value in done.items():
            self.trained[name] += value
        self.tokens += tokens
        self.last = step
        self.end_step = end_step or self.end_step
        self.bad_steps += bool(bad)
        if math.isfinite(loss):
            self.losses.append(loss)
        if not self.main:
            return
        speed, used = self.speed(tokens, seconds, flops), memory(self.device)
        row = dict(
            loss=loss, loss_by_domain=loss_by_domain, grad_norm=grad_norm, muon_lr=rates[0], lr=rates[1],
            momentum=rates[2], ctx=ctx, tokens=self.tokens, **speed, seconds=seconds,
            **{f"{p}_seconds": timers.get(p, 0.0) for p in PARTS}, memory_gb=used["now"], memory_peak_gb=used["peak"],
            epochs=epochs, bad=bool(bad),
        )  # fmt: skip
        self.row("step", step, **row)
        if self.tracker:
            self.tracker.log({k: v for k, v in finite(row).items() if isinstance(v, (int, float))}, step=step)
        if self.clock() - self.journalled > JOURNAL_SECONDS:
            self.journal()
        if step % self.settings.log_every == 0 or step == self.first_step + 1 or step == self.end_step:
            window = self.speed(self.window["tokens"], self.window["total"], flops)
            self.lines(step, row, window, used["total"], seconds_left)
            if slowest:
                self.log(slowest)
            self.window = {}

    def speed(self, tokens: float, seconds: float, flops: float | None) -> dict:
        """tokens/s, tokens/s/GPU and MFU (None where FLOPs or the device's peak are unknown)."""
        rate = tokens / seconds if seconds else 0.0
        mfu = rate * flops / self.world / self.peak if self.peak and flops else None
        return {"tokens_per_second": rate, "tokens_per_second_per_gpu": rate / self.world, "mfu": mfu}

    def eta(self, step: int) -> float:
        """Seconds until end_step at this launch's pace, evaluations and saves at the share they had so far."""
        pace = self.trained["seconds"] / max(1, step - self.first_step)
        pauses = (self.time["evaluation"] + self.time["save"]) / max(1e-9, sum(self.time[p] for p in PARTS))
        seconds = max(0, self.end_step - step) * pace * (1 + pauses)
        if self.settings.max_hours:  # a wsd horizon moves late: until then end_step is what was wished for
            seconds = min(seconds, max(0.0, self.settings.max_hours * 3600 - self.used()))
        return seconds

    def lines(
        self, step: int, row: dict, speed: dict, memory_total: float | None, seconds_left: float | None
    ):
        """The console lines of a step, with the seed's figures; speed is that of the steps since the last lines."""
        mean = statistics.fmean(self.losses) if self.losses else math.nan
        left = "" if seconds_left is None else f" | {seconds_left / 3600:.2f}h left"
        mfu = "n/a" if speed["mfu"] is None else f"{100 * speed['mfu']:.1f} %"
        total = self.window["total"] or 1e-9
        pace = total / self.window["steps"]
        split = "  ".join(
            f"{name} {100 * self.window.get(part, 0.0) / total:.0f}"
            for name, part in zip(("data", "fwd+bwd", "optimizer", "other"), PARTS, strict=True)
        )
        room = f"/{memory_total:.0f}" if memory_total else ""
        self.log(f"step {step:06d}/{self.end_step} | ctx {row['ctx']} | ETA {duration(self.eta(step))}{left}")
        self.log(
            f"  loss {row['loss']:.4f}  avg50 {mean:.4f}  ppl {perplexity(row['loss']):.1f}"
            f"  mlr {row['muon_lr']:.2e}  alr {row['lr']:.2e}  grad {row['grad_norm']:.3f}"
        )
        self.log(
            f"  {count(speed['tokens_per_second'])} tok/s  {count(speed['tokens_per_second_per_gpu'])}/GPU  MFU {mfu}"
            f"  {pace:.2f}s/step ({split} %)  mem {row['memory_gb']:.1f} peak {row['memory_peak_gb']:.1f}{room} GB"
        )
        if len(row["loss_by_domain"]) > 1:
            epoch = {d: f" (epoch {n:.2f})" for d, n in (row["epochs"] or {}).items()}
            self.log(
                "  " + "  ".join(f"{d} {v:.4f}{epoch.get(d, '')}" for d, v in row["loss_by_domain"].items())
            )

    def evaluation(self, step, loss, by_domain, bits_per_byte=None, seconds=0.0, final=False) -> bool:
        """An evaluation is done; True when it is the best so far. Draws loss.png."""
        self.time["evaluation"] += seconds
        best = math.isfinite(loss) and (self.best is None or loss < self.best["loss"])
        result = dict(loss=loss, loss_by_domain=by_domain, bits_per_byte=bits_per_byte)
        self.last_evaluation = {"step": step, **result}
        if best:
            self.best = {"step": step, "loss": loss}
        self.row("evaluation", step, **result, seconds=seconds, final=final)
        if self.main:
            bpb = f"  {bits_per_byte:.4f} bits/byte" if bits_per_byte is not None else ""
            self.log(f"  >> val {loss:.4f}  ppl {perplexity(loss):.2f}{bpb}{'  (best)' if best else ''}")
            if len(by_domain) > 1:
                self.log("  >> " + "  ".join(f"{d} {v:.4f}" for d, v in by_domain.items()))
            if self.tracker:
                self.tracker.log(
                    finite({"val_loss": loss, **{f"val_loss/{d}": v for d, v in by_domain.items()}}),
                    step=step,
                )
            self.picture()
        return best

    def save(self, step: int, kind: str, receipt: dict):
        """A checkpoint was saved: receipt with bytes, seconds, pause (seconds that training waited)."""
        self.time["save"] += receipt.get("pause", 0.0)
        self.row(
            "save", step, checkpoint=kind, **{k: v for k, v in receipt.items() if k not in ("step", "kind")}
        )

    def sample(self, step: int, text: str):
        self.row("sample", step, text=text)
        if self.main:
            self.log("  sample: " + text.replace("\n", "\n          "))

    def event(self, event):
        """A schedule event (schedule.Event)."""
        horizon = event.horizon.as_dict() if event.horizon else {}
        self.row("event", event.step, event=event.kind, reason=event.reason, **horizon)
        if event.horizon:
            self.end_step = event.horizon.end_step
        if self.main:
            self.log(f"[schedule] {event.reason}")

    # --- at the end -----------------------------------------------------------------------------------------
    def facts(self) -> dict:
        """The report's figures that metrics knows itself; the seed's names where it had them."""
        used, trained = memory(self.device), self.trained if self.trained["steps"] else self.trained_before
        speed = self.speed(
            trained["tokens"], trained["seconds"], trained["flops"] / max(1, trained["tokens"])
        )
        validation = self.last_evaluation or {}
        wall = self.used()
        parts = {k: round(v, 3) for k, v in self.time.items()}
        parts["rest"] = round(max(0.0, wall - sum(parts.values())), 3)
        return {
            "step": self.last,
            "train_loss": statistics.fmean(self.losses) if self.losses else None,
            "val_loss": validation.get("loss"),
            "val_ppl": perplexity(validation["loss"]) if validation.get("loss") is not None else None,
            "val_loss_by_domain": validation.get("loss_by_domain"),
            "bits_per_byte": validation.get("bits_per_byte"),
            "best_val": self.best and self.best["loss"],
            "best_step": self.best and self.best["step"],
            "elapsed_h": wall / 3600,
            "tokens_seen": self.tokens,
            "gpus": self.world,
            "hardware": f"{self.world}x {self.peak_source}",
            **speed,
            "seconds_per_step": trained["seconds"] / max(1, trained["steps"]),
            "seconds_by_part": parts,
            "memory_peak_gb": used["peak"],
            "memory_before_model_gb": self.baseline,
            "restarts": self.restarts,
            "bad_steps": self.bad_steps,
        }  # fmt: skip

    def report(self, **facts) -> dict:
        """Write report.json, print its table, draw loss.png. `facts` (run, fp8, plan…) come first or replace ours."""
        report = finite({**facts, **{k: v for k, v in self.facts().items() if k not in facts}})
        if self.main:
            self.journal()
            write_json(os.path.join(self.out_dir, "report.json"), report)
            self.log("=" * 72)
            for key, value in report.items():
                if isinstance(value, dict):
                    value = "  ".join(f"{k} {short(v)}" for k, v in value.items())
                self.log(f"  {key:<24}: {short(value)}")
            self.log("=" * 72)
            self.picture()
            if self.tracker:
                self.tracker.log({f"report/{k}": v for k, v in report.items() if isinstance(v, (int, float))})
        return report

    def picture(self):
        """loss.png, or once the line that says how to get it."""
        try:
            with self.disk_trouble("loss.png"):
                draw(
                    {os.path.basename(self.out_dir) or "run": read_rows(self.path)},
                    os.path.join(self.out_dir, "loss.png"),
                )
        except ImportError:
            if "matplotlib" not in self.complained:
                self.log(
                    "loss.png needs matplotlib: pip install matplotlib (the numbers are in metrics.jsonl)"
                )
            self.complained.add("matplotlib")

    def close(self):
        """The launch ends: the time of its last save and upload is journalled, the tracker told."""
        if self.main:
            self.journal()
            if self.tracker:
                self.tracker.finish()
                self.tracker = None

    def _tracker(self, run_id: str | None):
        """The package that was asked for, its run open: a launch that goes on continues the same curves."""
        name = self.settings.tracker
        if name == "none":
            return None
        try:
            module = importlib.import_module(name)
        except ImportError as e:
            raise MetricsError(
                f"tracker={name!r} but {name} cannot be imported ({e}): pip install {name}, or --tracker=none"
            ) from None
        run = run_id or os.path.basename(os.path.normpath(self.out_dir))
        same = {"id": run} if name == "wandb" else {}  # trackio knows a run by its name
        return (
            module.init(project="nova", name=run, resume="allow", config=self.settings.as_dict(), **same)
            or module
        )


def duration(seconds: float) -> str:
    """3725 -> '1.03h'; below an hour minutes, below two minutes seconds."""
    for limit, unit, size in ((48 * 3600, "d", 86400), (3600, "h", 3600), (120, "min", 60)):
        if seconds >= limit:
            return f"{seconds / size:.{2 if unit == 'h' else 1}f}{unit}"
    return f"{seconds:.0f}s"


def count(value: float) -> str:
    """1234567 -> '1.23M'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 20)) if math.isfinite(loss) else math.nan


def short(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"
    return str(value)


def draw(curves: dict[str, list[dict]], path: str):
    """Training and validation loss, validation per domain, learning rates below; several runs overlaid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for n, (name, rows) in enumerate(curves.items()):
        steps = [r for r in rows if r["kind"] == "step" and r["loss"] is not None]
        evaluations = [r for r in rows if r["kind"] == "evaluation" and r["loss"] is not None]
        x, colour = [r["step"] for r in steps], f"C{n}"
        top.plot(x, [r["loss"] for r in steps], color=colour, alpha=0.25, linewidth=0.8)
        top.plot(x, smooth([r["loss"] for r in steps]), color=colour, label=f"{name}: training")
        top.plot([r["step"] for r in evaluations], [r["loss"] for r in evaluations], "o-", color=colour,
                 markersize=4, label=f"{name}: validation")  # fmt: skip
        if len(curves) == 1:
            for m, domain in enumerate(evaluations[0]["loss_by_domain"] if evaluations else ()):
                points = [(r["step"], r["loss_by_domain"].get(domain)) for r in evaluations]
                top.plot(*zip(*points, strict=True), "--", linewidth=1, color=f"C{m + 1}", label=domain)
        bottom.plot(x, [r["muon_lr"] for r in steps], color=colour, label="Muon" if n == 0 else None)
        bottom.plot(x, [r["lr"] for r in steps], ":", color=colour, label="AdamW" if n == 0 else None)
    top.set_ylabel("loss, nats per token")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8) if axis.lines else None
    figure.savefig(path + ".tmp", dpi=110, format="png")
    os.replace(path + ".tmp", path)


def smooth(values: list[float], reach: int = 10) -> list[float]:
    """Mean of each value and up to `reach` on either side, as many on both: a trailing mean lags where the loss falls."""
    sums, out = [0.0, *itertools.accumulate(values)], []
    for i in range(len(values)):
        r = min(reach, i, len(values) - 1 - i)
        out.append((sums[i + r + 1] - sums[i - r]) / (2 * r + 1))
    return out
