"""python -m bench gpu: what one H200 does with full-width blocks, in at most 8 minutes, and what that says about eight of them.

Full width (d 4096, ffn 14,336, 32/8 heads, T 2048), few layers: two depths of each configuration give the cost of a block
as a slope, free of embedding, head and launch overhead. Every case prints as soon as it is done, is skipped when the time
left is short, and survives a failing or out-of-memory case, so that a run cut short still counts. Most important first.

    python -m bench gpu [--minutes 8]           # configurations run one after the other, repetitions inside each
    python -m bench gpu --tiny --no-compile     # the same script on a CPU with toy shapes: does it run?

`extrapolate` is no measurement: compute of one GPU, and the traffic that plan.py computes for 8 (nothing here ran NCCL).
"""

import gc
import os
import statistics
import time
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import muon
import plan
from kernels import choose_attention
from settings import load_settings

from .tools import NovaTrainer, Report, batch_of, compare, loss_pair, measure, muon_steps, nova_settings

FULL = dict(vocab=65536, d=4096, heads=32, kv=8, ffn=14336, context=2048, batch=4, depth=35, layers=(2, 6))
TOY = dict(vocab=64, d=64, heads=4, kv=2, ffn=96, context=32, batch=2, depth=5, layers=(1, 2))
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BF16_PEAK = 989e12  # FLOP/s, dense, H100 and H200 data sheet; MFU is against it for fp8 too
HEADROOM = 0.93  # share of the memory that a prediction may fill

# Name -> changed settings. bf16 compiled is what the others are compared with.
CONFIGURATIONS = {
    "bf16": {},
    "fp8-tensorwise": dict(use_fp8="on", fp8_recipe="tensorwise"),
    "fp8-rowwise": dict(use_fp8="on", fp8_recipe="rowwise"),
    "fp8-gw_hp": dict(use_fp8="on", fp8_recipe="rowwise_with_gw_hp"),
    "bf16-selective": dict(activation_checkpointing="selective"),
    "bf16-full": dict(activation_checkpointing="full"),
    "bf16-standard": dict(attention="standard"),
    "bf16-diff_v2": dict(attention="diff_v2"),
    "bf16-eager": dict(use_compile=False),
}


class Device:
    """The accelerator, or a CPU that stands in for it in a dry run."""

    def __init__(self, options, minutes: float):
        self.type = "cuda" if torch.cuda.is_available() else "cpu"
        self.end = time.monotonic() + 60 * minutes
        self.size = TOY if options.tiny else FULL
        self.compile = options.compile and not (options.tiny and self.type == "cpu")
        self.rounds = options.rounds if options.tiny else max(10, options.rounds)

    def left(self) -> float:
        return self.end - time.monotonic()

    def sync(self):
        if self.type == "cuda":
            torch.cuda.synchronize()

    def clean(self):
        """Give back what the last case held, and start counting the peak anew."""
        gc.collect()
        if self.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.type == "cuda" else 0

    def time(self, function, rounds: int | None = None) -> list[float]:
        """Seconds of each of `rounds` calls, after two that warm up."""
        return measure({"alone": function}, rounds or self.rounds, 0, self.sync)["alone"]


def settings_for(device: Device, layers: int, batch: int | None = None, **changes):
    s = {**device.size, "layers": layers, "batch": batch or device.size["batch"]}
    values = dict(n_kv_heads=s["kv"], ffn_hidden=s["ffn"], use_compile=device.compile)
    if changes.get("use_fp8") == "on" and device.type == "cpu":
        values["fp8_emulate"] = True
    return nova_settings(s, **{**values, **changes})


