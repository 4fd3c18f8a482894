"""Train a Nova.

    python train_nova.py config/quickstart.py                          # one process, CPU or GPU
    torchrun --nproc_per_node=8 train_nova.py config/h200_8x.py        # FSDP2 on eight GPUs

The run, top to bottom: environment, start-up stages (each with a deadline and a verdict that all ranks share), the
loop, the report. What a stage does lives in the file that owns it; this file is the story.

Three rules hold the loop together:
* The global batch, the data order and the learning rates are pure functions of the step (and of a recorded horizon): the
  run is the same on any number of GPUs, and a resumed run is the same run.
* No rank decides alone: one small exchange at the start of each step, when its batch is in hand, carries everything
  that could make ranks differ (signals, clocks, bad data).
* World size 1 takes the same path: plain `python` makes a one-rank process group.
"""

import sys

from launch import entry

if __name__ == "__main__":
    entry.prepare(lost="going on without it, the numbers are in metrics.jsonl")

from launch import startup
from settings import MATH, ROUNDING, Settings, SettingsError, changes, load_settings, refuse_changes

if __name__ == "__main__":  # CUDA and NCCL read their environment when torch is imported
    SETTINGS = startup.load_or_exit(load_settings, sys.argv[1:])

import dataclasses
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import data
import drill
import model
import muon
import plan
import sample
import schedule
import track
from launch import proof
from store import checkpoint, uploads

# A finished run waits this long for its last uploads, in seconds; what is not on the Hub by then stays local.
UPLOAD_SECONDS = 4 * 3600
STATUS_SECONDS = 10.0  # before torchrun's kill, for leaving and the status


@dataclass
class Run:
    """What the start-up builds, for the loop and its helpers."""

    settings: Settings
    agree: startup.Agreement
    log: Callable[[str], None]
    device: torch.device
    asked: dict = None  # the settings as given: what a resume compares
    chosen: dict = None  # what use_fp8 and use_compile became: stored, never chosen again
    changed: set = frozenset()  # kinds of the settings that differ from the checkpoint's
    stream: data.Stream = None
    planned: plan.Plan | None = None  # None: a device whose data sheet is not known
    model: torch.nn.Module = None
    optimizers: list = None  # [muon, adamw]
    checkpoints: checkpoint.Checkpoints = None
    publisher: object = None  # hub.Publisher of its checkpoints and export, when they are published
    metrics: track.Metrics = None
    baseline: float | None = None  # nats/token of a bigram table on the held-out rows, for small vocabularies
    budget: schedule.Budget = None  # all ranks keep one; rank 0's decides
    horizon: schedule.Horizon = None  # start of the decay, end of the run: recorded, never read from a clock
    step: int = 0  # finished optimizer steps
    saved_at: float = 0.0  # monotonic seconds of the newest save of this launch
    bad_in_a_row: int = 0  # non-finite steps
    receipts: list = dataclasses.field(default_factory=list)  # of this launch's finished saves
    grace: float | None = None  # seconds from a signal to torchrun's kill; None: unlimited, or warned about

    @property
    def export_folder(self) -> str:
        return os.path.join(self.settings.out_dir, "export")


def train(settings: Settings) -> dict:
    """The whole run. Returns facts for status.json; raises startup.Stopped after an agreed stop."""
    launched = time.monotonic()
    check_needs(settings)
    if settings.drill:
        settings.out_dir, settings.resume = os.path.join(settings.out_dir, "drill"), "never"
    log = startup.logger(int(os.environ.get("RANK", 0)))
    agree = startup.init(settings, log=log)
    run = start_up(Run(settings, agree, log, agree.device, grace=startup.grace_seconds()), launched)
    if complete(run):
        return published(run)
    with track.explained_memory(settings, run.planned, lambda: run.step):
        if settings.drill:
            return drill.drill(run, loop, evaluate, save, resume, export)
        stop = loop(run, settings.stop_at)
    if stop:
        save(run, "latest", wait=True)
        patience = upload_patience(run, stop, time.monotonic())  # a first signal ends it at once
        run.checkpoints.close(patience, lambda: run.agree.signals.name not in (None, stop))
        run.metrics.close()
        saved = agree.info["saved"]
        how = (
            "saved"
            if saved == run.step
            else f"NOT SAVED ({run.checkpoints.failures[-1]}), only step {saved} is"
        )
        raise startup.Stopped(
            stop, f"stopped by {stop} after step {run.step}, {how}: the same command goes on"
        )
    return finish(run)


