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
import model
import muon
import plan
import sample
import schedule
from launch import proof
from store import UPLOAD_SECONDS, Store, read_state, upload_patience
from track import health, metrics

DRILL_STEPS = 4  # before the save of a drill; two more are done twice, before and after the load
# The settings that make the horizon: changed (with --allow_change, or in a branch), they make a new one. A budget moves
# it by itself while the run lasts.
HORIZON = ("total_steps", "target_tokens", "schedule", "decay_frac", "warmup_steps", "max_hours")


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
    store: Store = None
    metrics: "metrics.Metrics" = None
    baseline: float | None = None  # nats/token of a bigram table on the held-out rows, for small vocabularies
    budget: schedule.Budget = None  # all ranks keep one; rank 0's decides
    horizon: schedule.Horizon = None  # start of the decay, end of the run: recorded, never read from a clock
    step: int = 0  # finished optimizer steps
    saved_at: float = 0.0  # monotonic seconds of the newest save of this launch
    bad_in_a_row: int = 0  # non-finite steps


def train(settings: Settings) -> dict:
    """The whole run. Returns facts for status.json; raises startup.Stopped after an agreed stop."""
    launched = time.monotonic()
    check_needs(settings)
    if settings.drill:
        settings.out_dir, settings.resume = os.path.join(settings.out_dir, "drill"), "never"
    log = startup.logger(int(os.environ.get("RANK", 0)))
    agree = startup.init(settings, log=log)
    run = start_up(Run(settings, agree, log, agree.device), launched)
    if complete(run):
        return published(run, UPLOAD_SECONDS)
    with health.explained_memory(run):
        if settings.drill:
            return drill(run)
        stop = loop(run, settings.stop_at)
    if stop:
        save(run, "latest", wait=True)
        # a first signal ends the wait at once
        run.store.close(upload_seconds(run, stop), lambda: run.agree.signals.name not in (None, stop))
        run.metrics.close()
        saved = agree.info["saved"]
        how = "saved" if saved == run.step else f"NOT SAVED ({run.store.failures[-1]}), only step {saved} is"
        raise startup.Stopped(
            stop, f"stopped by {stop} after step {run.step}, {how}: the same command goes on"
        )
    return finish(run)


def upload_seconds(run: Run, stop: str | None) -> float:
    """How long the end of a run (stop None), or of a launch, may wait for uploads."""
    now, grace, signalled = time.monotonic(), startup.grace_seconds(), run.agree.signals.when
    until_kill = signalled + grace - now if grace is not None and signalled else None
    ended = stop in (None, "job_hours")
    return upload_patience(ended, run.settings.hub_patience, run.budget.left(now), until_kill)


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
    if s.drill and s.steps < DRILL_STEPS + 2:
        lacks.append(s.error("total_steps", f"a drill takes {DRILL_STEPS + 2} steps"))
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
        run.metrics = metrics.Metrics(
            s, s.out_dir, agree.world, run.device, lambda ctx: model.flops_per_token(s, ctx), log,
            main=agree.rank == 0, launched=launched, run_id=run.store.run_id,
        )  # fmt: skip
        if run.stream.vocab_size <= 4096:
            run.baseline = data.bigram_baseline(run.stream, 1e6, s.final_eval_rows)
            log(f"bigram baseline {run.baseline:.4f}: below it a model has learnt more than pairs of tokens")
        planned = run.planned = plan_of(run)
        for line in planned.lines() if planned else [f"no plan: this is none of {', '.join(plan.GPUS)}"]:
            log(line)
        files = planned.files if planned else {"checkpoint": 0, "weights": 0}
        room = run.store.room(files["checkpoint"]) + int(files["weights"])
        proof.check_storage(agree, s.out_dir, room, log)
    with agree.stage("model"), health.explained_memory(run):
        run.model = model.build_model(s, mesh, run.device, log)
    with agree.stage("model check"):
        proof.check_weights(agree, run.model.named_parameters(), mesh.get_local_rank("shard"), log)
    with agree.stage("optimizers"), health.explained_memory(run):
        run.optimizers = muon.build_optimizers(run.model, s, run.model.row_blocks(), log)
    with agree.stage("compile", s.init_timeout), health.explained_memory(run):
        if run.model.compiled:
            model.compile_shapes(run.model, schedule.contexts(s), run.device)
        run.chosen = {"fp8": run.model.fp8, "compile": run.model.compiled}
    with agree.stage("resume"):
        resume(run, saved, path)
        assumed = (planned.assumed if planned else {}) | drilled(s.out_dir)
        run.budget = schedule.Budget(s, launched, run.metrics.used_before, assumed, agree.world)
        if saved:
            run.budget.load_state(saved["budget"])
        run.metrics.launch(run.step, settings_digest=s.digest())
        run.saved_at = time.monotonic()
    agree.note(step=run.step, saved=run.step if saved else None)
    return run


