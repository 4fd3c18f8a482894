"""Train a Nova.

    python train_nova.py config/quickstart.py                          # one process, CPU or GPU
    torchrun --nproc_per_node=8 train_nova.py config/h200_8x.py        # FSDP2 on eight GPUs

The run, top to bottom: start-up stages, the loop, the end. What a stage does lives in the file or room that owns it.

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
from settings import Settings, load_settings

if __name__ == "__main__":  # CUDA and NCCL read their environment when torch is imported
    SETTINGS = startup.load_or_exit(load_settings, sys.argv[1:])

import os
import signal
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import data
import model
import muon
import plan
import sample
import schedule
import track
from launch import drill, proof
from store import Saved, Store, open_store, read_state


@dataclass
class Run:
    """What the loop moves, and what a checkpoint holds of it."""

    asked: dict  # the settings as given: what a resume compares
    stream: data.Stream
    metrics: track.Metrics
    net: model.Nova = None
    optimizers: list = None  # [muon, adamw]
    chosen: dict = None  # what use_fp8 and use_compile became: stored, never chosen again
    horizon: schedule.Horizon = None  # start of the decay, end of the run: recorded, never read from a clock
    budget: schedule.Budget = None  # all ranks keep one; rank 0's decides
    step: int = 0  # finished optimizer steps
    baseline: float | None = None  # nats/token of a bigram table on the held-out rows, for small vocabularies


def train(s: Settings) -> dict:
    """The whole run. Returns facts for status.json; raises startup.Stopped after an agreed stop."""
    launched = time.monotonic()
    startup.check_needs(s)
    if s.drill:
        s.out_dir, s.resume = os.path.join(s.out_dir, "drill"), "never"
    log = startup.logger(int(os.environ.get("RANK", 0)))
    agree = startup.init(s, log=log)
    run, store, planned = start_up(s, agree, log, launched)
    if complete(run, s, log):
        return published(run, s, agree, store)
    with track.explained_memory(s, planned, lambda: run.step):
        if s.drill:
            return whole_cycle(run, s, agree, store, log)
        stop = loop(run, s, agree, store, log, s.stop_at)
    if not stop:
        return finish(run, s, agree, store, planned, log)
    save(run, s, agree, store, "latest", wait=True)
    patience = store.patience(stop == "job_hours", run.budget.left(time.monotonic()))
    # a first signal ends the wait at once
    store.close(patience, lambda: agree.signals.name not in (None, stop))
    run.metrics.close()
    saved = agree.info["saved"]
    how = "saved" if saved == run.step else f"NOT SAVED ({store.failures[-1]}), only step {saved} is"
    raise startup.Stopped(stop, f"stopped by {stop} after step {run.step}, {how}: the same command goes on")


# --- start-up ----------------------------------------------------------------------------------------------------


def start_up(s: Settings, agree, log, launched: float) -> tuple[Run, Store, plan.Plan | None]:
    """All stages up to the first step. A failing or hanging rank ends all ranks, and is named."""
    device = agree.device
    with agree.stage("environment"):
        proof.check_versions(agree, s, log)
    with agree.stage("device"):
        proof.check_device(agree, log)
        proof.check_links(agree, s, log)
    with agree.stage("collectives"):
        mesh = startup.make_mesh(s, agree.world, device)
        agree.limit_collectives(s.init_timeout)  # the mesh's new groups have torch's own, 10 minutes of NCCL
        groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
        proof.check_collectives(agree, device, groups, log)
    with agree.stage("settings"):
        s.grad_accum(agree.world)  # an error if the batch does not divide
        asked = s.as_dict()
    with agree.stage("checkpoints"):
        store, saved = open_store(s, agree, log, startup.grace_seconds())
    with agree.stage("data"):
        stream = data.open_stream(s, agree, log, saved and saved.state["data"])
        s.vocab_size = stream.vocab_size
        proof.check_equal(agree, "the vocabulary", s.digest())
        flops = {ctx: model.flops_per_token(s, ctx) for ctx in schedule.contexts(s)}
        main = agree.rank == 0
        metrics = track.Metrics(s, agree.world, device, flops.get, log, main, launched, store.run_id)
        run = Run(asked, stream, metrics)
        if stream.vocab_size <= 4096:
            run.baseline = data.bigram_baseline(stream, 1e6, s.final_eval_rows)
            log(f"bigram baseline {run.baseline:.4f}: below it a model has learnt more than pairs of tokens")
        planned = plan.of_device(s, agree.world, device, log)
        files = planned.files if planned else {"checkpoint": 0, "weights": 0}
        proof.check_storage(agree, s.out_dir, store.room(files["checkpoint"]) + int(files["weights"]), log)
    memory = partial(track.explained_memory, s, planned, lambda: run.step)
    with agree.stage("model"), memory():
        run.net = model.build_model(s, mesh, device, log)
    with agree.stage("model check"):
        proof.check_weights(agree, run.net.named_parameters(), mesh.get_local_rank("shard"), log)
    with agree.stage("optimizers"), memory():
        run.optimizers = muon.build_optimizers(run.net, s, log)
    with agree.stage("compile", s.init_timeout), memory():
        if run.net.compiled:
            model.compile_shapes(run.net, schedule.contexts(s), device)
        run.chosen = {"fp8": run.net.fp8, "compile": run.net.compiled}
    with agree.stage("resume"):
        run.horizon = schedule.first_horizon(s)
        if saved:
            resume(run, s, agree, store, saved, log)
        assumed = (planned.assumed if planned else {}) | drill.drilled(s.out_dir)
        run.budget = schedule.Budget(s, launched, metrics.journal.used_before, assumed, agree.world)
        if saved:
            run.budget.load_state(saved.state["budget"])
        metrics.launch(run.step, run.horizon.end_step, settings_digest=s.digest())
    agree.note(step=run.step, saved=run.step if saved else None)
    return run, store, planned


def resume(run: Run, s: Settings, agree, store: Store, saved: Saved, log):
    """Put the saved tensors, horizon and totals in place. A failed load stops the run: it never starts over."""
    state, (shared, own) = saved.state, tensors(run)
    _, own_loaded = store.load(saved.path, shared, own)
    muon.load_optimizer_state(run.net, run.optimizers, shared, own if own_loaded else None)
    if own_loaded:
        torch.set_rng_state(own["rng.cpu"])
        if "rng.cuda" in own:
            torch.cuda.set_rng_state(own["rng.cuda"])
    run.step, before = state["step"], schedule.Horizon(**state["horizon"])
    run.horizon, line = schedule.resumed_horizon(s, run.step, before, state["settings"], saved.branch)
    if line:
        log(f"[resume] {line}")
    if saved.branch:
        run.metrics.totals.tokens = state["metrics"]["tokens"]
    else:
        run.metrics.load_state(state["metrics"], saved.path)
    how = saved.how(s, agree, own_loaded)
    log(f"[resume] step {run.step} of {saved.path}, saved by {state['world']} ranks: goes on {how}")


# --- the loop ----------------------------------------------------------------------------------------------------


def loop(run: Run, s: Settings, agree, store: Store, log, stop_at: int | None) -> str | None:
    """Train to the horizon's end (which agreed events may move) or to step `stop_at`. None at the end, or why it stopped."""
    stream, net, device = run.stream, run.net, agree.device
    timer, meter = track.StepTimer(device), track.LossMeter(stream.domains, device)
    named, blocks, fresh, stop = net.named_parameters(), len(model.muon_blocks(s)), run.step == 0, None
    watcher = track.Watcher(s, agree, named, blocks, run.optimizers[0], log, fresh)
    net.train()
    while run.step < min(stop_at or run.horizon.end_step, run.horizon.end_step) and not stop:
        agree.tick(f"step {run.step + 1}", s.init_timeout if watcher.proof else s.step_timeout)
        timer.start()
        batch, problem = stream.attempt(s.sequences_per_step)
        timer.mark("data")
        stop, save_due, tokens = agree_on_step(run, s, agree, store, batch, problem)
        rates, ctx = schedule.rates(run.step, s, run.horizon), schedule.context_length(run.step, s)
        muon.set_rates(run.optimizers, *rates)
        timer.mark("other")

        accumulate(net, batch.contexts(ctx).to(device), meter, s, agree.world)
        timer.mark("forward_backward")
        grad_norm = muon.clip_grads(net, s.grad_clip, s.tokens_per_step / max(tokens, 1)).item()
        loss, loss_by_domain, _ = meter.read(dist.all_reduce)
        done = track.Step(run.step + 1, loss, loss_by_domain, grad_norm, rates, ctx, tokens, stream.epochs())
        watcher.before_update(done)
        for optimizer in run.optimizers:
            if not done.bad:  # a loss or norm that is not finite, which all ranks see alike
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        watcher.after_update(done)
        timer.mark("optimizer")

        run.step += 1
        done.seconds = timer.read()
        run.budget.stepped(done.seconds["total"])
        run.metrics.step(done, run.budget.left(time.monotonic()))
        watcher.after_step(done)
        stream.refresh(run.step)
        more = run.step < run.horizon.end_step
        if run.step % s.eval_every == 0 and more:
            if evaluate(run, s, agree, s.eval_rows):
                save(run, s, agree, store, "best")
            print_sample(run, s, device)
        if run.step % s.ckpt_every == 0 and more:
            save(run, s, agree, store, "milestone")
        elif save_due and not stop:  # a stop saves by itself
            save(run, s, agree, store, "latest")
        note_saves(run, store)
    return stop or (None if run.step >= run.horizon.end_step else "stop_at")