def upload_patience(run: Run, stop: str | None, now: float) -> float:
    """Seconds that the end of a run (stop None), or of a launch, waits for uploads; the next launch does the rest."""
    patience, grace, signalled = run.settings.hub_patience, startup.grace_seconds(), run.agree.signals.when
    if stop in (None, "job_hours"):  # what is left of a budget was reserved for it
        left = run.budget.left(now)
        return UPLOAD_SECONDS if left is None else min(UPLOAD_SECONDS, max(patience, left))
    if grace is not None and signalled:  # torchrun kills then: the status must be written by that time
        return max(0.0, min(patience, signalled + grace - STATUS_SECONDS - now))
    return patience


def check_needs(s: Settings):
    """What the settings name and this machine lacks: all of it in one error, before anything is built."""
    lacks = []
    if s.device == "cuda" and not torch.cuda.is_available():
        lacks.append(
            s.error("device", "this machine has no GPU that torch can use; --device=cpu trains on the CPU")
        )
    if s.data is None:
        how = 'set --data to "python", a folder or a Hub dataset repo, or HF_DATASET_REPO (config/quickstart.py needs none)'
        lacks.append(s.error("data", f"no data named: {how}"))
    if s.drill and s.steps < drill.STEPS + 2:
        lacks.append(s.error("total_steps", f"a drill takes {drill.STEPS + 2} steps"))
    if lacks:
        raise SettingsError("\n".join(map(str, lacks)))


# --- start-up ----------------------------------------------------------------------------------------------------


def start_up(run: Run, launched: float) -> Run:
    """All stages up to the first step. A failing or hanging rank ends all ranks, and is named."""
    s, agree, log = run.settings, run.agree, run.log
    with agree.stage("environment"):
        proof.check_versions(agree, s, log)
    with agree.stage("device"):
        proof.check_device(agree, log)
        proof.check_links(agree, s, log)
    with agree.stage("collectives"):
        mesh = startup.make_mesh(s, agree.world, run.device)
        # a mesh's groups come with torch's own limit, 10 minutes of NCCL
        agree.limit_collectives(s.init_timeout)
        groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
        proof.check_collectives(agree, run.device, groups, log)
    with agree.stage("settings"):
        s.grad_accum(agree.world)  # an error if the batch does not divide
        run.asked = s.as_dict()
    with agree.stage("checkpoints"):
        saved, path = open_checkpoints(run)
        if saved:
            keep_choices(s, saved["chosen"])
    with agree.stage("data"):
        run.stream = data.open_stream(s, agree, log, saved and saved["data"])
        s.vocab_size = run.stream.vocab_size
        proof.check_equal(agree, "the vocabulary", s.digest())
        run.metrics = track.Metrics(
            s, agree.world, run.device, lambda ctx: model.flops_per_token(s, ctx), log,
            main=agree.rank == 0, launched=launched, run_id=run.checkpoints.run_id,
        )  # fmt: skip
        if run.stream.vocab_size <= 4096:
            run.baseline = data.bigram_baseline(run.stream, 1e6, s.final_eval_rows)
            log(f"bigram baseline {run.baseline:.4f}: below it a model has learnt more than pairs of tokens")
        planned = run.planned = plan_of(run)
        for line in planned.lines() if planned else [f"no plan: this is none of {', '.join(plan.GPUS)}"]:
            log(line)
        files = planned.files if planned else {"checkpoint": 0, "weights": 0}
        room = run.checkpoints.room(files["checkpoint"]) + int(files["weights"])
        proof.check_storage(agree, s.out_dir, room, log)
    with agree.stage("model"), track.explained_memory(s, planned, lambda: run.step):
        run.model = model.build_model(s, mesh, run.device, log)
    with agree.stage("model check"):
        proof.check_weights(agree, run.model.named_parameters(), mesh.get_local_rank("shard"), log)
    with agree.stage("optimizers"), track.explained_memory(s, planned, lambda: run.step):
        run.optimizers = muon.build_optimizers(run.model, s, run.model.row_blocks(), log)
    with agree.stage("compile", s.init_timeout), track.explained_memory(s, planned, lambda: run.step):
        if run.model.compiled:
            model.compile_shapes(run.model, schedule.contexts(s), run.device)
        run.chosen = {"fp8": run.model.fp8, "compile": run.model.compiled}
    with agree.stage("resume"):
        resume(run, saved, path)
        assumed = (planned.assumed if planned else {}) | drill.drilled(s.out_dir)
        run.budget = schedule.Budget(s, launched, run.metrics.journal.used_before, assumed, agree.world)
        if saved:
            run.budget.load_state(saved["budget"])
        # the curve goes on where only the checkpoints do
        run.checkpoints.beside = [os.path.join(s.out_dir, "metrics.jsonl")]
        run.metrics.launch(run.step, run.horizon.end_step, settings_digest=s.digest())
        run.saved_at = time.monotonic()
    agree.note(step=run.step, saved=run.step if saved else None)
    return run