def drilled(out_dir: str) -> dict:
    """What --drill measured on this machine, in seconds, for the budget: better than the plan's assumptions."""
    try:
        with open(os.path.join(out_dir, "drill", "status.json"), encoding="utf-8") as f:
            seconds = json.load(f)["drill"]
    except (OSError, ValueError, KeyError):
        return {}
    names = {"whole save": "save", "evaluation": "evaluation", "upload": "upload of a checkpoint"}
    return {kind: seconds[part] for kind, part in names.items() if part in seconds}


def open_checkpoints(run: Run) -> tuple[dict | None, str | None]:
    """Take the run's folder; the saved state to go on from and its folder, or (None, None) for a fresh start."""
    s = run.settings
    run.store, path = Store.open(
        s.out_dir,
        run.agree,
        run.log,
        s.ckpt_keep,
        s.resume,
        publisher(run),
        startup.grace_seconds(),
        not s.drill,
    )
    allowed = s
    if path is None and s.schedule_from:  # a branch: another run's state, under this run's schedule
        path = s.schedule_from
        if not os.path.exists(os.path.join(path, "state.json")):
            raise s.error("schedule_from", "is not the folder of a checkpoint (…/checkpoints/step-…)")
        allowed = dataclasses.replace(s, allow_change=[*s.allow_change, *HORIZON])
    if path is None:
        run.log(f"[resume] a fresh start in {s.out_dir}")
        return None, None
    saved = read_state(path)
    for line in refuse_changes(saved["settings"], allowed):
        run.log(f"[resume] changed setting {line}")
    run.changed = {kind for _, _, _, kind in changes(saved["settings"], s)}
    return saved, path


def publisher(run: Run):
    """The model repo that checkpoints and export go to, or None."""
    s = run.settings
    if not (s.hf_model_repo and s.publish):
        return None
    import hub

    return hub.Publisher(s.hf_model_repo, run.log, s.hub_patience)


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
    _, own_loaded = run.store.load(path, shared, own)
    restore_optimizers(run, shared, own if own_loaded else None)
    run.step = saved["step"]
    branch = path == run.settings.schedule_from
    run.horizon = schedule.Horizon.from_dict(saved["horizon"])
    moved = {n for n in HORIZON if saved["settings"].get(n) != run.asked[n]}
    over = run.horizon.end_step <= run.step < run.settings.steps  # a budget ended it, or total_steps grew
    if branch or moved - {"max_hours"} or (moved and over):
        old = run.horizon
        run.horizon = schedule.changed_horizon(run.settings, run.step, old, branch or "schedule" in moved)
        run.log(
            f"[resume] a new horizon: decay from step {run.horizon.decay_start}, end at {run.horizon.end_step}; "
            f"{old.at(run.step - 1):.0%} of the decay were done, at the next step {run.horizon.at(run.step):.0%} are"
        )
    if branch:
        run.metrics.tokens = saved["metrics"]["tokens"]
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
    return done


def published(run: Run, seconds: float) -> dict:
    """Complete the export and wait for the uploads, of an earlier launch too. -> facts for status.json"""
    files = {"report.json": os.path.join(run.settings.out_dir, "report.json")}
    if run.stream.tokenizer.path:
        files["tokenizer.json"] = run.stream.tokenizer.path
    run.store.publish(files)
    left = run.store.close(seconds, lambda: run.agree.signals.name is not None)
    run.metrics.close()
    return {"step": run.step, "export": run.store.export_folder, "unpublished": left}


