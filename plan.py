"""What a run will need and what it will buy, before any GPU is rented.

    python plan.py config/h200_8x.py [--key=value …] [--gpus=8 --gpu=h200|h100|b200|a100|cpu] [--json]
    python plan.py --curve OUT [OUT …]        overlay the loss curves of several runs in curves.png

The one idea: **every figure is arithmetic on the settings**; the tests hold it against the real thing: parameter counts
and state bytes exactly, peak memory against torch's FSDPMemTracker. Speed is *computed* from the data-sheet peak and
the achieved shares in ACHIEVED. They reproduce published 8B runs on full-power parts to 10 % (torchtitan, H200, float8, 10,938 tokens/s/GPU: computed
11,240; NeMo, H100, 16,934: 15,467) and are 20 to 30 % too high for a 500 W H100. So the plan states the MFU beside
everything that depends on it, and what 30 to 50 % would buy. Exit code 2: the run does not fit the memory, or its budget
ends inside the warm-up; the last lines name the setting to change.

Bytes are bytes (GB = 1e9), memory is per GPU, times are seconds. FLOPs count forward and backward.
"""

from launch import entry

if __name__ == "__main__":
    entry.prepare()

import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass, field

import torch

import model
import muon
from kernels import BLOCK, GPUS, Gpu, host_memory
from settings import SettingsError, load_settings

GB = 1e9
# Achieved shares of the peaks: assumptions, calibrated on published runs, to be replaced by `python -m bench gpu`.
ACHIEVED = {"bf16": 0.60, "fp8": 0.45, "attention": 0.30, "muon": 0.60, "bandwidth": 0.75}
# Rate of the blocks' matmuls against tensorwise, which ACHIEVED["fp8"] is calibrated on (torchtitan, 8B, H200: 10,938
# tokens/s/GPU). torchao's 8B on H100s ran rowwise at 0.88 of tensorwise, the whole step.
FP8_GAIN = {"tensorwise": 1.0, "rowwise_with_gw_hp": 0.93, "rowwise": 0.85}
HOP = 12e-6  # seconds of latency that each rank adds to a ring collective between nodes
USABLE = 0.95  # of a device's memory: above it the allocator starts to retry and everything slows down
FRAGMENTATION = 0.04
CONTEXT = 4 * GB  # CUDA context, NCCL buffers, cuBLAS workspaces
START_UP = {"cuda": 300.0, "cpu": 5.0}  # seconds of a launch before its first step
UPLOAD = 100e6  # bytes/s to the Hub, assumed
DISK = 1e9  # bytes/s that a checkpoint is written with, assumed


