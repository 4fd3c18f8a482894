"""Watching a run's health: parameters that do not move, ranks that lag, and, when it ends badly, why.

Everything here only looks, and nothing changes the run. It is handed tensors, callables and numbers, and returns
sentences for a person, or None.

    movement = Movement(model.named_parameters())        # before the first update of a launch
    each of its first 20 steps, before the update:  movement.saw_gradients()
    after 20 updates:                               for line in movement.report(agree.gather): log(line)
    straggler(agree.gather({"host": host, "data": seconds, "tflops": rate}), step_seconds)      on logged steps
    Watcher(run) does all of it in the loop, beside proof.FirstStepProof
    box = BlackBox(out_dir); box.record(step=…, loss=…, samples=[first, end]) each step
    box.dump(reason, norms=…)                       before giving up
    with explained_memory(run): …                   out of memory in here names the settings
"""

import math
import os
import statistics
from collections import deque
from contextlib import contextmanager

import torch

from kernels import local
from launch import proof as proofs

from .metrics import write_json

LAG = 1.15  # a rank this much slower than the median is named
SAMPLE = 4096  # elements of each local shard that are compared


def kind_of(name: str) -> str:
    """Parameter class: the name without its layer number, so that 35 layers make one line."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


class Movement:
    """Finds parameters that receive gradients but do not move (bf16 masters, a rate of 0, an optimizer that was built
    on other tensors), and parameters that never receive one (dead branches). Only a sample of each shard is kept."""

    def __init__(self, named_parameters):
        self.parameters = dict(named_parameters)
        self.before = {name: self.sample(p).clone() for name, p in self.parameters.items()}
        self.seen: dict[str, torch.Tensor] = {}  # name -> 0-dim bool on the device: no sync until the report

    @staticmethod
    def sample(p) -> torch.Tensor:
        """Up to SAMPLE elements, evenly spread over this rank's rows."""
        flat = local(p).flatten()
        return flat[:: max(1, flat.numel() // SAMPLE)]

    @torch.no_grad()
    def saw_gradients(self):
        """Note which parameters have a gradient that is not zero. Call before the gradients are used up."""
        for name, p in self.parameters.items():
            if p.grad is not None:
                any_now = local(p.grad).count_nonzero() > 0
                self.seen[name] = any_now | self.seen[name] if name in self.seen else any_now

    @torch.no_grad()
    def report(self, gather=None) -> list[str]:
        """Warnings, worst first; [] when everything moves. `gather(value)` gives all ranks' values."""
        mine = {}
        for name, p in self.parameters.items():
            now, before = self.sample(p), self.before[name]
            gradient = bool(self.seen[name]) if name in self.seen else False
            mine[name] = [now.numel(), int((now != before).sum()), gradient]
        total = {name: [0, 0, False] for name in mine}
        for rank in gather(mine) if gather else [mine]:
            for name, (size, moved, gradient) in rank.items():
                total[name] = [total[name][0] + size, total[name][1] + moved, total[name][2] or gradient]
        dead = [n for n, (_, _, gradient) in total.items() if not gradient]
        frozen = [n for n, (_, moved, gradient) in total.items() if gradient and not moved]
        stiff: dict[str, list[int]] = {}
        for name, (size, moved, _) in total.items():
            if name not in dead and name not in frozen:
                entry = stiff.setdefault(kind_of(name), [0, 0])
                entry[0] += size
                entry[1] += moved
        lines = []
        if frozen:
            lines.append(f"FROZEN: {names(frozen)} received gradients but did not move: is the rate 0, or the optimizer "
                         "built on other tensors?")  # fmt: skip
        if dead:
            lines.append(
                f"DEAD: {names(dead)} never received a gradient: nothing that reaches the loss uses them"
            )
        lines += [
            f"hardly moving: {kind}: {100 * moved / size:.0f} % of the elements changed"
            for kind, (size, moved) in stiff.items()
            if moved < 0.5 * size and kind != "embed.weight"  # tokens that did not occur keep their rows
        ]
        return lines


def names(items: list[str]) -> str:
    """'a, b, c and 12 more'."""
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


def straggler(ranks: list[dict], step: float) -> str | None:
    """One line that names the slowest rank, or None. Each rank hands in what is its own, since collectives make all take
    equally long: {"host", "data": seconds that it waited for its batch, "tflops": of a small product}. step: seconds."""
    if len(ranks) < 2:
        return None
    data, rates = [r["data"] for r in ranks], [r["tflops"] for r in ranks]
    usual, worst = statistics.median(data), max(range(len(ranks)), key=data.__getitem__)
    if data[worst] - usual > (LAG - 1) * step:
        return (
            f"slowest: rank {worst} on {ranks[worst]['host']} waited {data[worst]:.2f} s of a step of {step:.2f} s for its "
            f"batch, the median {usual:.2f} s"
        )
    usual, worst = statistics.median(rates), min(range(len(ranks)), key=rates.__getitem__)
    if rates[worst] * LAG < usual:
        return (
            f"slowest: rank {worst} on {ranks[worst]['host']} computes at {rates[worst]:.3g} TFLOP/s, the median is "
            f"{usual:.3g}: throttled, or shared with another process?"
        )
    return None


class BlackBox:
    """The last 32 steps (sample numbers, losses, rates, norms), written to blackbox.json when a run gives up."""

    def __init__(self, out_dir: str, size: int = 32):
        self.path, self.ring = os.path.join(out_dir, "blackbox.json"), deque(maxlen=size)

    def record(self, **values):
        self.ring.append(values)

    def dump(self, reason: str, **values) -> str:
        """Write the ring and `values` (layer norms…); the path."""
        write_json(self.path, {"reason": reason, **values, "steps": list(self.ring)})
        return self.path


class OutOfMemory(RuntimeError):
    """A device, or the host, is out of memory. The same settings would be again: not retried."""

    exit_code = 70


@contextmanager
def explained_memory(run):
    """Out of memory in here says what was planned, and which setting to change."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as e:
        s, lines = run.settings, run.planned.lines() if run.planned else []
        table = "\n".join(line for line in lines if "memory" in line)
        raise OutOfMemory(
            f"out of memory at step {run.step + 1}: {str(e).splitlines()[0] if str(e) else 'host memory'}\n{table}\n"
            f"lower micro_batch={s.micro_batch}, or set activation_checkpointing=selective (now "
            f"{s.activation_checkpointing}), or reduce_every_micro_step=true (now {s.reduce_every_micro_step})"
        ) from e


class Diverged(RuntimeError):
    """Non-finite losses or gradients, again and again. The same run would be again: not retried."""

    exit_code = 70


def is_bad(loss: float, grad_norm: float) -> bool:
    """A step that must not update anything."""
    return not (math.isfinite(loss) and math.isfinite(grad_norm))


class Watcher:
    """Looks at updates and changes nothing: the proof of a launch's first update, parameters that do not move in its
    first 20, the slowest rank, and a black box of the last 32 steps."""

    def __init__(self, run):
        s = run.settings
        self.run, self.box = run, BlackBox(s.out_dir)
        self.movement, self.updates = Movement(run.model.named_parameters()), 0
        self.fresh = run.step == 0  # no update yet: the loss is known
        blocks = sum(map(len, run.optimizers[0].blocks.values()))
        head = "embed.weight" if s.tie_embeddings else "lm_head.weight"
        self.proof = proofs.FirstStepProof(
            run.agree, run.model.named_parameters(), blocks, {head: s.vocab_size}, run.log
        )
        run.optimizers[0].watch = self.proof.watch

    def before_update(self, loss: float, loss_by_domain: dict, grad_norm: float, rates: tuple):
        run, n = self.run, self.run.settings.sequences_per_step
        self.box.record(
            step=run.step + 1, samples=[run.step * n, (run.step + 1) * n], loss=loss, loss_by_domain=loss_by_domain,
            grad_norm=grad_norm, rates=rates,
        )  # fmt: skip
        if self.movement:
            self.movement.saw_gradients()
        if self.proof and not is_bad(loss, grad_norm):
            self.proof.before_update()
        if run.bad_in_a_row + 1 >= run.settings.max_bad_steps and is_bad(loss, grad_norm):
            squares = [
                [float(p.grad.to_local().float().square().sum()) if p.grad is not None else 0.0, n]
                for n, p in run.model.named_parameters()
            ]
            table = run.agree.gather(squares)
            norms = {n: math.sqrt(sum(rank[i][0] for rank in table)) for i, (_, n) in enumerate(squares)}
            worst = sorted(norms, key=lambda n: -norms[n] if math.isfinite(norms[n]) else -math.inf)[:10]
            if run.agree.rank == 0:
                path = self.box.dump("non-finite steps", largest_gradient_norms={n: norms[n] for n in worst})
                run.log(f"the last {len(self.box.ring)} steps are in {path}")

    def after_update(self, loss: float, grad_norm: float, rates: tuple):
        run = self.run
        self.updates += 1
        if self.movement and self.updates == 20:
            for line in self.movement.report(run.agree.gather):
                run.log(line)
            self.movement = None
        # A failed proof ends the run, and nothing has been saved yet. A step whose update was skipped proves nothing; a
        # run that resumes in front of such a step must get past it, so the next one is the proof.
        if self.proof and not is_bad(loss, grad_norm):
            self.proof.after_update(min(rates[:2]), run.settings.adam_eps)
            self.proof.conclude(loss, grad_norm, math.log(run.settings.vocab_size) if self.fresh else None)
            run.optimizers[0].watch = self.proof = None
            run.agree.first_step_done()

    def slowest(self, timers: dict) -> str | None:
        """One line about a rank that lags, on logged steps."""
        run = self.run
        if (run.step % run.settings.log_every) or run.agree.world == 1:
            return None
        mine = {"host": os.uname().nodename, "data": timers["data"]}
        mine["tflops"] = proofs.matmul_rate(run.device, repeats=10)
        return straggler(run.agree.gather(mine), timers["total"])