def open_checkpoints(run: Run) -> tuple[dict | None, str | None]:
    """Take the run's folder; the saved state to go on from and its folder, or (None, None) for a fresh start."""
    s = run.settings
    folder = os.path.join(s.out_dir, "checkpoints")
    if s.hf_model_repo and s.publish:
        import hub

        run.publisher = hub.Publisher(s.hf_model_repo, run.log, s.hub_patience)
        run.agree.on_rank_0(lambda: uploads.check_write(run.publisher, folder, s.resume, run.log), "Hub")
    checkpoint.check_shared_folder(s.out_dir, run.agree)
    run.checkpoints = checkpoint.Checkpoints(
        folder, None, run.agree, s.ckpt_keep, run.log, None if s.drill else run.publisher, s.resume
    )
    path, allowed = run.checkpoints.newest(), s
    if path is None and s.schedule_from:  # a branch: another run's state, under this run's schedule
        path = s.schedule_from
        if not os.path.exists(os.path.join(path, "state.json")):
            raise s.error("schedule_from", "is not the folder of a checkpoint (…/checkpoints/step-…)")
        allowed = dataclasses.replace(s, allow_change=[*s.allow_change, *schedule.HORIZON])
    if path is None:
        run.log(f"[resume] a fresh start in {s.out_dir}")
        return None, None
    saved = checkpoint.read_state(path)
    for line in refuse_changes(saved["settings"], allowed):
        run.log(f"[resume] changed setting {line}")
    run.changed = {kind for _, _, _, kind in changes(saved["settings"], s)}
    return saved, path


def keep_choices(s: Settings, chosen: dict):
    """In a run that goes on, "auto" means what it became in the first launch: it never chooses again."""
    if s.use_fp8 == "auto":
        s.use_fp8 = "on" if chosen["fp8"] else "off"
    if s.use_compile == "auto":
        s.use_compile = chosen["compile"]


def plan_of(run: Run) -> plan.Plan | None:
    """What this run needs and buys on this kind of device; None where its data sheet is not known."""
    name = "cpu" if run.device.type == "cpu" else torch.cuda.get_device_name(run.device).lower()
    known = [gpu for gpu in plan.GPUS if gpu in name]
    return plan.plan(run.settings, run.agree.world, known[0]) if known else None