@dataclass
class Plan:
    """All figures of one run. `problems` are reasons for exit code 2, each with the setting to change."""

    gpu: Gpu
    gpus: int
    facts: dict  # what was chosen: fp8, compile, micro_batch, grad_accum, steps…
    parameters: dict[str, int]
    memory: dict  # bytes per GPU: "peak", its "parts" and "moment" (memory_moments), "capacity"; "largest_micro_batch"
    speed: dict
    money: dict
    files: dict
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def assumed(self) -> dict:
        """What schedule.Budget may assume before it has measured its own saves: seconds."""
        upload = self.files["upload_seconds"] if self.files["publishes"] else 0.0
        return {"whole save": self.files["save_seconds"], "upload": upload}

    def against(self, report: dict) -> list[str]:
        """Plan beside measured, a line for each figure that `report` (metrics.facts) has."""
        memory, memory_name, mfu = report.get("memory_peak_gb"), "peak memory/GPU, GB", report.get("mfu")
        if memory is not None and self.facts["device"] == "cpu":
            memory -= report.get("memory_before_model_gb", 0.0)  # Python, torch, kernels
            memory_name, mfu = "tensors; growth of process, GB", None  # this CPU's peak is measured
        speed, step, rate = self.speed, "seconds_per_step", "tokens_per_second_per_gpu"
        rows = (
            ("parameters", self.parameters["total"], report.get("parameters"), number),
            (memory_name, self.memory["peak"] / GB, memory, "{:.2f}".format),
            ("seconds a step", speed[step], report.get(step), "{:.3g}".format),
            ("tokens/s/GPU", speed[rate], report.get(rate), number),
            ("MFU", speed["mfu"], mfu, "{:.1%}".format),
            ("checkpoint, GB", self.files["checkpoint"] / GB, report.get("checkpoint_gb"), "{:.3g}".format),
        )
        return [f"plan against measured: {'planned':>25} {'measured':>10} {'ratio':>6}"] + [
            f"  {name:<30} {show(planned):>15} {show(measured):>10} {measured / planned:>6.2f}"
            for name, planned, measured, show in rows
            if measured is not None and planned
        ]

    def lines(self) -> list[str]:
        """The plan for a person."""
        f, memory, s, m, c = self.facts, self.memory, self.speed, self.money, self.files
        price = f", ${m['dollars']:,.0f} at ${m['usd_per_gpu_hour']:g}/GPU-hour" * (f["device"] != "cpu")
        total = self.parameters["total"]
        classes = "  ".join(f"{k} {number(v)}" for k, v in self.parameters.items() if k != "total" and v)
        parts = "  ".join(f"{k} {v / GB:.2f}" for k, v in memory["parts"].items() if v >= 0.005 * GB)
        share = f" of {memory['capacity'] / GB:.0f} GB usable" if memory["capacity"] else ""
        hidden = "hidden" if s["communication_hidden"] else "NOT hidden"
        replica = 1e3 * s["replica_all_reduce"]
        replicas = f"; replicas' all-reduce {replica:.0f} ms a step" if replica else ""
        budget, upload = [], "no upload (hf_model_repo is not set)"
        if m["budget_hours"]:
            budget = [
                f"  budget       {m['budget_hours']:g} h buy {number(m['budget_tokens'])} tokens, "
                f"{100 * m['budget_share']:.1f} % of the schedule, for ${m['budget_dollars']:,.0f}; "
                + ", ".join(f"at {k} MFU {number(v)}" for k, v in m["budget_tokens_at"].items())
            ]
        if c["publishes"]:
            upload = (
                f"upload {hours(c['upload_seconds'] / 3600)} at {UPLOAD / 1e6:.0f} MB/s, at least "
                f"{c['upload_minimum'] / 1e6:.3g} MB/s to be done before the next"
            )
        return [
            f"plan: {self.gpus} x {self.gpu.name}, computed, not measured ({f['how']})",
            f"  parameters   {number(total)} = {total:,}: {classes}",
            f"  memory/GPU   {memory['peak'] / GB:.2f} GB peak{share}, in {memory['moment']}: {parts}",
            f"  batch        {f['sequences_per_step']} sequences = {number(f['tokens_per_step'])} tokens/step: "
            f"micro_batch {f['micro_batch']} x {f['grad_accum']} micro-steps x {self.gpus} GPUs; "
            f"largest micro_batch that fits: {memory['largest_micro_batch'] or 'none'}",
            f"  step         {s['seconds_per_step']:.3g} s at {100 * s['mfu']:.0f} % MFU: "
            f"{number(s['tokens_per_second'])} tok/s, {number(s['tokens_per_second_per_gpu'])}/GPU "
            f"({number(s['flops_per_token'])} FLOP/token; limit {number(s['limit'])}/GPU)",
            f"  micro-step   compute {1e3 * s['compute']:.0f} ms, FSDP traffic {1e3 * s['communication']:.0f} ms "
            f"({s['communication_bytes'] / GB:.1f} GB, {hidden}); "
            f"optimizer {1e3 * s['optimizer']:.0f} ms (Muon {1e3 * s['muon_compute']:.0f}, its traffic "
            f"{1e3 * s['muon_communication']:.0f}){replicas}",
            f"  schedule     {f['steps']:,} steps = {number(f['tokens'])} tokens "
            f"({f['tokens'] / total:.2g} a parameter): {hours(m['hours'])}{price}",
            *budget,
            f"  checkpoint   {c['checkpoint'] / GB:.3g} GB, written in {c['save_seconds']:.2g} s behind training; final "
            f"weights {c['weights'] / GB:.3g} GB; {upload}",
            *(f"  ! {w}" for w in self.warnings),
            *(f"  CANNOT RUN: {p}" for p in self.problems),
        ]


