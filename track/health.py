"""Watching a run's health: parameters that do not move, ranks that lag, and, when it ends badly, why. Out come sentences for
a person, or an exception that explains."""

import math
import os
import statistics
from collections import Counter, deque
from contextlib import contextmanager

import torch

from kernels import local
from launch import proof as proofs

from .rows import write_json

LAG = 1.15  # a rank this much slower than the median is named
SAMPLE = 4096  # elements of each local shard that are compared
UPDATES = 20  # of a launch, after which everything must have moved


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
                self.seen[name] = (local(p.grad).count_nonzero() > 0) | self.seen.get(name, False)

    @torch.no_grad()
    def report(self, gather=lambda mine: [mine]) -> list[str]:
        """Warnings, worst first; [] when everything moves. `gather(value)` gives all ranks' values."""
        mine = {}
        for name, p in self.parameters.items():
            changed = self.sample(p) != self.before[name]
            mine[name] = [changed.numel(), int(changed.sum()), int(self.seen.get(name, False))]
        ranks = gather(mine)
        dead, frozen = [], []
        sizes, moves = Counter(), Counter()  # by name without the layer's number: 35 layers make one line
        for name in mine:
            size, moved, gradient = map(sum, zip(*(rank[name] for rank in ranks), strict=True))
            if not gradient:
                dead.append(name)
            elif not moved:
                frozen.append(name)
            else:
                kind = ".".join(part for part in name.split(".") if not part.isdigit())
                sizes[kind] += size
                moves[kind] += moved
        lines = []
        if frozen:
            why = "is the rate 0, or the optimizer built on other tensors?"
            lines.append(f"FROZEN: {names(frozen)} received gradients but did not move: {why}")
        if dead:
            why = "nothing that reaches the loss uses them"
            lines.append(f"DEAD: {names(dead)} never received a gradient: {why}")
        for kind, share in ((kind, moves[kind] / sizes[kind]) for kind in sizes):
            if share < 0.5 and kind != "embed.weight":  # tokens that did not occur keep their rows
                lines.append(f"hardly moving: {kind}: {100 * share:.0f} % of the elements changed")
        return lines


def names(items: list[str]) -> str:
    """'a, b, c and 12 more'."""
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


def straggler(ranks: list[dict], step: float) -> str | None:
    """One line that names the slowest rank, or None. Each rank hands in what is its own, since collectives make all take
    equally long: {"host", "data": seconds that it waited for its batch, "tflops": of a small product}. step: seconds."""
    waits, rates = [r["data"] for r in ranks], [r["tflops"] for r in ranks]
    usual, worst = statistics.median(waits), waits.index(max(waits))
    if waits[worst] - usual > (LAG - 1) * step:
        what = (
            f"waited {waits[worst]:.2f} s of a step of {step:.2f} s for its batch, the median {usual:.2f} s"
        )
        return f"slowest: rank {worst} on {ranks[worst]['host']} {what}"
    usual, worst = statistics.median(rates), rates.index(min(rates))
    if rates[worst] * LAG < usual:
        what = f"computes at {rates[worst]:.3g} TFLOP/s, the median is {usual:.3g}"
        why = "throttled, or shared with another process?"
        return f"slowest: rank {worst} on {ranks[worst]['host']} {what}: {why}"
    return None


class OutOfMemory(RuntimeError):
    """A device, or the host, is out of memory. The same settings would be again: not retried."""

    exit_code = 70


class Diverged(RuntimeError):
    """Non-finite losses or gradients, again and again. The same run would be again: not retried."""

    exit_code = 70