def resume(run: Run, saved: dict | None, path: str | None):
    """Put the saved tensors, horizon and totals in place. A failed load stops the run: it never starts over."""
    if not saved:
        run.horizon = schedule.first_horizon(run.settings)
        return
    shared, own = tensors(run)
    _, own_loaded = run.checkpoints.load(path, shared, own)
    restore_optimizers(run, shared, own if own_loaded else None)
    run.step = saved["step"]
    branch = path == run.settings.schedule_from
    horizon = schedule.Horizon.from_dict(saved["horizon"])
    run.horizon, line = schedule.resumed_horizon(run.settings, run.step, horizon, saved["settings"], branch)
    if line:
        run.log(f"[resume] {line}")
    if branch:
        run.metrics.totals.tokens = saved["metrics"]["tokens"]
    else:
        run.metrics.load_state(saved["metrics"], path)
    exact = own_loaded and saved["world"] == run.agree.world and ROUNDING not in run.changed
    exact = exact and (run.device.type == "cpu" or run.settings.deterministic)
    how = "bit-exact" if exact else "to rounding"
    if saved["code"] != proof.code_digest():
        how = "with changed code"
    if MATH in run.changed:
        how = "with changed settings"
    if "data" in run.settings.allow_change:
        how = "with the data that there is now"
    run.log(f"[resume] step {run.step} of {path}, saved by {saved['world']} ranks: goes on {how}")


def complete(run: Run) -> bool:
    """Whether the folder holds a finished run: there is nothing to do but what a kill left out of its export."""
    report = os.path.join(run.settings.out_dir, "report.json")
    if run.step < run.horizon.end_step or not os.path.exists(report):
        return False
    with open(report, encoding="utf-8") as f:
        done = json.load(f).get("step") == run.step
    if done:
        s = run.settings
        longer = "target_tokens" if s.target_tokens else "total_steps"
        longer = (
            f"{longer} (with --allow_change={longer})" if run.horizon.end_step >= s.steps else "max_hours"
        )
        run.log(
            f"this run is complete: step {run.step} of {run.horizon.end_step}, see {report}. To train on, raise {longer}; "
            "for another run choose another out_dir"
        )
        complete_export(run)
    return done


def published(run: Run, seconds: float = UPLOAD_SECONDS) -> dict:
    """Wait so long for the uploads, of an earlier launch too. -> facts for status.json"""
    run.checkpoints.publish(run.export_folder, "")
    left = run.checkpoints.close(seconds, lambda: run.agree.signals.name is not None)
    run.metrics.close()
    return {"step": run.step, "export": run.export_folder, "unpublished": left}


# --- the loop ----------------------------------------------------------------------------------------------------


def loop(run: Run, stop_at: int | None) -> str | None:
    """Train to the horizon's end (which agreed events may move) or to step `stop_at`. None at the end, or why it stopped."""
    s, agree, stream = run.settings, run.agree, run.stream
    timer, meter = track.StepTimer(run.device), track.LossMeter(stream.domains, run.device)
    named, fresh, stop = run.model.named_parameters(), run.step == 0, None
    watcher = track.Watcher(s, agree, named, run.optimizers[0], run.log, fresh)
    run.model.train()
    while run.step < min(stop_at or run.horizon.end_step, run.horizon.end_step) and not stop:
        agree.tick(f"step {run.step + 1}", s.init_timeout if watcher.proof else s.step_timeout)
        timer.start()
        batch, problem = next_batch(run)
        timer.mark("data")
        stop, save_due, valid_tokens = agree_on_step(run, batch, problem)
        rates = muon_lr, lr, momentum = schedule.rates(run.step, s, run.horizon)
        muon.set_rates(run.optimizers, muon_lr, lr, momentum)
        timer.mark("other")

        accumulate(run, batch, meter)
        timer.mark("forward_backward")
        grad_norm = muon.clip_grads(run.model, s.grad_clip, s.tokens_per_step / max(valid_tokens, 1)).item()
        loss, loss_by_domain, _ = meter.read(dist.all_reduce)
        ctx = schedule.context_length(run.step, s)
        done = track.Step(
            run.step + 1, loss, loss_by_domain, grad_norm, rates, ctx, valid_tokens, stream.epochs()
        )
        watcher.before_update(done, last=run.bad_in_a_row + 1 >= s.max_bad_steps)
        update(run, done)
        watcher.after_update(done)
        timer.mark("optimizer")

        run.step += 1
        done.seconds = timer.read()
        run.budget.stepped(done.seconds["total"])
        run.metrics.step(done, run.budget.left(time.monotonic()))
        watcher.after_step(done)
        stream.refresh(run.step)
        if run.step % s.eval_every == 0 and run.step < run.horizon.end_step:
            if evaluate(run, s.eval_rows):
                save(run, "best")
            print_sample(run)
        if run.step % s.ckpt_every == 0 and run.step < run.horizon.end_step:
            save(run, "milestone")
        elif save_due and not stop:  # a stop saves by itself
            save(run, "latest")
        collect_saves(run)
    return stop or (None if run.step >= run.horizon.end_step else "stop_at")