def agree_on_step(run: Run, s: Settings, agree, store: Store, batch, problem) -> tuple[str | None, bool, int]:
    """The control word: (reason to stop after this step or None, whether to save, valid tokens of all ranks).

    Rank 0's clock may also move the horizon; everything else in here is the same on all ranks."""
    now, first = time.monotonic(), agree.rank == 0
    event = run.budget.decide(run.step, now, run.horizon) if first else None
    save_due = first and 0 < s.save_minutes * 60 <= now - store.saved_at
    stop = signal.Signals[agree.signals.name] if agree.signals.name else 0
    valid = int((batch.y >= 0).sum()) if batch else 0
    flags, (valid,) = agree.control([stop, bool(problem), bool(event), save_due], [valid])
    stop, any_problem, any_event, save_due = flags
    if any_problem:  # the state is whole: it is saved, without the batch that some ranks have drawn
        run.stream.rewind(run.stream.before)
        if run.step > (agree.info["saved"] or 0):
            save(run, s, agree, store, "latest", wait=True)
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


def accumulate(net, batch: data.Batch, meter: track.LossMeter, s: Settings, world: int):
    """Forward and backward over the micro-steps. FSDP averages over ranks, so each loss is its sum times ranks /
    nominal tokens; `clip_grads` then corrects nominal to actual, and the mean over ranks and micro-steps is exact."""
    parts = s.grad_accum(world)
    rows = batch.x.shape[0] // parts
    for i in range(parts):
        x, y, domain = (t[i * rows : (i + 1) * rows] for t in (batch.x, batch.y, batch.domain))
        last = i == parts - 1
        net.set_requires_gradient_sync(last or s.reduce_every_micro_step)
        net.set_requires_all_reduce(last)  # between replicas (HSDP), over the slow network: once a step
        net.set_is_last_backward(last)
        loss_sum, token_loss = net(x, y)
        (loss_sum * (world / s.tokens_per_step)).backward()
        meter.add(token_loss, y, domain)


