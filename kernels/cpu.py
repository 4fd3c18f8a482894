"""Kernels for a CPU: norm, rotation and block attention as one function each, where torch composes many passes."""

import math

import torch
import torch.nn.functional as F

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