def next_batch(run: Run) -> tuple[data.Batch | None, Exception | None]:
    """This rank's rows of the next step, or the problem: it is agreed on before any rank enters a collective."""
    try:
        return run.stream.next_batch(run.settings.sequences_per_step), None
    except (data.DataError, OSError) as e:
        return None, e


def agree_on_step(
    run: Run, batch: data.Batch | None, problem: Exception | None
) -> tuple[str | None, bool, int]:
    """The control word: (reason to stop after this step or None, whether to save, valid tokens of all ranks).

    Rank 0's clock may also move the horizon; everything else in here is the same on all ranks."""
    s, agree, now = run.settings, run.agree, time.monotonic()
    event = run.budget.decide(run.step, now, run.horizon) if agree.rank == 0 else None
    save_due = agree.rank == 0 and 0 < s.save_minutes * 60 <= now - run.saved_at
    stop = signal.Signals[agree.signals.name] if agree.signals.name else 0
    valid = int((batch.y >= 0).sum()) if batch else 0
    flags, (valid,) = agree.control([stop, bool(problem), bool(event), save_due], [valid])
    stop, any_problem, any_event, save_due = flags
    if any_problem:  # the state is whole: it is saved, without the batch that some ranks have drawn
        run.stream.rewind(run.stream.before)
        if run.step > (agree.info["saved"] or 0):
            save(run, "latest", wait=True)
        agree.verdict(problem, "data")
    stop = signal.Signals(stop).name if stop else None
    if any_event:
        event = schedule.Event.from_dict(agree.broadcast(event and event.as_dict()))
        run.metrics.event(event)
        if event.kind == "stop":
            stop = stop or "job_hours"
        else:
            run.horizon = event.horizon
    return stop, bool(save_due), int(valid)


def accumulate(run: Run, batch: data.Batch, meter: track.LossMeter):
    """Forward and backward over the micro-steps. FSDP averages over ranks, so each loss is its sum times ranks /
    nominal tokens; `clip_grads` then corrects nominal to actual, and the mean over ranks and micro-steps is exact."""
    s, world = run.settings, run.agree.world
    batch = batch.contexts(schedule.context_length(run.step, s)).to(run.device)
    parts = s.grad_accum(world)
    rows = batch.x.shape[0] // parts
    for i in range(parts):
        x, y, domain = (t[i * rows : (i + 1) * rows] for t in (batch.x, batch.y, batch.domain))
        last = i == parts - 1
        run.model.set_requires_gradient_sync(last or s.reduce_every_micro_step)
        run.model.set_requires_all_reduce(last)  # between replicas (HSDP), over the slow network: once a step
        run.model.set_is_last_backward(last)
        loss_sum, token_loss = run.model(x, y)
        (loss_sum * (world / s.tokens_per_step)).backward()
        meter.add(token_loss, y, domain)


def update(run: Run, done: track.Step):
    """The optimizer step. A non-finite loss or norm, which all ranks see alike, skips it; too many in a row end the run."""
    run.bad_in_a_row = run.bad_in_a_row + 1 if done.bad else 0
    for optimizer in run.optimizers:
        if not done.bad:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if done.bad:
        run.log(
            f"step {done.step}: loss {done.loss}, grad_norm {done.grad_norm}: update skipped ({run.bad_in_a_row} in a row)"
        )
        if run.bad_in_a_row >= run.settings.max_bad_steps:
            raise track.Diverged(
                f"{run.bad_in_a_row} non-finite steps in a row up to step {done.step}: lower muon_lr and lr, or look at "
                f"the data of samples {run.step * run.settings.sequences_per_step} and following"
            )