# --- the loop ----------------------------------------------------------------------------------------------------


def loop(run: Run, stop_at: int | None) -> str | None:
    """Train to the horizon's end (which agreed events may move) or to step `stop_at`. None at the end, or why it stopped."""
    s, agree, stream = run.settings, run.agree, run.stream
    timer, meter = metrics.StepTimer(run.device), metrics.LossMeter(stream.domains, run.device)
    watcher, stop = health.Watcher(run), None
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
        watcher.before_update(loss, loss_by_domain, grad_norm, rates)
        bad = update(run, loss, grad_norm)
        watcher.after_update(loss, grad_norm, rates)
        timer.mark("optimizer")

        run.step += 1
        timers = timer.read()
        run.budget.stepped(timers["total"])
        run.metrics.step(
            run.step, loss, loss_by_domain, grad_norm, rates, schedule.context_length(run.step - 1, s), valid_tokens,
            timers, stream.epochs(), run.budget.left(time.monotonic()), bad, run.horizon.end_step, watcher.slowest(timers),
        )  # fmt: skip
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


def accumulate(run: Run, batch: data.Batch, meter: metrics.LossMeter):
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


def update(run: Run, loss: float, grad_norm: float) -> bool:
    """The optimizer step. A non-finite loss or norm, which all ranks see alike, skips it; too many in a row end the run."""
    bad = health.is_bad(loss, grad_norm)
    run.bad_in_a_row = run.bad_in_a_row + 1 if bad else 0
    if not bad:
        for optimizer in run.optimizers:
            optimizer.step()
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if bad:
        run.log(
            f"step {run.step + 1}: loss {loss}, grad_norm {grad_norm}: update skipped ({run.bad_in_a_row} in a row)"
        )
        if run.bad_in_a_row >= run.settings.max_bad_steps:
            raise health.Diverged(
                f"{run.bad_in_a_row} non-finite steps in a row up to step {run.step + 1}: lower muon_lr and lr, or look at "
                f"the data of samples {run.step * run.settings.sequences_per_step} and following"
            )
    return bad


# --- evaluation, samples, saves ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(run: Run, rows: int, final: bool = False) -> bool:
    """Loss on `rows` held-out rows per domain, the same at every call and world size. True when it is the best so far."""
    s, began, stream = run.settings, time.monotonic(), run.stream
    run.agree.tick("evaluation", s.init_timeout)
    run.model.eval()
    meter = metrics.LossMeter(stream.domains, run.device)
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
    beside = (run.metrics.path,)  # the curve goes on where only the checkpoints do
    run.store.save(run.step, kind, *tensors(run), state, beside, wait)
    run.saved_at = time.monotonic()
    collect_saves(run)


def collect_saves(run: Run):
    """Note saves that have finished."""
    for receipt in run.store.poll(run.step, run.budget.slow_step):
        run.metrics.save(receipt["step"], receipt["kind"], receipt)
        run.budget.saved(receipt)


def finish(run: Run) -> dict:
    """Final evaluation, save, export, report."""
    s = run.settings
    evaluate(run, s.final_eval_rows, final=True)
    print_sample(run)
    # else a finished run whose folder was lost: its state is this one
    if f"{run.step:08d}-final-" not in (run.store.parent or ""):
        save(run, "final", wait=True)
    export(run)
    report = run.metrics.report(
        status="done", model="Nova", attention=s.attention, parameters=model.count_params(s)["total"],
        bigram_baseline=run.baseline, fp8=run.chosen["fp8"], compile=run.chosen["compile"],
        optimizer=f"Muon+AdamW({s.adamw})", rows_wasted_tokens=run.stream.wasted(), failed_saves=len(run.store.failures),
        checkpoint_gb=run.store.receipts[-1]["bytes"] / 1e9 if run.store.receipts else None,
    )  # fmt: skip
    for line in run.planned.against(report) if run.planned else []:
        run.log(line)
    pause = max((r["pause"] for r in run.store.receipts), default=0.0)
    minutes = schedule.save_minutes_suggested(pause)
    run.log(
        f"a save held training up for {pause:.2f} s: save_minutes={minutes:.2g} loses least at a failure a day"
    )
    run.log(f"the weights are in {run.store.export_folder}; talk to them: python sample.py {s.out_dir}")
    return published(run, upload_seconds(run, None)) | {"val_loss": report["val_loss"]}