def step_of(device: Device, layers: int, batch: int | None = None, **changes) -> dict:
    """Forward and backward of one depth, and the update: seconds, peak bytes, seconds to the first result."""
    device.clean()
    settings = settings_for(device, layers, batch, **changes)
    trainer = NovaTrainer(settings, device.type)
    batch = batch_of(dict(vocab=settings.vocab_size), settings.micro_batch, settings.max_len)
    x, y = (t.to(device.type) for t in batch)
    begin = time.perf_counter()
    trainer.micro(x, y)  # compiles
    device.sync()
    first = time.perf_counter() - begin
    micro = device.time(lambda: trainer.micro(x, y))
    peak = device.peak()
    update = device.time(lambda: trainer.update(0.01), min(3, device.rounds))
    planned = plan.plan(settings, 1, "h200").memory["peak"]
    times = dict(micro=micro, update=update, first=first)
    return dict(**times, peak=peak, planned=planned, tokens=x.numel(), flops=trainer.flops)


def case_environment(report: Report, device: Device, found: dict):
    """The device and the matmul rates it reaches at the FFN's shape: the ceiling of everything below."""
    s = device.size
    n, d, f = s["batch"] * s["context"], s["d"], s["ffn"]
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    facts = dict(device=name, torch=torch.__version__)
    a, b = (torch.randn(shape, device=device.type).bfloat16() for shape in ((n, d), (f, d)))
    facts["bf16_TF"] = 2 * n * d * f / min(device.time(lambda: a @ b.t())) / 1e12
    if device.type == "cuda":
        one = torch.ones((), device="cuda")
        qa, qb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        scaled = partial(torch._scaled_mm, qa, qb.t(), one, one, out_dtype=torch.bfloat16)
        facts["fp8_TF"] = 2 * n * d * f / min(device.time(scaled)) / 1e12
    report.fact("gpu/env", **facts)