# --- evaluation, samples, saves ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(run: Run, rows: int, final: bool = False) -> bool:
    """Loss on `rows` held-out rows per domain, the same at every call and world size. True when it is the best so far."""
    s, began, stream = run.settings, time.monotonic(), run.stream
    run.agree.tick("evaluation", s.init_timeout)
    run.model.eval()
    meter = track.LossMeter(stream.domains, run.device)
    byte_count = torch.zeros((), dtype=torch.float64, device=run.device)
    for batch in stream.val_batches(rows, s.micro_batch):
        part = batch.to(run.device)
        _, token_loss = run.model(part.x, part.y)
        meter.add(token_loss, part.y, part.domain)
        if stream.tokenizer.bytes_exact and (batch.y >= 0).any():
            byte_count += stream.tokenizer.bytes_per_token(batch.y) * int((batch.y >= 0).sum())
    model.back_to_training(run.model)
    loss, by_domain, tokens = meter.read(dist.all_reduce)
    dist.all_reduce(byte_count)
    bits_per_byte = loss * tokens / math.log(2) / byte_count.item() if byte_count else None
    seconds = time.monotonic() - began
    run.budget.paused("evaluation", seconds)
    return run.metrics.evaluation(run.step, loss, by_domain, bits_per_byte, seconds, final)


def print_sample(run: Run):
    """A text that continues sample_prompt. All ranks compute it alike, since the weights are spread over them."""
    s, tokenizer = run.settings, run.stream.tokenizer
    if not s.sample_tokens or tokenizer.kind == "ids":
        return
    prompt = tokenizer.encode(s.sample_prompt) or [tokenizer.eot or 0]
    began = time.monotonic()
    run.model.eval()
    pad = s.max_len if run.model.compiled else 64
    ids = sample.generate(run.model, prompt, s.sample_tokens, s.max_len, run.device, pad=pad)
    model.back_to_training(run.model)
    run.budget.paused("sample", time.monotonic() - began)
    run.metrics.sample(run.step, s.sample_prompt + tokenizer.decode(ids))


def tensors(run: Run) -> tuple[dict, dict]:
    """(tensors that any world size can load, tensors of this rank) of a checkpoint: live ones, saved from, loaded into."""
    shared, own = muon.optimizer_state(run.model, run.optimizers)
    shared |= {f"model.{name}": p for name, p in run.model.named_parameters()}
    own["rng.cpu"] = torch.get_rng_state()
    if run.device.type == "cuda":
        own["rng.cuda"] = torch.cuda.get_rng_state(run.device)
    return shared, own


def restore_optimizers(run: Run, shared: dict, own: dict | None):
    """After a load: optimizer state that is not live (8-bit codes) and the random state."""
    optimizer_shared = {k: v for k, v in shared.items() if not k.startswith("model.")}
    optimizer_own = None if own is None else {k: v for k, v in own.items() if not k.startswith("rng.")}
    muon.load_optimizer_state(run.model, run.optimizers, optimizer_shared, optimizer_own)
    if own is not None:
        torch.set_rng_state(own["rng.cpu"])
        if "rng.cuda" in own:
            torch.cuda.set_rng_state(own["rng.cuda"], run.device)


def save(run: Run, kind: str, wait: bool = False):
    """Begin a checkpoint of everything that the next step depends on; training goes on while it is written."""
    run.agree.tick(f"save at step {run.step}", run.settings.init_timeout)
    state = {
        "step": run.step,
        "world": run.agree.world,
        "data": run.stream.state(),
        "horizon": run.horizon.as_dict(),
        "budget": run.budget.state(),
        "metrics": run.metrics.state(),
        "settings": run.asked,
        "chosen": run.chosen,
        "code": proof.code_digest(),
        "config": export_config(run),
    }
    run.checkpoints.save(run.step, kind, *tensors(run), state, wait)
    run.saved_at = time.monotonic()
    collect_saves(run)


