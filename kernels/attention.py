"""Attention kernels: one causal call, and which kernel of a GPU is pinned for it, with the reason in the log."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cpu import BLOCK
from .precision import bad


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