def choices(settings, gpu: Gpu) -> dict:
    """What "auto" would choose on such a device. The run itself decides by looking at the real one."""
    cpu = gpu.name.startswith("CPU")
    fp8 = settings.use_fp8 == "on" or (settings.use_fp8 == "auto" and gpu.fp8 is not None)
    compiled = not cpu if settings.use_compile == "auto" else settings.use_compile
    return {"fp8": fp8, "compile": compiled, "device": "cpu" if cpu else "cuda"}


class Anatomy:
    """What a plan reads from the model, on the meta device."""

    def __init__(self, settings):
        self.parameters = model.count_params(settings)  # by kind of role, and in total
        self.blocks = model.muon_blocks(settings)  # (rows, columns) of what Muon orthogonalises
        self.flops_per_token = model.flops_per_token(settings, settings.ctx_end_len)


# Bytes per token that one block keeps for backward, as multiples of (d_model, n_kv_heads * head_dim, ffn_hidden): exact
# counts of model.py's block (tests: what autograd, or the compiler's partitioner, saves), but "cuda eager" by hand: a GPU's
# RMSNorm keeps its bf16 input instead of fp32 copies. A CPU's attention keeps its probabilities besides (kernels/cpu.py).
SAVED = {
    "cuda compiled": {"standard": (18, 6, 6), "diff": (20, 8, 6), "diff_v2": (24, 6, 6)},
    "cuda eager": {"standard": (22, 8, 8), "diff": (28, 10, 8), "diff_v2": (30, 8, 8)},
    "cuda selective": {"standard": (10, 4, 0), "diff": (12, 4, 0), "diff_v2": (14, 4, 0)},
    "cpu compiled": {"standard": (18, 8, 6), "diff": (21, 8, 6), "diff_v2": (24, 8, 6)},
    "cpu eager": {"standard": (20, 8, 8), "diff": (22, 8, 8), "diff_v2": (28, 8, 8)},
    "cpu selective": {"standard": (8, 4, 0), "diff": (8, 4, 0), "diff_v2": (10, 4, 0)},
    "full": {"standard": (2, 0, 0), "diff": (2, 0, 0), "diff_v2": (2, 0, 0)},
}
ROOT_SAVED = 6  # the same for the embedding and the norm before the head, times d_model


def saved_bytes(settings, mode: str) -> float:
    """Bytes per token that one block keeps in a mode of SAVED."""
    s = settings
    per_d, per_kv, per_ffn = SAVED[mode][s.attention]
    probabilities = 0
    if mode in ("cpu eager", "cpu compiled"):  # bf16, of the keys up to the end of a query's block
        maps = s.n_heads * (1 if s.attention == "standard" else 2)
        probabilities = maps * (s.max_len + min(s.max_len, BLOCK))
    return per_d * s.d_model + per_kv * s.n_kv_heads * s.head_dim + per_ffn * s.ffn_hidden + probabilities