@contextmanager
def explained_memory(settings, planned, step):
    """Out of memory in here says what was planned (a plan, or None), and which setting to change. `step()`: finished ones."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as e:
        table = "\n".join(line for line in (planned.lines() if planned else ()) if "memory" in line)
        raise OutOfMemory(
            f"out of memory at step {step() + 1}: {str(e).splitlines()[0] if str(e) else 'host memory'}\n{table}\n"
            f"lower micro_batch={settings.micro_batch}, or set activation_checkpointing=selective (now "
            f"{settings.activation_checkpointing}), or reduce_every_micro_step=true (now {settings.reduce_every_micro_step})"
        ) from e


class Watcher:
    """Looks at updates and changes nothing: the proof of a launch's first update, parameters that do not move in its
    first 20, the slowest rank, and a black box of the last 32 steps, written when a run gives up.

    blocks: how many the model has for `muon`, which shows each to the proof; fresh: no update yet, so the loss is known."""

    def __init__(self, settings, agree, named_parameters, blocks: int, muon, log, fresh: bool):
        self.settings, self.agree, self.log, self.fresh = settings, agree, log, fresh
        self.parameters, self.muon, self.updates, self.bad_in_a_row = dict(named_parameters), muon, 0, 0
        self.movement, self.box = Movement(self.parameters.items()), deque(maxlen=32)
        dense = {"embed.weight" if settings.tie_embeddings else "lm_head.weight": settings.vocab_size}
        self.proof = proofs.FirstStepProof(agree, self.parameters.items(), blocks, dense, log)
        muon.watch = self.proof.watch

    def before_update(self, done):
        """done: a metrics.Step, its gradients in place. An update that would not be finite is skipped by the caller."""
        self.bad_in_a_row = self.bad_in_a_row + 1 if done.bad else 0
        n = self.settings.sequences_per_step
        self.box.append({
            "step": done.step, "samples": [(done.step - 1) * n, done.step * n], "loss": done.loss,
            "loss_by_domain": done.loss_by_domain, "grad_norm": done.grad_norm, "rates": done.rates,
        })  # fmt: skip
        if self.movement:
            self.movement.saw_gradients()
        if self.proof and not done.bad:
            self.proof.before_update()
        if self.bad_in_a_row >= self.settings.max_bad_steps:
            self.write_box()

    def write_box(self):
        """blackbox.json: the last steps, and which gradients of this one are the largest."""
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        mine = {name: float(local(g).float().square().sum()) for name, g in grads.items()}
        squares = self.agree.gather(mine)
        norms = {name: math.sqrt(sum(rank[name] for rank in squares)) for name in grads}
        largest = sorted(norms, key=lambda n: norms[n] if math.isfinite(norms[n]) else math.inf, reverse=True)
        if self.agree.rank == 0:
            path = os.path.join(self.settings.out_dir, "blackbox.json")
            table = {name: norms[name] for name in largest[:10]}
            box = {"reason": "non-finite steps", "largest_gradient_norms": table, "steps": list(self.box)}
            write_json(path, box)
            self.log(f"the last {len(self.box)} steps are in {path}")

    def after_update(self, done):
        """Raises Diverged after max_bad_steps skipped updates in a row, StartupError where the proof fails."""
        if done.bad:
            found, times = f"loss {done.loss}, grad_norm {done.grad_norm}", self.bad_in_a_row
            self.log(f"step {done.step}: {found}: update skipped ({times} in a row)")
            if times >= self.settings.max_bad_steps:
                raise Diverged(
                    f"{times} non-finite steps in a row up to step {done.step}: lower muon_lr and lr, or look at "
                    f"the data of samples {(done.step - 1) * self.settings.sequences_per_step} and following"
                )
        self.updates += 1
        if self.updates == UPDATES:
            for line in self.movement.report(self.agree.gather):
                self.log(line)
            self.movement = None
        # A failed proof ends the run, and nothing has been saved yet. A step whose update was skipped proves nothing; a
        # run that resumes in front of such a step must get past it, so the next one is the proof.
        if self.proof and not done.bad:
            self.proof.after_update(min(done.rates[:2]), self.settings.adam_eps)
            expected = math.log(self.settings.vocab_size) if self.fresh else None
            self.proof.conclude(done.loss, done.grad_norm, expected)
            self.muon.watch = self.proof = None
            self.agree.first_step_done()

    def after_step(self, done):
        """Name a rank that lags, at logged steps."""
        if done.step % self.settings.log_every or self.agree.world == 1:
            return
        mine = {"host": os.uname().nodename, "data": done.seconds["data"]}
        mine["tflops"] = proofs.matmul_rate(self.agree.device, repeats=10)
        if line := straggler(self.agree.gather(mine), done.seconds["total"]):
            self.log(line)
