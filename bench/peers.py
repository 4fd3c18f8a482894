"""What Nova is measured against: compact implementations of our own, with nothing of Nova in them.

    GPT       nanoGPT's model and recipe (github.com/karpathy/nanoGPT): GPT-2 with learned positions, GELU, LayerNorm
              without bias, tied head; AdamW. Checked by GPT-2's published 124,439,808 parameters.
    Seed      the arithmetic of the single-file script that Nova grew from, ported straight: two half-width attention
              calls, repeated K and V, logits whole. Checked by its 8,171,097,408 parameters.
    Encoder   torch.nn.TransformerEncoder with a causal mask: what the PyTorch tutorials would make of it.
    Trainer   one optimizer step of any of them, in fp32 or under bf16 autocast.
    Loaders   nanoGPT's memory-mapped random windows; a torch DataLoader over the same shards.
    RepeatMuon  sharded Muon the short way: every rank gathers every matrix and orthogonalises all of them.

AdamW is the fused one everywhere, also where the original takes the slower loop on a CPU: the peer gets the best case.
"""

import importlib
import math
import os
import sys
from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def causal(q, k, v):
    """Causal attention of (B, heads, T, channels) tensors."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class GPTBlock(nn.Module):
    """Pre-norm GPT-2 block, (B, T, d) in and out."""

    def __init__(self, d: int, heads: int, bias: bool):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d, bias=bias), nn.LayerNorm(d, bias=bias)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=bias), nn.Linear(d, d, bias=bias)
        self.fc, self.out = nn.Linear(d, 4 * d, bias=bias), nn.Linear(4 * d, d, bias=bias)

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(causal(q, k, v).transpose(1, 2).reshape(B, T, d))
        return x + self.out(F.gelu(self.fc(self.norm2(x))))


class GPT(nn.Module):
    """nanoGPT's GPT-2. forward(ids (B, T), targets (B, T)) -> mean loss; without targets -> logits (B, T, V)."""

    def __init__(self, vocab: int, d: int, layers: int, heads: int, context: int, bias=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(GPTBlock(d, heads, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(d, bias=bias)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # GPT-2's: 0.02, less on the two projections into the residual
                residual = name.endswith(("proj.weight", "out.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits if targets is None else mean_loss(logits, targets)


def mean_loss(logits, targets):
    """Mean cross-entropy of logits (B, T, V) against targets (B, T), -1 ignored; the logits exist whole."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Encoder(nn.Module):
    """torch.nn.TransformerEncoder as a language model; same sizes as GPT, so the same parameters plus biases."""

    def __init__(self, vocab: int, d: int, layers: int, heads: int, context: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(context, d)
        options = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, **options)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(d), enable_nested_tensor=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets=None):
        T = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=ids.device)
        x = self.body(self.tokens(ids) + self.positions.weight[:T], mask=mask, is_causal=True)
        logits = F.linear(x, self.tokens.weight)
        return logits if targets is None else mean_loss(logits, targets)


class Scale(nn.Module):
    """The seed's RMSNorm over the last axis."""

    def __init__(self, n: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return F.rms_norm(x, self.scale.shape, self.scale, 1e-6)


class SeedBlock(nn.Module):
    """The seed's block: attention out = cat[A1 v1, lambda A2 v2], rotated across both halves; SwiGLU; LayerScale."""

    def __init__(self, d: int, layers: int, heads: int, kv_heads: int, ffn: int):
        super().__init__()
        self.heads, self.kv, self.hd = heads, kv_heads, d // heads
        self.qkv = nn.Linear(d, (heads + 2 * kv_heads) * self.hd, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, ffn, bias=False), nn.Linear(d, ffn, bias=False)
        self.down = nn.Linear(ffn, d, bias=False)
        self.attn_norm, self.ffn_norm = Scale(d), Scale(d)
        self.q_norm, self.k_norm, self.h_norm = Scale(self.hd), Scale(self.hd), Scale(self.hd)
        self.ls_a, self.ls_f = nn.Parameter(torch.full((d,), 0.1)), nn.Parameter(torch.full((d,), 0.1))
        self.diff_lambda, self.head_gate = (nn.Parameter(torch.full((heads,), v)) for v in (0.8, 1.0))
        for linear in (self.qkv, self.gate, self.up):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (self.o_proj, self.down):
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers))

    def rotate(self, x, cos, sin):
        """x (B, T, heads, hd), fp32 rotation of the channel pairs (j, j + hd/2), as the seed wrote it."""
        a, b = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)

    def attend(self, x, cos, sin):
        B, T, d = x.shape
        sizes = [self.heads * self.hd, self.kv * self.hd, self.kv * self.hd]
        q, k, v = (t.view(B, T, -1, self.hd) for t in self.qkv(x).split(sizes, -1))
        q, k = self.rotate(self.q_norm(q), cos, sin), self.rotate(self.k_norm(k), cos, sin)
        q = q.transpose(1, 2)
        k, v = (t.transpose(1, 2).repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        (q1, q2), (k1, k2), (v1, v2) = (t.chunk(2, -1) for t in (q, k, v))
        y1, y2 = causal(q1, k1, v1), causal(q2, k2, v2)
        y = torch.cat([y1, self.diff_lambda.view(1, -1, 1, 1).to(y1.dtype) * y2], -1)
        y = self.h_norm(y) * 0.2 * self.head_gate.view(1, -1, 1, 1).to(y.dtype)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, d))

    def forward(self, x, cos, sin):
        x = x + self.ls_a * self.attend(self.attn_norm(x), cos, sin)
        h = self.ffn_norm(x)
        return x + self.ls_f * self.down(F.silu(self.gate(h)) * self.up(h))


class Seed(nn.Module):
    """The seed's model. forward(ids, targets) shifts inside, as the seed does: position t is scored on targets t+1."""

    def __init__(self, vocab, d, layers, heads, kv_heads, ffn, context, tied=True):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(SeedBlock(d, layers, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = Scale(d)
        self.lm_head = None if tied else nn.Linear(d, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        hd = d // heads
        frequencies = 1.0 / (500_000.0 ** (torch.arange(0, hd, 2, dtype=torch.float32) / hd))
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    def forward(self, ids, targets=None):
        T = ids.shape[1]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:, :T], self.sin[:, :T])
        logits = F.linear(self.norm(x), self.embed.weight if self.lm_head is None else self.lm_head.weight)
        logits = 50.0 * torch.tanh(logits / 50.0)
        return logits if targets is None else mean_loss(logits[:, :-1], targets[:, 1:])


class SeedMuon(torch.optim.Optimizer):
    """The seed's Muon on whole matrices: one after the other, Keller Jordan's coefficients, bf16."""

    def __init__(self, params, lr=6e-3, momentum=0.95, weight_decay=0.1):
        super().__init__(list(params), dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buf", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                G = p.grad.add(buffer, alpha=group["momentum"])
                X = (G.T if G.shape[0] > G.shape[1] else G).bfloat16()
                X = X / (X.norm() + 1e-7)
                for _ in range(5):
                    A = X @ X.T
                    X = 3.4445 * X + (-4.7750 * A + 2.0315 * (A @ A)) @ X
                X = X.T if G.shape[0] > G.shape[1] else X
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(X.to(p.dtype), alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


def adamw(params, lr, betas, decay=0.1):
    """AdamW as nanoGPT groups it: decay on matrices and embeddings, none on vectors."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


class Trainer:
    """One contender: `micro` is forward and backward of a micro-batch, `update` clips and steps the optimizers."""

    def __init__(self, model: nn.Module, optimizers: list, bf16: bool):
        self.model, self.optimizers, self.bf16 = model, optimizers, bf16

    def loss(self, x, y):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            return self.model(x, y)

    def micro(self, x, y):
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(x, y)
        loss.backward()
        return loss

    def update(self, share: float = 1.0):
        """Clip to norm 1 and step, every rate at `share` of its peak."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * share
            optimizer.step()

    @torch.no_grad()
    def evaluate(self, x, y) -> float:
        parts = zip(x.split(50), y.split(50), strict=True)
        return sum(self.loss(a, b).item() * len(a) for a, b in parts) / len(x)


def by_character(kind, vocab, d, layers, heads, context, bf16=False) -> Trainer:
    """A model with nanoGPT's character-level recipe: AdamW 1e-3, betas 0.9, 0.99, decay 0.1, clip 1."""
    model = kind(vocab, d, layers, heads, context)
    return Trainer(model, [adamw(model.parameters(), 1e-3, (0.9, 0.99))], bf16)


nanogpt, encoder = partial(by_character, GPT), partial(by_character, Encoder)


def seed(vocab, d, layers, heads, kv_heads, ffn, context, bf16=False) -> Trainer:
    """The seed's model and optimizers; its Muon as it would run if its sharded gradients were matrices. In bf16 the
    parameters are bf16 too, as in the seed (`model.to(bf16)` under autocast)."""
    model = Seed(vocab, d, layers, heads, kv_heads, ffn, context)
    model = model.bfloat16() if bf16 else model
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return Trainer(model, [SeedMuon(matrices), adamw(rest, 2e-4, (0.9, 0.95))], bf16)


def gpt_schedule(step: int, steps: int, warmup=100, floor=0.1) -> float:
    """nanoGPT's share of the peak rate: linear warm-up, then cosine to a tenth."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def window_loader(path: str, batch: int, context: int):
    """nanoGPT's scheme over one binary uint16 file: map it anew for each batch, draw random windows, stack them."""
    generator = torch.Generator().manual_seed(0)

    def next_batch():
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        starts = torch.randint(len(tokens) - context, (batch,), generator=generator).tolist()
        x = torch.stack([torch.from_numpy(tokens[i : i + context].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + context].astype(np.int64)) for i in starts])
        return x, y

    return next_batch


class Rows(torch.utils.data.Dataset):
    """The rows of .npy shards (n, T), memory-mapped, one tensor a row."""

    def __init__(self, paths: list[str]):
        self.shards = [np.load(p, mmap_mode="r") for p in paths]
        self.ends = np.cumsum([len(s) for s in self.shards])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, i):
        s = int(np.searchsorted(self.ends, i, side="right"))
        row = self.shards[s][i - self.ends[s] + len(self.shards[s])]
        return torch.from_numpy(row.astype(np.int64))


def torch_loader(paths: list[str], batch: int):
    """An endless shuffled torch DataLoader, in this process."""
    loader = torch.utils.data.DataLoader(Rows(paths), batch_size=batch, shuffle=True, drop_last=True)
    batches = (b for _ in iter(int, 1) for b in loader)
    return partial(next, batches)


class RepeatMuon(torch.optim.Optimizer):
    """Sharded Muon where every rank gathers every matrix, orthogonalises all of them, and keeps its own rows."""

    def __init__(self, params, orthogonalize, lr=4e-4, momentum=0.95, weight_decay=0.1):
        super().__init__(list(params), dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.orthogonalize = orthogonalize
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p]["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"]).bfloat16().full_tensor()
                update = self.orthogonalize(update) * (0.2 * math.sqrt(max(p.shape)))
                mine = update.chunk(p.device_mesh.size())[p.device_mesh.get_local_rank()].to(p.dtype)
                local = p.to_local()
                local.mul_(1 - group["lr"] * group["weight_decay"])
                local.add_(mine, alpha=-group["lr"])


def first_step(seeds: bool):
    """What a run of nanoGPT, or of the seed (without its self-tests), does up to the end of its first step."""
    if seeds:  # the seed imports all of these at the top of its file
        for name in ("bitsandbytes", "huggingface_hub", "torch.distributed.fsdp", "torchao.float8"):
            importlib.import_module(name)
    trainer = seed(65, 128, 4, 4, 2, 384, 64, bf16=True) if seeds else nanogpt(65, 128, 4, 4, 64)
    x = torch.randint(65, (12, 65), generator=torch.Generator().manual_seed(0))
    loss = trainer.micro(x[:, :-1], x[:, 1:])
    trainer.update()
    print(f"step 1 loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    first_step("seed" in sys.argv[1:])
