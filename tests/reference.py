"""Independent references: Nova in float64 numpy loops, and the attention of the first Nova script as an oracle.

Nothing here shares code with model.py: rotary positions are complex multiplications, attention is one softmax per query
and head, no SDPA, no batching of heads.
"""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def block_matrices(s) -> dict[str, tuple[int, int]]:
    """{name in its layer: shape} of the matrices that Muon orthogonalises."""
    d, D, maps = s.d_model, s.d_model // s.n_heads, s.n_heads * (2 if s.attention == "diff_v2" else 1)
    return {
        "attn.qkv.weight": ((maps + 2 * s.n_kv_heads) * D, d),
        "attn.o_proj.weight": (d, d),
        "ffn.gate.weight": (s.ffn_hidden, d),
        "ffn.up.weight": (s.ffn_hidden, d),
        "ffn.down.weight": (d, s.ffn_hidden),
    }


def counts(s) -> dict[str, int]:
    """Parameters by kind, from the formula."""
    d, V, H = s.d_model, s.padded_vocab_size, s.n_heads
    v2, diff = s.attention == "diff_v2", s.attention == "diff"
    vectors = 2 * d + (3 if diff else 2) * d // H + H * (diff + s.head_gate) + (2 * d if s.layer_scale else 0)
    return {
        "embedding": V * d,
        "head": 0 if s.tie_embeddings else V * d,
        "block": s.n_layers * sum(m * n for m, n in block_matrices(s).values()),
        "gate": s.n_layers * d * H * (v2 + s.attn_gate),
        "vector": s.n_layers * vectors + d,
    }


def to_numpy(state: dict) -> dict:
    return {name: t.detach().double().cpu().numpy() for name, t in state.items()}


