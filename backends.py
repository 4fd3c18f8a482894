"""What a machine computes the model with: its attention kernel, float8, torch.compile; and kernels for a CPU.

`choose` says what "auto" means here; the rest applies it. Each choice is logged with its reason, and what was asked for
and cannot be had is a ModelError that names the setting: nothing falls back in silence.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import shutil

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# the ones of a block that become float8
MATRICES = ("attn.qkv", "attn.o_proj", "ffn.gate", "ffn.up", "ffn.down")


class ModelError(ValueError):
    """A shape, a setting or a machine that the model cannot work with."""

    exit_code = 64


def bad(settings, name: str, problem: str) -> ModelError:
    """A ModelError that names the setting, its value and where it came from."""
    return ModelError(str(settings.error(name, problem)))


def choose(settings, device) -> dict:
    """What "auto" means on this machine: {"fp8": bool, "compile": bool, "reasons": [sentence, …]}. Raises ModelError
    where "on" or True cannot be had."""
    device = torch.device(device)
    s, reasons = settings, []
    gpu = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    where = f"sm_{gpu[0]}{gpu[1]}" if gpu else device.type

    torchao = importlib.util.find_spec("torchao") is not None
    able = gpu is None or gpu >= (8, 9) or s.fp8_emulate  # the CPU's float8 is exact, and slow
    if s.use_fp8 == "on" and not (torchao and able):
        why = (
            f"{where} has no float8 matmul (sm_89 and newer do)"
            if torchao
            else "the package torchao is missing"
        )
        raise bad(s, "use_fp8", f"{why}; use off" + ("" if able else ", or fp8_emulate"))
    fp8 = s.use_fp8 == "on" or (s.use_fp8 == "auto" and torchao and gpu is not None and gpu >= (9, 0))
    reasons.append(
        f"use_fp8={s.use_fp8}: {'float8' if fp8 else 'bf16'} matmuls on {where}"
        + ("" if torchao else " (no torchao)")
    )
    if fp8 and gpu is None and not s.fp8_emulate:
        reasons[-1] += " (correct but about 30x slower than fp8_emulate)"

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
            passed = f"; passed over: {'; '.join(problems)}" if problems else ""
            log(f"attention={s.attention}: {form}{passed}")
            return "wide" if unequal else "padded"
        problems.append(f"{form}: {problem}")
    raise bad(
        s, "attention", f"no fast kernel runs with head_dim={s.head_dim} (a multiple of 16 helps; d_model and n_heads set "
        f"it). allow_math_attention=True accepts the slow one. Tried {'; '.join(problems)}",
    )  # fmt: skip


SDPA_SWITCHES = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}


def attention_problem(settings, device, kernel: str, unequal: bool) -> str | None:
    """None if `kernel` computes this model's attention in bf16 within 2e-2 of fp32 math, forward and backward."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
    }  # fmt: skip
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
        for got, want in zip(
            results(torch.bfloat16, backends[kernel]), results(torch.float32, SDPBackend.MATH), strict=True
        ):
            error = ((got.float() - want).norm() / want.norm()).item()
            if not error < 2e-2:
                return f"relative error {error:.1e}"
    except RuntimeError as e:
        return str(e).strip().splitlines()[0][:100]
    return None


def convert_fp8(model, settings, log=print):
    """Make the block matrices float8 in their matmuls (torchao); the fp32 masters and everything else stay.

    Weights are gathered in bf16 and cast after: torchao's float8 all-gather is for tensorwise only and wraps the masters
    in a tensor subclass that Muon and the checkpoints would have to know.
    """
    # costs 2 s: only where it is used
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    taken, skipped = [], {}

    def wanted(module, name: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        if not name.endswith(MATRICES):
            skipped[name.rsplit(".", 1)[-1]] = "precision matters more than speed"
        elif any(n % 16 for n in module.weight.shape):
            skipped[name.split(".", 2)[-1]] = f"{tuple(module.weight.shape)} are no multiples of 16"
        else:
            taken.append(name)
        return name in taken

    config = Float8LinearConfig.from_recipe_name(settings.fp8_recipe)
    config = dataclasses.replace(config, emulate=settings.fp8_emulate)
    total = sum(isinstance(m, nn.Linear) for m in model.modules())
    convert_to_float8_training(model, module_filter_fn=wanted, config=config)
    if not taken and settings.use_fp8 == "on":
        raise bad(
            settings, "use_fp8", f"no matrix of the blocks has dimensions that are multiples of 16: {skipped}"
        )
    model.fp8 = bool(taken)
    log(
        f"float8 ({settings.fp8_recipe}{', emulated' if settings.fp8_emulate else ''}): {len(taken)} of {total} linear "
        f"layers" + "".join(f"; not {name} ({why})" for name, why in skipped.items())
    )


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


# --- kernels for a CPU ---------------------------------------------------------------------------------------

BLOCK = 64  # queries whose scores exist at once: 32 and 128 take a tenth longer at T 256


def eager_cpu(x) -> bool:
    """Whether the kernels below serve x: on a CPU torch composes its own of many passes, which a compiler fuses."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rms_norm(x, scale, eps: float):
    """x / rms(x) over the last axis, times `scale`, of x's last axes."""
    if eager_cpu(x):
        return RMSNorm.apply(x, scale, eps)
    if scale.ndim == 1:
        return F.rms_norm(x, scale.shape, scale, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps) * scale


def rotate(x, cos, sin):
    """Rotate the pairs (j, j + dim/2) of x (B, T, heads, maps, dim) by position, in fp32 or better; cos, sin (T, dim)."""
    if eager_cpu(x):
        return Rotation.apply(x, cos, sin)
    x = x.to(torch.promote_types(x.dtype, cos.dtype))
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos[:, None, None], torch.cat([second, first], -1), sin[:, None, None])