def memory_moments(settings, body: Anatomy, micro_batch: int, shard: int, chosen: dict, accum: int) -> dict:
    """{moment: {component: bytes}} of one rank at the moments that can be the peak of a step.

    loss      end of forward: all activations, and the chunk of logits that the loss works on
    backward  of the last block: all activations, its weights and gradients, the block before it on its way
    reduce    end of backward: the embedding's gradient goes to its owners
    update    the optimizer step
    """
    s = settings
    blocks, total, tokens = body.parameters["block"], body.parameters["total"], micro_batch * s.max_len
    block, d, small = blocks // s.n_layers, s.d_model, total - blocks
    embedding = s.padded_vocab_size * d
    roots = embedding * (1 if s.tie_embeddings else 2)
    device = chosen["device"]
    live = f"{device} {'compiled' if chosen['compile'] else 'eager'}"
    modes = {"none": live, "selective": f"{device} selective", "full": "full"}
    mode = modes[s.activation_checkpointing]
    activations = s.n_layers * tokens * saved_bytes(s, mode)
    at_work = tokens * (4 * d + 4 * s.ffn_hidden)  # gradients of activations on their way through the FFN
    if s.activation_checkpointing != "none":  # one block is made again
        at_work += tokens * (saved_bytes(s, live) - saved_bytes(s, mode))
    ranks = math.inf if s.cpu_offload else shard  # that share what lies in the devices' memory
    persistent = {
        "weights": 4 * total / ranks,
        "muon state": 4 * blocks / ranks,
        "adamw state": (8 if s.adamw == "fp32" else 2 * (1 + 4 / 256)) * small / ranks,
        "CUDA context, NCCL": CONTEXT if device == "cuda" else 0,
    }
    gradients = 4 * total / ranks
    running = persistent | {
        "gradients": gradients if accum > 1 and s.reduce_every_micro_step else 0,
        "unsharded fp32 gradients": 4 * total if accum > 1 and not s.reduce_every_micro_step else 0,
        "activations": activations + tokens * d * ROOT_SAVED,
        "gathered weights": 2 * roots + (0 if s.reshard_after_forward else 2 * blocks),
        "batch": 16 * tokens * accum,
    }
    more = 2 * 2 * block if s.reshard_after_forward else 0
    chunk = min(tokens, s.loss_chunk) * s.padded_vocab_size
    buckets = min(10 * blocks / shard, 18 * 2**26) if shard > 1 else 4 * 2**20  # muon.py: four alive, in bf16
    return {
        "loss": running | {"loss chunk": (16 if tokens > s.loss_chunk else 12) * chunk + 6 * embedding + 2 * tokens * d},
        "backward": running | {
            "gathered weights": running["gathered weights"] + more + 2 * block * (shard > 1),
            "block gradients": 2 * block + 2 * embedding,
            "block at work": at_work,
        },
        "reduce": persistent | {"gradients": gradients, "gathered weights": 2 * roots, "embedding gradients": 8 * roots},
        "update": persistent | {
            "gradients": gradients,
            "muon buckets": buckets + 8 * max(m * n for m, n in body.blocks),
        },
    }  # fmt: skip


def memory_peak(moments: dict, chosen: dict) -> tuple[str, dict, float]:
    """(moment, its components, bytes): the largest moment, and on a GPU what its allocator cannot use."""
    moment = max(moments, key=lambda m: sum(moments[m].values()))
    parts = {k: v for k, v in moments[moment].items() if v}
    return moment, parts, sum(parts.values()) * (1 + (FRAGMENTATION if chosen["device"] == "cuda" else 0))


def optimizer_seconds(body: Anatomy, gpu: Gpu, gpus: int, shard: int) -> dict:
    """Seconds of the optimizer step: Muon split over all ranks, its traffic, and the elementwise rest."""
    loads = [0.0] * gpus
    for flops in sorted(
        (muon.orthogonalize_flops(*m) for m in body.blocks), reverse=True
    ):  # longest first to the least loaded, as muon.py deals them
        loads[loads.index(min(loads))] += flops
    compute = max(loads) / (gpu.bf16 * ACHIEVED["muon"])
    link = gpu.link if gpus <= 8 else gpu.net
    traffic = 2 * 2 * body.parameters["block"] / gpus * (1 - 1 / gpus) / link
    elementwise = body.parameters["total"] / shard * 24 / (gpu.bandwidth * ACHIEVED["bandwidth"])
    exposed = max(compute, traffic) + 0.1 * min(compute, traffic)
    return {"muon_compute": compute, "muon_communication": traffic, "optimizer": exposed + elementwise}


