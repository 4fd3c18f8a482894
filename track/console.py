"""What a person sees: the console's lines, with the seed's figures beside ours, and loss.png."""

import itertools
import math
import os
import statistics
from collections import Counter

from .meters import PARTS


class Console:
    """The lines of a step tell the speed of all steps since the last lines."""

    def __init__(self, log):
        self.log, self.window = log, Counter()  # seconds by part, "total", "tokens", "steps"

    def step(self, done, losses, speed: dict, memory: dict):
        """`done`: a metrics.Step; losses: of the last 50 steps."""
        window, self.window = self.window, Counter()
        total = window["total"] or 1e-9
        mean = statistics.fmean(losses) if losses else math.nan
        mfu = "n/a" if speed["mfu"] is None else f"{100 * speed['mfu']:.1f} %"
        names = zip(("data", "fwd+bwd", "optimizer", "other"), PARTS, strict=True)
        split = "  ".join(f"{name} {100 * window[part] / total:.0f}" for name, part in names)
        muon_lr, lr, _ = done.rates
        self.log(
            f"  loss {done.loss:.4f}  avg50 {mean:.4f}  ppl {perplexity(done.loss):.1f}"
            f"  mlr {muon_lr:.2e}  alr {lr:.2e}  grad {done.grad_norm:.3f}"
        )
        self.log(
            f"  {count(speed['tokens_per_second'])} tok/s  {count(speed['tokens_per_second_per_gpu'])}/GPU  MFU {mfu}"
            f"  {total / window['steps']:.2f}s/step ({split} %)"
            f"  mem {memory['now']:.1f} peak {memory['peak']:.1f}/{memory['total']:.0f} GB"
        )
        if len(done.loss_by_domain) > 1:
            epoch = {d: f" (epoch {n:.2f})" for d, n in done.epochs.items()}
            self.log("  " + by_domain(done.loss_by_domain, epoch))

    def evaluation(self, loss: float, loss_by_domain: dict, bits_per_byte: float | None, best: bool):
        bits = f"  {bits_per_byte:.4f} bits/byte" if bits_per_byte is not None else ""
        self.log(f"  >> val {loss:.4f}  ppl {perplexity(loss):.2f}{bits}{'  (best)' if best else ''}")
        if len(loss_by_domain) > 1:
            self.log("  >> " + by_domain(loss_by_domain))

    def report(self, report: dict):
        self.log("=" * 72)
        for key, value in report.items():
            if isinstance(value, dict):
                value = "  ".join(f"{k} {short(v)}" for k, v in value.items())
            self.log(f"  {key:<24}: {short(value)}")
        self.log("=" * 72)


def by_domain(losses: dict, after: dict | None = None) -> str:
    return "  ".join(f"{d} {loss:.4f}{(after or {}).get(d, '')}" for d, loss in losses.items())


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