def export(run: Run):
    """Write the weights as they are now."""
    run.agree.tick("export", run.settings.init_timeout)
    parameters = {name: p.detach() for name, p in run.model.named_parameters()}
    run.store.export(parameters, export_config(run))


def export_config(run: Run) -> dict:
    """config.json of an export: everything that sample.py needs, as data; it is never executed."""
    settings = run.asked | {"vocab_size": run.settings.vocab_size}
    return {"format": "nova-1", "step": run.step, "settings": settings, "tokenizer": run.stream.metadata}


# --- the drill -----------------------------------------------------------------------------------------------------


def drill(run: Run) -> dict:
    """`--drill`: the run's whole cycle once, with its settings, in a folder of its own, each part timed; nothing stays on
    the Hub, and of a drill that passed neither checkpoints nor export on the disk. A later run in the folder above takes
    the times for its budget (`drilled`).

    Raises StartupError unless the two losses after the reload are those before it, and HubError where the Hub takes no
    file. -> facts for status.json: {"step", "drill": {part: seconds}}"""
    s, store, seconds, clock = run.settings, run.store, {"start-up": run.metrics.used()}, time.monotonic()

    def took(part: str):
        nonlocal clock
        seconds[part], clock = time.monotonic() - clock, time.monotonic()

    def losses_to(step: int) -> list[float]:
        if (stop := loop(run, step)) not in (None, "stop_at"):
            raise startup.Stopped(stop, f"stopped by {stop} in a drill: nothing to resume, give it again")
        return list(run.metrics.losses)[-2:]

    losses_to(DRILL_STEPS)
    took(f"{DRILL_STEPS} steps")
    evaluate(run, s.eval_rows)
    took("evaluation")
    save(run, "latest", wait=True)
    if store.failures:
        raise startup.StartupError(f"drill: the save failed: {store.failures[-1]}")
    took("save")
    before = losses_to(DRILL_STEPS + 2)
    took("2 steps")
    path = os.path.join(store.folder.path, store.parent.split("/")[-1])
    saved = read_state(path)
    run.stream.load_state(saved["data"])
    resume(run, saved, path)
    took("load in place")
    after = losses_to(DRILL_STEPS + 2)
    took("2 steps after it")
    exact = run.device.type == "cpu" or s.deterministic
    same = before == after if exact else all(abs(a - b) < 1e-2 for a, b in zip(before, after, strict=True))
    if not same:
        raise startup.StartupError(f"drill: losses after the reload {after} are not those before it {before}")
    export(run)
    took("export")
    store.close()
    if model_repo := publisher(run):  # no checkpoint of a drill is published: 16 MB tell the rate
        rate = run.agree.on_rank_0(lambda: model_repo.trial(f"drill-{os.getpid()}"), "Hub")
        run.log(f"drill: the Hub took {rate / 1e6:.1f} MB/s")
        seconds["upload of a checkpoint"] = store.receipts[-1]["bytes"] / rate
    for part, value in seconds.items():
        run.log(f"drill: {part:24} {value:8.2f} s")
    if run.agree.rank == 0:  # the disk is the real run's; status.json and the metrics stay
        for folder in (store.folder.path, store.export_folder):
            shutil.rmtree(folder, ignore_errors=True)
    run.log(f"drill: deleted its checkpoints and export in {s.out_dir}")
    how = "to the bit" if exact else "to rounding"
    run.log(f"drill passed: the two losses after a reload are those before it, {how}: {before}")
    return {"step": run.step, "drill": {k: round(v, 3) for k, v in seconds.items()}}


if __name__ == "__main__":
    startup.run_main(lambda: train(SETTINGS))