def step_seconds(settings, body: Anatomy, gpu: Gpu, gpus: int, shard: int, accum: int, chosen: dict) -> dict:
    """Computed times of one step and what follows from them."""
    s, total, per_token = settings, body.parameters["total"], body.flops_per_token
    tokens = s.micro_batch * s.max_len
    linear = 6 * body.parameters["block"]
    head = 6 * s.padded_vocab_size * s.d_model
    attention = max(0.0, per_token - linear - head) / 2  # MFU counts all T x T scores; causal needs half
    rate = gpu.bf16 * ACHIEVED["bf16"]
    block_rate = gpu.fp8 * ACHIEVED["fp8"] * FP8_GAIN[s.fp8_recipe] if chosen["fp8"] and gpu.fp8 else rate
    compute = tokens * (
        linear / block_rate + head / rate + attention * 7 / 6 / (gpu.bf16 * ACHIEVED["attention"])
    )
    again = {"none": 0, "selective": 1 / 9, "full": 1 / 3}[s.activation_checkpointing]  # of the blocks' FLOPs
    compute += again * tokens * linear / block_rate
    passes = 1.0 if chosen["compile"] else 2.6
    elementwise = passes * 3 * 2 * tokens * (8 * s.d_model + 2 * s.ffn_hidden) * s.n_layers
    # the loss: compiled, two readings of the bf16 logits and a gradient; eager, fourteen fp32 passes (model.rows_loss)
    elementwise += tokens * s.padded_vocab_size * (8 if chosen["compile"] else 60)
    compute += elementwise / (gpu.bandwidth * ACHIEVED["bandwidth"])
    link = (
        gpu.link if shard <= 8 else gpu.net * 8
    )  # NVLink inside a node, then one rail of the network per GPU
    gathers = 2 if s.reshard_after_forward else 1
    reduces = 1 if s.reduce_every_micro_step else 1 / accum
    volume = total * (shard - 1) / shard * (2 * gathers + 4 * reduces)  # bf16 gathers, fp32 reduce-scatter
    latency = (gathers + reduces) * (s.n_layers + 1) * shard * HOP if shard > 8 else 0.0
    traffic = volume / link + latency
    micro = max(compute, traffic) + 0.03 * min(compute, traffic)
    replica = 2 * 4 * total / shard / gpu.net if gpus > shard else 0.0  # HSDP all-reduce, fp32, not hidden
    optimizer = optimizer_seconds(body, gpu, gpus, shard)
    seconds = accum * micro + optimizer["optimizer"] + replica
    speed = s.tokens_per_step / seconds
    peak_rate = gpu.fp8 if chosen["fp8"] and gpu.fp8 else gpu.bf16
    return {
        "seconds_per_step": seconds, "tokens_per_second": speed, "tokens_per_second_per_gpu": speed / gpus,
        "flops_per_token": per_token, "mfu": speed / gpus * per_token / gpu.bf16,
        "limit": 1 / (linear / peak_rate + (head + attention) / gpu.bf16),
        "compute": compute, "communication": traffic, "communication_bytes": volume,
        "communication_hidden": traffic <= compute, "replica_all_reduce": replica, **optimizer,
    }  # fmt: skip


