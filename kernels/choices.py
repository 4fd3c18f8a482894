"""Float8, torch.compile and the attention kernel: what is chosen on this machine, and how each is applied.

`choose` decides, with its reasons; what was asked for and cannot be had is a ModelError that names the setting: nothing
falls back in silence.
"""

import dataclasses
import functools
import importlib.util
import os
import shutil

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cpu import BLOCK


class ModelError(ValueError):
    """A shape, a setting or a machine that the model cannot work with."""

    exit_code = 64


def bad(settings, name: str, problem: str) -> ModelError:
    """A ModelError that names the setting, its value and where it came from."""
    return ModelError(str(settings.error(name, problem)))


def choose(settings, device) -> dict:
    """What "auto" means on this machine: {"fp8": bool, "compile": bool, "reasons": [sentence, …]}. Raises ModelError
    where "on" or True cannot be had."""
    s, device = settings, torch.device(device)
    gpu = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    where = f"sm_{gpu[0]}{gpu[1]}" if gpu else device.type

    torchao = importlib.util.find_spec("torchao") is not None
    able = gpu is None or gpu >= (8, 9) or s.fp8_emulate  # the CPU's float8 is exact, and slow
    if s.use_fp8 == "on" and not (torchao and able):
        lacks = f"{where} has no float8 matmul (sm_89 and newer do); use off, or fp8_emulate"
        raise bad(s, "use_fp8", lacks if torchao else "the package torchao is missing; use off")
    fp8 = s.use_fp8 == "on" or (s.use_fp8 == "auto" and torchao and gpu is not None and gpu >= (9, 0))
    note = "" if torchao else " (no torchao)"
    if fp8 and gpu is None and not s.fp8_emulate:
        note = " (correct but about 30x slower than fp8_emulate)"
    reasons = [f"use_fp8={s.use_fp8}: {'float8' if fp8 else 'bf16'} matmuls on {where}{note}"]

    if device.type == "cuda":
        found = importlib.util.find_spec("triton") is not None
        tool = "triton" if found else "no triton"
    else:
        names = [os.environ.get("CXX"), "g++", "clang++"]
        tool = next((path for n in names if n and (path := shutil.which(n))), None)
        found, tool = tool is not None, tool or "no C++ compiler"
        if " " in torch.__file__:  # its linker flags are not quoted (seen with torch 2.13)
            found, tool = False, "no torch in a path without spaces, which its C++ build needs,"
    if s.use_compile is True and not found:
        raise bad(s, "use_compile", f"{tool} found; install one, or use False")
    compiled = s.use_compile is True or (s.use_compile == "auto" and found and gpu is not None)
    if s.use_compile == "auto" and gpu is None:
        tool = "on a CPU the kernels below are as fast, and compiling takes a minute"
    reasons.append(f"use_compile={s.use_compile}: {'compiled blocks' if compiled else 'eager'} ({tool})")
    return {"fp8": fp8, "compile": compiled, "reasons": reasons}


def convert_fp8(model, settings, log=print):
    """Make the block matrices float8 in their matmuls (torchao); the fp32 masters and everything else stay.

    Weights are gathered in bf16 and cast after: torchao's float8 all-gather is for tensorwise only and wraps the masters
    in a tensor subclass that Muon and the checkpoints would have to know.
    """
    # costs 2 s: only where it is used
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    taken, skipped = [], {}
    for name, module in linear.items():
        if model.roles[f"{name}.weight"].kind != "block":
            skipped[name.rsplit(".", 1)[-1]] = "precision matters more than speed"
        elif any(n % 16 for n in module.weight.shape):
            skipped[name.split(".", 2)[-1]] = f"{tuple(module.weight.shape)} are no multiples of 16"
        else:
            taken.append(name)
    config = Float8LinearConfig.from_recipe_name(settings.fp8_recipe)
    config = dataclasses.replace(config, emulate=settings.fp8_emulate)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in taken, config=config)
    if not taken and settings.use_fp8 == "on":
        raise bad(settings, "use_fp8", f"no block matrix has dimensions that are multiples of 16: {skipped}")
    model.fp8 = bool(taken)
    recipe = f"float8 ({settings.fp8_recipe}{', emulated' if settings.fp8_emulate else ''})"
    others = "".join(f"; not {name} ({why})" for name, why in skipped.items())
    log(f"{recipe}: {len(taken)} of {len(linear)} linear layers{others}")