def case_attention(report: Report, device: Device, found: dict):
    """Which kernel each form gets, and forward plus backward of every kernel at the shapes of each form."""
    s = device.size
    hd = s["d"] // s["heads"]
    for form in ("diff", "diff_v2", "standard"):
        settings, lines = settings_for(device, 1, attention=form), []
        choose_attention(settings, torch.device(device.type), lines.append)
        report.fact("gpu/attention", form=form, chosen=lines[-1] if lines else "unknown")
    # query heads, kv heads, channels of q and k (of them useful), channels of v, calls per layer
    shapes = {
        "standard": (s["heads"], s["kv"], hd, hd, hd, 1),
        "diff,padded_keys": (s["heads"], s["kv"], hd, hd // 2, hd, 2),
        "diff,one_call": (2 * s["heads"], 2 * s["kv"], hd // 2, hd // 2, hd, 1),
        "diff_v2": (2 * s["heads"], s["kv"], hd, hd, hd, 1),
    }
    for form, (heads, kv, qk, useful_qk, vd, calls) in shapes.items():
        for kind in ("flash", "cudnn", "efficient"):
            backend = SDPBackend.__members__[f"{kind.upper()}_ATTENTION"]
            sizes = ((s["batch"], h, s["context"], c) for h, c in ((heads, qk), (kv, qk), (kv, vd)))
            q, k, v = (torch.randn(n, device=device.type).bfloat16().requires_grad_() for n in sizes)

            def both(q=q, k=k, v=v, backend=backend):
                with sdpa_kernel([backend]) if device.type == "cuda" else nullcontext():
                    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                torch.autograd.grad(y, (q, k, v), y)

            try:
                seconds = statistics.median(device.time(both)) * calls
            except RuntimeError as e:
                report.fact("gpu/sdpa", form=form, kernel=kind, failed=str(e).splitlines()[0][:60])
                continue
            useful = (
                3.5 * 2 * s["batch"] * heads * s["context"] ** 2 * (useful_qk + vd) / 2 * calls
            )  # causal: half
            report.fact("gpu/sdpa", form=form, kernel=kind, ms=1e3 * seconds, TF=useful / seconds / 1e12)


def case_blocks(report: Report, device: Device, found: dict):
    """Every configuration at two depths: milliseconds and bytes of a block as slopes; rows against bf16 compiled."""
    low, high = device.size["layers"]
    for name, changes in CONFIGURATIONS.items():
        if device.left() < 75:
            report.fact("gpu/block", configuration=name, skipped=f"{device.left():.0f}_s_left")
            continue
        torch._dynamo.reset()  # its cache is per code object: eight configurations would fill it
        try:
            shallow, deep = step_of(device, low, **changes), step_of(device, high, **changes)
        except Exception as e:  # out of memory, a compiler's or a kernel's error: the next one may run
            report.fact("gpu/block", configuration=name, failed=failure(e))
            continue
        a, b = (statistics.median(r["micro"]) for r in (shallow, deep))
        block, bytes_block = (b - a) / (high - low), (deep["peak"] - shallow["peak"]) / (high - low)
        update = (min(deep["update"]) - min(shallow["update"])) / (high - low)
        flops = (deep["flops"] - shallow["flops"]) / (high - low) * deep["tokens"]
        found[name] = dict(
            block=block, rest=a - low * block, bytes_block=bytes_block, bytes_rest=shallow["peak"] - low * bytes_block,
            update=update, deep=deep,
        )  # fmt: skip
        report.fact(
            "gpu/block", configuration=name, block_ms=1e3 * block, rest_ms=1e3 * found[name]["rest"],
            block_mfu=flops / block / BF16_PEAK, block_GiB=bytes_block / 2**30, muon_ms_per_block=1e3 * update,
            first_step_s=shallow["first"], tokens=deep["tokens"], peak_GiB=deep["peak"] / 2**30,
            planned_GiB=deep["planned"] / 2**30,
        )  # fmt: skip
        if name != "bf16" and "bf16" in found:
            times = {name: deep["micro"], "bf16": found["bf16"]["deep"]["micro"]}
            report.row(compare(f"gpu/{high}layers", times, name, "bf16", deep["tokens"], "tok/s"))


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def best(found: dict) -> str | None:
    """The fastest configuration without recomputation that computes the default attention."""
    usable = [n for n in ("bf16", "fp8-tensorwise", "fp8-rowwise", "fp8-gw_hp", "bf16-eager") if n in found]
    return min(usable, key=lambda n: found[n]["block"]) if usable else None


def case_depth(report: Report, device: Device, found: dict):
    """As many layers as the slopes say fit, to hold the slopes' prediction against; then a larger micro-batch."""
    name = best(found)
    if name is None:
        return report.fact("gpu/depth", skipped="no_configuration_ran")
    r = found[name]
    layers = device.size["depth"]
    if r["bytes_block"] > 0:
        memory = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else 150 * 10**9
        fits = int((HEADROOM * memory - r["bytes_rest"]) / (r["bytes_block"] * 1.02))
        layers = max(1, min(layers, fits))
    predicted, peak = r["rest"] + layers * r["block"], r["bytes_rest"] + layers * r["bytes_block"]
    torch._dynamo.reset()
    deep = step_of(device, layers, **CONFIGURATIONS[name])
    measured = statistics.median(deep["micro"])
    report.fact(
        "gpu/depth", configuration=name, layers=layers, ms=1e3 * measured, predicted_ms=1e3 * predicted,
        measured_over_predicted=measured / predicted, mfu=deep["flops"] * deep["tokens"] / measured / BF16_PEAK,
        peak_GiB=deep["peak"] / 2**30, predicted_GiB=peak / 2**30, planned_GiB=deep["planned"] / 2**30, **{"tok/s": deep["tokens"] / measured},
        update_ms=1e3 * min(deep["update"]),
    )  # fmt: skip
    low = device.size["layers"][0]
    for batch in (4 * device.size["batch"], 2 * device.size["batch"]):  # the largest that runs ends it
        if device.left() < 60:
            return
        try:
            more = step_of(device, low, batch, **CONFIGURATIONS[name])
        except torch.OutOfMemoryError:
            report.fact("gpu/micro_batch", micro_batch=batch, layers=low, failed="out_of_memory")
            continue
        rate = more["tokens"] / statistics.median(more["micro"])
        facts = {"peak_GiB": more["peak"] / 2**30, "tok/s": rate}
        report.fact("gpu/micro_batch", micro_batch=batch, layers=low, **facts)
        return


def case_muon(report: Report, device: Device, found: dict):
    """The matrices of one layer: Nova's Muon against torch.optim.Muon, and AdamW on the same for scale."""
    s = device.size
    hd, d, ffn = s["d"] // s["heads"], s["d"], s["ffn"]
    shapes = [((s["heads"] + 2 * s["kv"]) * hd, d), (d, d), (ffn, d), (ffn, d), (d, ffn)]
    blocks = {"m0": tuple(h * hd for h in (s["heads"], s["kv"], s["kv"]))}
    steps = muon_steps(shapes, device.type, blocks)
    times = {name: device.time(step) for name, step in steps.items()}
    work = sum(muon.orthogonalize_flops(m, n) for m, n in shapes)
    seconds = statistics.median(times["nova"])
    facts = dict(TF=work / seconds / 1e12, full_depth_on_8_ms=1e3 * seconds * s["depth"] / 8)
    for peer in ("torch.optim.Muon", "adamw"):
        report.row(compare("gpu/muon-layer", times, "nova", peer, 0, "s", **facts))


def case_loss(report: Report, device: Device, found: dict):
    """The loss head at the run's shape: chunked against whole logits."""
    s = device.size
    pair, times, peaks = loss_pair(s["batch"] * s["context"], s["d"], s["vocab"], 2048, device.type), {}, {}
    device.clean()
    before = device.peak()
    for name, function in pair.items():
        device.clean()
        times[name] = device.time(function)
        peaks[f"{name}_GiB"] = (device.peak() - before) / 2**30
    report.row(compare("gpu/loss", times, "chunked", "whole", 0, "s", **peaks))


def case_extrapolate(report: Report, device: Device, found: dict):
    """From the slopes to the full depth on 8 GPUs: measured compute, plan.py's traffic. Not a measurement."""
    for name in {"bf16", best(found)} & set(found):
        r = found[name]
        config = os.path.join(HERE, "config", "h200_8x.py")
        settings = load_settings([config, "--vocab_size=65536", "--data=python"], environ={})
        settings.micro_batch = device.size["batch"] if device.size is FULL else settings.micro_batch
        p = plan.plan(settings, 8, "h200")
        micro, traffic = r["rest"] + settings.n_layers * r["block"], p.speed["communication"]
        optimizer = max(settings.n_layers * r["update"] / 8, p.speed["muon_communication"])
        seconds = p.facts["grad_accum"] * (max(micro, traffic) + 0.03 * min(micro, traffic)) + optimizer
        rate = settings.tokens_per_step / seconds / 8
        report.fact(
            "gpu/EXTRAPOLATED-8xH200", configuration=name, layers=settings.n_layers, micro_ms=1e3 * micro,
            traffic_ms=1e3 * traffic, optimizer_ms=1e3 * optimizer, tok_s_gpu=rate,
            mfu=rate * p.speed["flops_per_token"] / BF16_PEAK, plan_tok_s_gpu=p.speed["tokens_per_second_per_gpu"],
            measured_over_plan=rate / p.speed["tokens_per_second_per_gpu"], note="computed_from_one_GPU,_no_NCCL_ran",
        )  # fmt: skip


CASES = (case_environment, case_attention, case_blocks, case_depth, case_muon, case_loss, case_extrapolate)


def run(report: Report, options) -> int:
    """All cases, each printed at once; 1 if any failed."""
    device = Device(options, options.minutes)
    if device.type == "cpu" and not options.tiny:
        report.fact("gpu", skipped="no_GPU_here;_a_dry_run:_python_-m_bench_gpu_--tiny")
        return 1
    found, failures = {}, 0
    for case in CASES:
        name = case.__name__.removeprefix("case_")
        if device.left() < 15:
            report.fact(f"gpu/{name}", skipped="out_of_time")
            continue
        try:
            case(report, device, found)
        except Exception as e:  # the other cases still count
            failures += 1
            report.fact(f"gpu/{name}", failed=failure(e))
        device.clean()
    report.fact("gpu/done", failures=failures, seconds_left=device.left())
    return 1 if failures else 0