def plan(settings, gpus: int = 8, gpu: str = "h200") -> Plan:
    """The plan of `settings` on `gpus` devices of one kind. Raises SettingsError where the batch does not divide."""
    s, device = settings, GPUS[gpu]
    assumed_vocabulary = s.vocab_size is None
    if assumed_vocabulary:  # the data decide it; until then, the seed's
        s = dataclasses.replace(settings, vocab_size=257 if settings.data == "python" else 65_536)
        s.source = settings.source
    accum = s.grad_accum(gpus)
    shard = s.shard_size or gpus
    if gpus % shard:
        raise s.error("shard_size", f"does not divide {gpus} GPUs")
    chosen = choices(s, device)
    body = Anatomy(s)
    parameters, total = body.parameters, body.parameters["total"]
    if chosen["device"] == "cpu":
        device = dataclasses.replace(device, memory=host_memory() / gpus)
    capacity = device.memory * USABLE

    def fits(micro_batch, **changes) -> bool:
        changed = dataclasses.replace(s, **changes)
        micro_steps = s.sequences_per_step // (micro_batch * gpus)
        moments = memory_moments(changed, body, micro_batch, shard, chosen, micro_steps)
        return memory_peak(moments, chosen)[2] <= capacity

    sizes = [n for n in range(1, s.sequences_per_step // gpus + 1) if s.sequences_per_step % (n * gpus) == 0]
    largest = max((n for n in sizes if fits(n)), default=0)
    moments = memory_moments(s, body, s.micro_batch, shard, chosen, accum)
    moment, parts, peak = memory_peak(moments, chosen)
    speed = step_seconds(s, body, device, gpus, shard, accum, chosen)
    blocks = parameters["block"]
    # an 8-bit state is stored twice: the codes of each rank, and fp32 for another world size
    states = 4 * total + 4 * blocks + (8 if s.adamw == "fp32" else 8 + 2 * (1 + 4 / 256)) * (total - blocks)
    start_up = START_UP[chosen["device"]]
    run_hours = (s.steps * speed["seconds_per_step"] + start_up) / 3600
    budget = s.max_hours or s.job_hours
    bought = max(0.0, (budget or 0) * 3600 - start_up) * speed["tokens_per_second"]
    tokens = s.steps * s.tokens_per_step
    price = s.usd_per_gpu_hour * gpus
    result = Plan(
        gpu=device, gpus=gpus, parameters=parameters,
        memory=dict(peak=peak, moment=moment, parts=parts, capacity=capacity, largest_micro_batch=largest),
        facts={
            **chosen, "shard_size": shard, "vocab_size": s.vocab_size,
            "sequences_per_step": s.sequences_per_step, "tokens_per_step": s.tokens_per_step, "micro_batch": s.micro_batch,
            "grad_accum": accum, "steps": s.steps, "tokens": tokens,
            "how": f"{'fp8 ' + s.fp8_recipe if chosen['fp8'] else 'bf16'}, {'compiled' if chosen['compile'] else 'eager'}, "
            f"checkpointing {s.activation_checkpointing}, AdamW {s.adamw}, weights over {shard} GPUs"
            + (f", {gpus // shard} replicas" if gpus > shard else ""),
        },
        speed=speed,
        money={
            "hours": run_hours, "usd_per_gpu_hour": s.usd_per_gpu_hour, "dollars": run_hours * price,
            "budget_hours": budget, "budget_tokens": min(bought, tokens), "budget_share": min(1.0, bought / tokens),
            "budget_dollars": min(budget or 0, run_hours) * price,
            "budget_tokens_at": {f"{x} %": min(tokens, bought * x / 100 / speed["mfu"]) for x in (30, 40, 50)},
        },
        files={
            "checkpoint": states, "weights": 4 * total, "save_seconds": states / gpus / DISK,
            "upload_seconds": states / UPLOAD, "upload_minimum": states / (60 * s.save_minutes or math.inf),
            "publishes": bool(s.hf_model_repo and s.publish),
        },
    )  # fmt: skip
    judge(result, s, fits, sizes, assumed_vocabulary)
    return result


def of_device(settings, gpus: int, device, log) -> Plan | None:
    """The plan on devices like this one (torch.device), said; None where its data sheet is not known."""
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).lower()
    known = [gpu for gpu in GPUS if gpu in name]
    planned = plan(settings, gpus, known[0]) if known else None
    for line in planned.lines() if planned else [f"no plan: this is none of {', '.join(GPUS)}"]:
        log(line)
    return planned


def judge(result: Plan, s, fits, sizes: list[int], assumed_vocabulary: bool):
    """Fill in warnings and problems."""
    money, speed, warn = result.money, result.speed, result.warnings.append
    peak_gb, capacity_gb = result.memory["peak"] / GB, result.memory["capacity"] / GB
    largest, tokens = result.memory["largest_micro_batch"], number(result.facts["tokens"])
    if assumed_vocabulary:
        warn(f"vocab_size is not set: {s.vocab_size:,} assumed until the data's metadata.json says it")
    if peak_gb > capacity_gb:
        cures = [f"micro_batch={largest}"] if largest else []
        for name, value in (
            ("reduce_every_micro_step", True), ("activation_checkpointing", "selective"),
            ("activation_checkpointing", "full"), ("cpu_offload", True),
        ):  # fmt: skip
            if len(cures) < 2 and fits(s.micro_batch, **{name: value}):
                cures.append(f"{name}={value}")
        last = f"micro_batch={sizes[0]} with activation_checkpointing=full, more GPUs, or a smaller model"
        needs = f"needs {peak_gb:.1f} GB of {capacity_gb:.1f} GB usable on each GPU"
        result.problems.append(f"{needs}: {' or '.join(cures or [last])}")
    elif peak_gb > 0.9 * capacity_gb:
        warn(f"memory is tight: {peak_gb:.1f} of {capacity_gb:.1f} GB usable")
    if s.max_hours or s.job_hours:
        warmup = (s.warmup_steps * speed["seconds_per_step"] + START_UP[result.facts["device"]]) / 3600
        share = money["budget_share"]
        bought = f"{money['budget_hours']:g} h buy about {100 * share:.0f} % of the {tokens}-token schedule"
        if s.max_hours and s.max_hours <= warmup:
            ends = f"max_hours={s.max_hours:g} end inside the warm-up, which takes {warmup:.2g} h"
            result.problems.append(f"{ends}: lower warmup_steps={s.warmup_steps}, or raise max_hours")
        elif share < 1 and s.max_hours:
            warn(f"{bought}: the decay will be moved to end at about step {share * s.steps:,.0f}")
        elif share < 1:
            launches = (
                f"about {math.ceil(1 / share) if share else 'too many'} launches of job_hours={s.job_hours:g}"
            )
            decayed = f"To end decayed, set max_hours, or target_tokens={money['budget_tokens']:.2g}"
            warn(f"{bought}: {launches}, the rate still near its peak after the first. {decayed}")
            of_that = 100 * s.warmup_steps / max(1, share * s.steps)
            if share * s.steps < 5 * s.warmup_steps:
                warn(f"warmup_steps={s.warmup_steps} are {of_that:.0f} % of that")
    if result.facts["device"] == "cpu":
        warn("speed on a CPU is a rough guess: one core of 0.15 TFLOP/s")
    if not speed["communication_hidden"]:
        warn("FSDP's traffic is not hidden behind compute: raise micro_batch, or set shard_size (HSDP)")
    if s.use_fp8 == "auto" and result.facts["fp8"] and s.fp8_recipe == "rowwise":
        warn("fp8_recipe=rowwise gained 10 % on a published 8B: measure with python -m bench gpu")
    if result.facts["fp8"] and not result.facts["compile"]:
        warn("fp8 without compile is slower than bf16: use_compile=True, or use_fp8=off")


def number(value: float) -> str:
    """7902661952 -> '7.90B'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.0f}"


def hours(value: float) -> str:
    """Hours as days above two of them, as minutes or seconds below one hour."""
    for limit, unit, size in ((48, "days", 24), (1, "h", 1), (1 / 30, "min", 1 / 60)):
        if value >= limit:
            return f"{value / size:.{2 if unit == 'h' else 1}f} {unit}"
    return f"{value * 3600:.0f} s"


def overlay(folders: list[str]) -> int:
    """curves.png: the loss curves of several runs."""
    from track import draw, read_rows

    curves = {}
    for folder in folders:
        path = folder if folder.endswith(".jsonl") else os.path.join(folder, "metrics.jsonl")
        name = os.path.basename(os.path.dirname(os.path.abspath(path)))
        curves[name] = read_rows(path)
        if not curves[name]:
            print(f"{path}: no rows of metrics", file=sys.stderr)
            return 65
    try:
        draw(curves, "curves.png")
    except ImportError:
        print("curves.png needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 71
    print(f"curves.png: {', '.join(curves)}")
    return 0


def main(argv: list[str]) -> int:
    if not argv or {"--help", "-h"} & set(argv):
        print(__doc__)
        return 0
    if argv[0] == "--curve":
        return overlay(argv[1:])
    own = [a for a in argv if a.split("=")[0] in ("--gpus", "--gpu")]
    options = dict(a.lstrip("-").partition("=")[::2] for a in ("--gpus=8", "--gpu=h200", *own))
    try:
        if options["gpu"] not in GPUS:
            raise SettingsError(f"--gpu={options['gpu']}: known are {', '.join(GPUS)}")
        if not options["gpus"].isdigit() or options["gpus"] == "0":
            raise SettingsError(f"--gpus={options['gpus']}: must be a positive number, written --gpus=8")
        rest = [a for a in argv if a not in own and a != "--json"]
        result = plan(load_settings(rest), int(options["gpus"]), options["gpu"])
    except SettingsError as error:
        given = any(a.startswith("--gpus=") for a in argv)
        print(error if given else f"{error} (plan.py assumes --gpus=8 --gpu=h200)", file=sys.stderr)
        return error.exit_code
    print(json.dumps(dataclasses.asdict(result), indent=2) if "--json" in argv else "\n".join(result.lines()))
    return 2 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