def rms(x, scale=1.0):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rope(x, theta, first=0):
    """x (T, dim): channels (j, j + dim/2) are one complex number, turned by position * theta^(-2j/dim)."""
    T, dim = x.shape
    z = x[:, : dim // 2] + 1j * x[:, dim // 2 :]
    for t in range(T):
        z[t] *= np.exp(1j * (first + t) * theta ** (-np.arange(0, dim, 2) / dim))
    return np.concatenate([z.real, z.imag], -1)


def attend(q, k, v):
    """Causal softmax attention of one map, (T, dim) each; also returns nothing of the future."""
    out = np.zeros((len(q), v.shape[1]))
    for t in range(len(q)):
        score = k[: t + 1] @ q[t] / math.sqrt(q.shape[1])
        weight = np.exp(score - score.max())
        out[t] = (weight / weight.sum()) @ v[: t + 1]
    return out


def attention(w, prefix, x, s, layer, first=0, form=None):
    """One layer's attention on x (T, d_model), normed. form "seed": the first script's, see SeedAttention."""
    form = form or s.attention
    H, K, D = s.n_heads, s.n_kv_heads, s.d_model // s.n_heads
    maps = 2 * H if form == "diff_v2" else H
    rows = x @ w[prefix + "qkv.weight"].T
    q, k, v = rows[:, : maps * D], rows[:, maps * D : (maps + K) * D], rows[:, (maps + K) * D :]
    q_scale, k_scale = w[prefix + "q_norm.scale"], w[prefix + "k_norm.scale"]
    lambda_0 = 0.8 - 0.6 * math.exp(-0.3 * layer) if s.diff_lambda_init is None else s.diff_lambda_init
    heads = []
    for h in range(H):
        g = h // (H // K)
        head = lambda array, i: array[:, i * D : (i + 1) * D]  # noqa: E731
        key, value = head(k, g), head(v, g)
        if form == "diff":
            half, y = D // 2, []
            for part in (slice(0, half), slice(half, D)):
                qs = rope(rms(head(q, h)[:, part], q_scale[part]), s.rope_theta, first)
                ks = rope(rms(key[:, part], k_scale[part]), s.rope_theta, first)
                y.append(attend(qs, ks, value))
            y = y[0] - w[prefix + "diff_lambda"][h] * y[1]
            y = (1 - lambda_0) * rms(y, w[prefix + "h_norm.scale"])
        else:
            turn = lambda map, scale: rope(rms(map, scale), s.rope_theta, first)  # noqa: E731
            kr = turn(key, k_scale)
            if form == "seed":
                qr, half = turn(head(q, h), q_scale), D // 2
                y1 = attend(qr[:, :half], kr[:, :half], value[:, :half])
                y2 = attend(qr[:, half:], kr[:, half:], value[:, half:])
                y = np.concatenate([y1, w[prefix + "diff_lambda"][h] * y2], -1)
                y = (1 - lambda_0) * rms(y, w[prefix + "h_norm.scale"])
            elif form == "standard":
                y = attend(turn(head(q, h), q_scale), kr, value)
            else:
                y1, y2 = (attend(turn(head(q, 2 * h + i), q_scale), kr, value) for i in (0, 1))
                y = y1 - sigmoid(x @ w[prefix + "lambda_proj.weight"][h])[:, None] * y2
        if prefix + "head_gate" in w:
            y = y * w[prefix + "head_gate"][h]
        if prefix + "gate_proj.weight" in w:
            y = y * sigmoid(x @ w[prefix + "gate_proj.weight"][h])[:, None]
        heads.append(y)
    return np.concatenate(heads, -1) @ w[prefix + "o_proj.weight"].T


def logits(w, ids, s, first=0):
    """ids (B, T) -> logits (B, T, vocab_size), the whole model. `first`: position of the first token."""
    out = []
    for row in ids:
        x = w["embed.weight"][row]
        for i in range(s.n_layers):
            p = f"layers.{i}."
            scale = lambda name, p=p: w.get(p + name, 1.0)  # noqa: E731
            y = attention(w, p + "attn.", rms(x, w[p + "attn_norm.scale"]), s, i, first)
            x = x + scale("ls_a") * y
            y = rms(x, w[p + "ffn_norm.scale"])
            gate = y @ w[p + "ffn.gate.weight"].T
            y = (gate * sigmoid(gate) * (y @ w[p + "ffn.up.weight"].T)) @ w[p + "ffn.down.weight"].T
            x = x + scale("ls_f") * y
        head = w.get("lm_head.weight", w["embed.weight"])[: s.vocab_size]
        z = rms(x, w["norm.scale"]) @ head.T
        out.append(s.logit_softcap * np.tanh(z / s.logit_softcap) if s.logit_softcap else z)
    return np.stack(out)


def cross_entropy(z, targets, z_loss=0.0):
    """(sum over valid targets of -log p + z_loss * logsumexp^2, -log p of each or 0), from logits (…, V)."""
    top = z.max(-1, keepdims=True)
    lse = (np.log(np.exp(z - top).sum(-1, keepdims=True)) + top)[..., 0]
    valid = targets >= 0
    chosen = np.take_along_axis(z, np.maximum(targets, 0)[..., None], -1)[..., 0]
    loss = np.where(valid, lse - chosen, 0.0)
    return loss.sum() + z_loss * (lse**2 * valid).sum(), loss


class SeedAttention(nn.Module):
    """The attention of the first Nova script, operation by operation (NovaAttention.forward), as an oracle only.

    It rotates the whole head and then splits it, so each rotated pair lies across the two streams and scores depend on
    absolute positions; it splits v as well; and it concatenates A1 v1 with lambda A2 v2 where the paper subtracts.
    """

    def __init__(self, s):
        super().__init__()
        self.H, self.K, self.D = s.n_heads, s.n_kv_heads, s.head_dim
        self.theta = s.rope_theta
        self.qkv = nn.Linear(s.d_model, (self.H + 2 * self.K) * self.D, bias=False)
        self.o_proj = nn.Linear(self.H * self.D, s.d_model, bias=False)
        for name in ("q_norm", "k_norm", "h_norm"):
            self.register_module(name, nn.Module())
            getattr(self, name).scale = nn.Parameter(torch.ones(self.D))
        self.diff_lambda = nn.Parameter(torch.full((self.H,), 0.8))
        self.head_gate = nn.Parameter(torch.ones(self.H))

    def forward(self, x, keep, first=0):
        """x (B, L, d_model) normed, keep = 1 - lambda_0, positions from `first` on."""
        B, L, _ = x.shape
        H, K, D, half = self.H, self.K, self.D, self.D // 2
        q, k, v = self.qkv(x).split([H * D, K * D, K * D], -1)
        q, k, v = q.view(B, L, H, D), k.view(B, L, K, D), v.view(B, L, K, D)
        q = F.rms_norm(q, (D,), self.q_norm.scale, 1e-6)
        k = F.rms_norm(k, (D,), self.k_norm.scale, 1e-6)
        frequency = 1.0 / (self.theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D))
        angle = torch.outer(torch.arange(first, first + L, dtype=torch.float32), frequency)
        c, s = (torch.cat([t, t], -1)[None, :, None] for t in (angle.cos(), angle.sin()))
        turn = lambda t: torch.cat([-t[..., half:], t[..., :half]], -1)  # noqa: E731
        q, k = (t * c + turn(t) * s for t in (q, k))
        k, v = (t.repeat_interleave(H // K, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        call = lambda part: F.scaled_dot_product_attention(  # noqa: E731
            q[..., part].to(v.dtype), k[..., part].to(v.dtype), v[..., part], is_causal=True
        )
        y = torch.cat([call(slice(0, half)), self.diff_lambda.view(1, H, 1, 1) * call(slice(half, D))], -1)
        y = F.rms_norm(y, (D,), self.h_norm.scale, 1e-6) * keep * self.head_gate.view(1, H, 1, 1)
        return self.o_proj(y.transpose(1, 2).reshape(B, L, -1).to(x.dtype))