def collect_saves(run: Run):
    """Note saves that have finished."""
    for receipt in run.checkpoints.poll():
        run.receipts.append(receipt)
        run.metrics.save(receipt["step"], receipt["kind"], receipt)
        run.budget.saved(receipt)
        run.log(
            f"saved {receipt['name']}: {receipt['bytes'] / 1e6:.1f} MB in {receipt['seconds']:.2f} s, "
            f"training waited {receipt['pause'] * 1e3:.0f} ms"
        )
        run.agree.note(step=run.step, saved=receipt["step"], failed_saves=len(run.checkpoints.failures))
        need = run.budget.slow_step() + receipt["pause"] + receipt["seconds"]
        if run.grace is not None and need > run.grace:
            run.log(
                f"WARNING: a step and a save take {need:.2g} s, and torchrun kills {run.grace:g} s after a signal: a stop "
                f"may lose the work since the last save. Start it with --shutdown-timeout={math.ceil(need / 30) * 60}"
            )
            run.grace = None
    failed = len(run.checkpoints.failures)
    if failed != run.agree.info.get("failed_saves", 0):  # known at once, not when one succeeds again
        run.agree.note(step=run.step, failed_saves=failed)


def finish(run: Run) -> dict:
    """Final evaluation, save, export, report."""
    s = run.settings
    evaluate(run, s.final_eval_rows, final=True)
    print_sample(run)
    # else a finished run whose folder was lost: its state is this one
    if f"{run.step:08d}-final-" not in (run.checkpoints.parent or ""):
        save(run, "final", wait=True)
    export(run)
    report = run.metrics.report(
        status="done", model="Nova", attention=s.attention, parameters=model.count_params(s)["total"],
        bigram_baseline=run.baseline, fp8=run.chosen["fp8"], compile=run.chosen["compile"],
        optimizer=f"Muon+AdamW({s.adamw})", rows_wasted_tokens=run.stream.wasted(), failed_saves=len(run.checkpoints.failures),
        checkpoint_gb=run.receipts[-1]["bytes"] / 1e9 if run.receipts else None,
    )  # fmt: skip
    for line in run.planned.against(report) if run.planned else []:
        run.log(line)
    pause = max((r["pause"] for r in run.receipts), default=0.0)
    minutes = schedule.save_minutes_suggested(pause)
    run.log(
        f"a save held training up for {pause:.2f} s: save_minutes={minutes:.2g} loses least at a failure a day"
    )
    complete_export(run)
    run.log(f"the weights are in {run.export_folder}; talk to them: python sample.py {s.out_dir}")
    return published(run, upload_patience(run, None, time.monotonic())) | {"val_loss": report["val_loss"]}


def complete_export(run: Run):
    """What an export holds besides weights and config: again at each launch, since a kill may have come between."""
    if run.agree.rank == 0 and os.path.isdir(run.export_folder):  # nobody moved it away
        shutil.copy(os.path.join(run.settings.out_dir, "report.json"), run.export_folder)
        if run.stream.tokenizer.path:
            shutil.copy(run.stream.tokenizer.path, os.path.join(run.export_folder, "tokenizer.json"))


def export(run: Run):
    """Write the weights as they are now."""
    run.agree.tick("export", run.settings.init_timeout)
    parameters = {name: p.detach() for name, p in run.model.named_parameters()}
    checkpoint.export(run.export_folder, parameters, export_config(run), run.agree)


def export_config(run: Run) -> dict:
    """config.json of an export: everything that sample.py needs, as data; it is never executed."""
    settings = run.asked | {"vocab_size": run.settings.vocab_size}
    return {"format": "nova-1", "step": run.step, "settings": settings, "tokenizer": run.stream.metadata}


if __name__ == "__main__":
    startup.run_main(lambda: train(SETTINGS))