class RMSNorm(torch.autograd.Function):
    """`rms_norm` in fp32 or better, rounded once."""

    @staticmethod
    def forward(ctx, x, scale, eps: float):
        y = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        r = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        r = r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, r, scale)
        return y.mul_(r).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, r, scale = ctx.saved_tensors
        normed, g = x.to(r.dtype, copy=True).mul_(r), grad.to(r.dtype, copy=True)
        product = g * normed
        d_scale = product.flatten(0, -scale.ndim - 1).sum(0).to(scale.dtype)
        mean = product.mul_(scale).sum(-1, keepdim=True).div_(-x.shape[-1])
        return g.mul_(scale).addcmul_(normed, mean).mul_(r).to(x.dtype), d_scale, None


class Rotation(torch.autograd.Function):
    """`rotate`; its gradient is turned back by the same angle."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, -sin).to(ctx.dtype), None, None


def turned(x, cos, sin):
    """x rotated, outside autograd."""
    x = x.to(torch.promote_types(x.dtype, cos.dtype))
    return (x * cos[:, None, None]).addcmul_(x.roll(x.shape[-1] // 2, -1), sin[:, None, None])


class BlockAttention(torch.autograd.Function):
    """Causal attention by matrix products in v's dtype, one block of queries at a time against the keys up to its end:
    few of the scores that do not count are made. In bf16, forward and backward of "diff" take 0.33 (T 256, 1024) to 0.65
    (T 64) of the time of torch's fused CPU kernel, which works best in fp32 and has to run twice. The probabilities are
    kept: making them again would take a third longer."""

    @staticmethod
    def forward(ctx, q, k, v, second, scale: float):
        """q (B, T, maps, streams, d), k (B, T, K, streams, d), v (B, T, K, D); map i reads kv head i // (maps / K).
        -> (B, T, maps, D): A1 v, and with two streams A1 v + second A2 v, second (maps,)."""
        B, T, maps, _, _ = q.shape
        K, D = v.shape[2:]
        R = maps // K
        q, k, v = (grouped(t.to(v.dtype), K) for t in (q * scale, k, v.unsqueeze(3)))
        if second is not None:
            second = second.to(v.dtype).view(K, 1, R).expand(B, K, T, R).reshape(B * K, T * R, 1)
        future = torch.full((BLOCK, BLOCK), -math.inf, dtype=v.dtype, device=v.device).triu_(1)
        future = future.repeat_interleave(R, 0)
        y, kept = v.new_empty(B * K, T * R, D), []
        for start in range(0, T, BLOCK):
            end = min(T, start + BLOCK)
            rows, seen = slice(R * start, R * end), slice(0, end)
            for stream_q, stream_k in zip(q, k, strict=True):
                scores = stream_q[:, rows] @ stream_k[:, seen].mT
                scores[..., start:] += future[: R * (end - start), : end - start]
                kept.append(scores.softmax(-1))  # (B K, R block, seen)
            y[:, rows] = combined(kept[-len(q) :], second, rows) @ v[0, :, seen]
        ctx.save_for_backward(q, k, v, second, *kept)
        ctx.scale = scale
        return ungrouped(y[None], K, T)[..., 0, :]

    @staticmethod
    def backward(ctx, grad):
        q, k, v, second, *kept = ctx.saved_tensors
        T, wide = k.shape[2], torch.promote_types(v.dtype, torch.float32)
        K = v.shape[1] // grad.shape[0]
        R = grad.shape[2] // K
        dy = grouped(grad.to(v.dtype).unsqueeze(3), K)[0]
        scaled = q if second is None else torch.stack([q[0], q[1] * second])
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        d_second = None if second is None else torch.empty_like(second, dtype=wide)
        for block, start in enumerate(range(0, T, BLOCK)):
            end = min(T, start + BLOCK)
            rows, seen = slice(R * start, R * end), slice(0, end)
            probabilities = kept[len(q) * block : len(q) * (block + 1)]
            dv[0, :, seen] += combined(probabilities, second, rows).mT @ dy[:, rows]
            d_map = dy[:, rows] @ v[0, :, seen].mT
            if second is not None:
                d_second[:, rows] = (d_map * probabilities[1]).sum(-1, keepdim=True, dtype=wide)
            for stream, p in enumerate(probabilities):
                d_scores = torch._softmax_backward_data(d_map, p, -1, p.dtype)
                dq[stream, :, rows] = d_scores @ k[stream, :, seen]
                dk[stream, :, seen] += d_scores.mT @ scaled[stream, :, rows]
        if second is not None:
            dq[1] *= second
            d_second = d_second.view(-1, K, T, R).sum((0, 2)).flatten()
        dq, dk, dv = ungrouped(dq, K, T) * ctx.scale, ungrouped(dk, K, T), ungrouped(dv, K, T)[..., 0, :]
        return dq, dk, dv, d_second, None


def grouped(x, K: int):
    """(B, T, R K, streams, d) -> (streams, B K, T R, d): the rows of one kv head side by side, position by position."""
    return x.unflatten(2, (K, -1)).permute(4, 0, 2, 1, 3, 5).flatten(1, 2).flatten(2, 3)


def ungrouped(x, K: int, T: int):
    """The inverse of `grouped`."""
    return x.unflatten(2, (T, -1)).unflatten(1, (-1, K)).permute(1, 3, 2, 4, 0, 5).flatten(2, 3)


def combined(probabilities, second, rows):
    """A1, or A1 + second A2: the map that v is multiplied with."""
    return probabilities[0] if second is None else torch.addcmul(*probabilities, second[:, rows])