def evaluate(run: Run, s: Settings, agree, rows: int, final: bool = False) -> bool:
    """Loss on `rows` held-out rows per domain. True when it is the best so far."""
    agree.tick("evaluation", s.init_timeout)
    began = time.monotonic()
    found = track.evaluate(run.net, run.stream, rows, s.micro_batch, agree.device)
    model.back_to_training(run.net)
    seconds = time.monotonic() - began
    run.budget.paused("evaluation", seconds)
    return run.metrics.evaluation(run.step, *found, seconds, final)


def print_sample(run: Run, s: Settings, device):
    """A text that continues sample_prompt. All ranks compute it alike, since the weights are spread over them."""
    began = time.monotonic()
    if not s.sample_tokens or run.stream.tokenizer.kind == "ids":
        return
    run.net.eval()
    pad = s.max_len if run.net.compiled else 64
    text = sample.text(
        run.net, s.sample_prompt, run.stream.tokenizer, s.sample_tokens, s.max_len, device, pad=pad
    )
    model.back_to_training(run.net)
    run.budget.paused("sample", time.monotonic() - began)
    run.metrics.sample(run.step, text)


def tensors(run: Run) -> tuple[dict, dict]:
    """(tensors that any world size can load, tensors of this rank) of a checkpoint: live ones, saved from, loaded into."""
    shared, own = muon.optimizer_state(run.net, run.optimizers)
    shared |= {f"model.{name}": p for name, p in run.net.named_parameters()}
    own["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        own["rng.cuda"] = torch.cuda.get_rng_state()
    return shared, own


def save(run: Run, s: Settings, agree, store: Store, kind: str, wait: bool = False):
    """Begin a checkpoint of everything that the next step depends on; training goes on while it is written."""
    agree.tick(f"save at step {run.step}", s.init_timeout)
    state = {
        "step": run.step, "world": agree.world, "data": run.stream.state(), "horizon": run.horizon.as_dict(),
        "budget": run.budget.state(), "metrics": run.metrics.state(), "settings": run.asked, "chosen": run.chosen,
        "code": proof.code_digest(), "config": export_config(run, s),
    }  # fmt: skip
    beside = [os.path.join(s.out_dir, "metrics.jsonl")]  # the curve goes on where only the checkpoints do
    store.save(run.step, kind, *tensors(run), state, beside, wait)
    note_saves(run, store)


def note_saves(run: Run, store: Store):
    """Tell metrics and budget of saves that have finished."""
    for receipt in store.poll(run.step, run.budget.slow_step):
        run.metrics.save(receipt["step"], receipt["kind"], receipt)
        run.budget.saved(receipt)


# --- the end -------------------------------------------------------------------------------------------------------


def complete(run: Run, s: Settings, log) -> bool:
    """Whether the folder holds a finished run: there is nothing to do but what a kill left out of its export."""
    end, report = run.horizon.end_step, os.path.join(s.out_dir, "report.json")
    if run.step < end or track.reported(report) != run.step:
        return False
    longer = "target_tokens" if s.target_tokens else "total_steps"
    longer = f"{longer} (with --allow_change={longer})" if end >= s.steps else "max_hours"
    log(f"this run is complete: step {run.step} of {end}, see {report}. To train on, raise {longer}")
    return True


def finish(run: Run, s: Settings, agree, store: Store, planned: plan.Plan | None, log) -> dict:
    """Final evaluation, save, export, report."""
    evaluate(run, s, agree, s.final_eval_rows, final=True)
    print_sample(run, s, agree.device)
    if f"{run.step:08d}-final-" not in (store.parent or ""):  # else a finished run whose folder was lost
        save(run, s, agree, store, "final", wait=True)
    export(run, s, agree, store)
    report = run.metrics.report(
        status="done", model="Nova", attention=s.attention, parameters=model.count_params(s)["total"],
        bigram_baseline=run.baseline, fp8=run.chosen["fp8"], compile=run.chosen["compile"],
        optimizer=f"Muon+AdamW({s.adamw})", rows_wasted_tokens=run.stream.wasted(), failed_saves=len(store.failures),
        checkpoint_gb=store.receipts[-1]["bytes"] / 1e9 if store.receipts else None,
    )  # fmt: skip
    for line in planned.against(report) if planned else []:
        log(line)
    log(schedule.save_advice(max((r["pause"] for r in store.receipts), default=0.0)))
    log(f"the weights are in {store.export_folder}; talk to them: python sample.py {s.out_dir}")
    facts = published(run, s, agree, store, run.budget.left(time.monotonic()))
    return facts | {"val_loss": report["val_loss"]}


def export(run: Run, s: Settings, agree, store: Store):
    """Write the weights as they are now."""
    agree.tick("export", s.init_timeout)
    store.export({name: p.detach() for name, p in run.net.named_parameters()}, export_config(run, s))


def export_config(run: Run, s: Settings) -> dict:
    """config.json of an export: everything that sample.py needs, as data; it is never executed."""
    settings = run.asked | {"vocab_size": s.vocab_size}
    return {"format": "nova-1", "step": run.step, "settings": settings, "tokenizer": run.stream.metadata}


def published(run: Run, s: Settings, agree, store: Store, left: float | None = None) -> dict:
    """Complete the export; wait for uploads, in what is `left` of a budget, in seconds. -> facts for status.json"""
    files = {"report.json": os.path.join(s.out_dir, "report.json")}
    if run.stream.tokenizer.path:
        files["tokenizer.json"] = run.stream.tokenizer.path
    store.publish(files)
    unpublished = store.close(store.patience(True, left), lambda: agree.signals.name is not None)
    run.metrics.close()
    return {"step": run.step, "export": store.export_folder, "unpublished": unpublished}


def whole_cycle(run: Run, s: Settings, agree, store: Store, log) -> dict:
    """`--drill`: the whole cycle once, in a folder of its own. -> facts for status.json"""

    def reload():
        path = os.path.join(store.folder.path, store.parent.split("/")[-1])
        saved = Saved(path, read_state(path), branch=False, changed=set())
        run.stream.load_state(saved.state["data"])
        resume(run, s, agree, store, saved, log)

    frame, exact = (run, s, agree, store), agree.device.type == "cpu" or s.deterministic
    seconds = drill.drill(
        train=partial(loop, *frame, log), evaluate=partial(evaluate, run, s, agree, s.eval_rows),
        save=partial(save, *frame, "latest", wait=True), reload=reload, export=partial(export, *frame),
        store=store, metrics=run.metrics, exact=exact, log=log,
    )  # fmt: skip
    return {"step": run.step, "drill": seconds}


if __name__ == "__main__":
    startup.run_main(lambda: train(SETTINGS))