def compile_blocks(model, settings, log=print):
    """torch.compile the body of every block, one graph for all layers, a new one for each (B, T) and mode; and the
    elementwise part of the loss."""
    torch._dynamo.config.recompile_limit = 64  # contexts of the warm-up x (train, evaluate); the default is 8

    def run(eager, compiled, *inputs):
        if model.compiled:
            try:
                return compiled(*inputs)
            except torch._dynamo.exc.TorchDynamoException as e:  # nothing has run yet: compiling comes first
                text = " ".join(line.strip() for line in str(e).splitlines() if line.strip())[:300]
                if settings.use_compile is True:
                    cure = 'set use_compile=False, or "auto" to go on without it'
                    raise bad(settings, "use_compile", f"torch.compile failed ({cure}): {text}") from e
                log(f"use_compile=auto: torch.compile FAILED, the run goes on in eager mode, slower. {text}")
                model.compiled = False
        return eager(*inputs)

    def wrapped(eager):
        return functools.partial(run, eager, torch.compile(eager, fullgraph=True, dynamic=False))

    model.compiled = True
    model.rows_loss = wrapped(model.rows_loss)
    for block in model.layers:
        block.run = wrapped(block.body)


def sdpa(q, k, v, scale: float):
    """Causal attention (B, heads, T, dim) in v's dtype; query head i reads kv head i // (heads_q / heads_kv), never
    copied; a single query is the last position and sees all keys."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=True)


def choose_attention(settings, device, log=print) -> str:
    """Pin the attention kernel of a GPU: the first of a fixed order (a timed choice could differ between a run and its
    resume) whose forward and backward agree with fp32 math on this model's heads. "wide" if it takes v of D beside q, k
    of D/2 in one call, as attention="diff" wants: cuDNN does; "padded" otherwise: flash needs padded keys
    (Attention.two_streams) and so a third more FLOPs. On a CPU "blocks", see BlockAttention."""
    s = settings
    if device.type != "cuda":
        log(f"attention={s.attention}: blocks of {BLOCK} queries")
        return "blocks"
    kernels = ["flash", "efficient"] if s.deterministic else ["cudnn", "flash", "efficient"]
    options = [(k, u) for k in kernels for u in ((True, False) if s.attention == "diff" else (False,))]
    if s.allow_math_attention:
        options.append(("math", False))
    problems = []
    for kernel, unequal in options:
        problem = attention_problem(s, device, kernel, unequal)
        form = f"{kernel}{', v wider than q and k' if unequal else ', keys padded' if s.attention == 'diff' else ''}"
        if problem is None:
            for name, switch in SDPA_SWITCHES.items():  # where the pinned kernel cannot run, SDPA now raises
                switch(name == kernel)
            log("; passed over: ".join([f"attention={s.attention}: {form}", *problems]))
            return "wide" if unequal else "padded"
        problems.append(f"{form}: {problem}")
    cure = f"head_dim={s.head_dim} (a multiple of 16 helps; allow_math_attention=True accepts a slow kernel)"
    raise bad(s, "attention", f"no fast kernel runs with {cure}. Tried {'; '.join(problems)}")


SDPA_SWITCHES = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}


def attention_problem(settings, device, kernel: str, unequal: bool) -> str | None:
    """None if `kernel` computes this model's attention in bf16 within 2e-2 of fp32 math, forward and backward."""
    backend = next(v for name, v in SDPBackend.__members__.items() if name.startswith(kernel.upper()))
    s, T = settings, min(settings.max_len, 2048)  # the run's own length: kernels fail at some lengths only
    query_dim = s.head_dim // 2 if unequal else s.head_dim
    group = (2 if s.attention == "diff_v2" else 1) * s.n_heads // s.n_kv_heads
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(2, T, 2 * group, query_dim), (2, T, 2, query_dim), (2, T, 2, s.head_dim)]
    inputs = [torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes]

    def results(dtype, backend):
        q, k, v = leaves = [t.to(dtype).requires_grad_() for t in inputs]
        with sdpa_kernel([backend]):
            y = sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), s.head_dim**-0.5)
            return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    try:
        rounded, exact = results(torch.bfloat16, backend), results(torch.float32, SDPBackend.MATH)
        for got, want in zip(rounded, exact, strict=True):
            error = ((got.float() - want).norm() / want.norm()).item()
            if not error < 2e-2:
                return f"relative error {error:.1e}"
    except RuntimeError as e:
        return str(e).strip().splitlines()[0][:100]
    return None
