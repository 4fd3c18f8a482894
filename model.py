"""The Nova transformer: one flat, decoder-only stack with differential attention.

    x = embed(ids)
    x += ls_a * attn(norm(x));  x += ls_f * ffn(norm(x))      per block; LayerScale ls starts at 0.1
    logits = cap * tanh(head(norm(x)) / cap)                  in fp32, chunk by chunk inside the loss

Attention, for each of H heads of D channels; K key/value heads, head h reads kv head h // (H / K); A = softmax of causal
scores; n() = RMSNorm with a learned scale and rope() rotates pairs (j, j + dim/2), both *within each map*, so scores
depend on relative positions only:

    diff      y = gate (1 - l0) n((A1 - lambda A2) v),        A1, A2 from two streams of D/2, v of D      (2410.05258)
    diff_v2   y = gate (A1 v - sigmoid(w.x) A2 v),            A1, A2 from two query maps of D, one key map
    standard  y = gate A v

ffn(x) = down(silu(gate(x)) * up(x)). Names and sizes are those of the first Nova script; see `Attention` for what changed.

Precision: parameters are fp32 masters. FSDP2's policy hands bf16 copies to the blocks, so the residual stream, the
matmuls and the norms' outputs are bf16; the norms' sums, the rotation, softmax, soft-cap and cross-entropy are fp32 (a
CPU rounds scores and probabilities to bf16 between its products: kernels/cpu.py). A model that is not sharded
(sample.py, tests) computes in whatever dtype its parameters have.

A parameter is given its `Role` where it is made. Counts, FLOPs, the plan, the optimizer table and the first step's proof
are read from a model on the meta device: a change of architecture is an edit of this file (and of tests/reference.py).
"""

import functools
import hashlib
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import fsdp
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kernels
from kernels import BlockAttention, ModelError, bad, rms_norm, rotate, sdpa

EPS = 1e-6  # of every RMSNorm
INIT_ROWS = 128  # rows that one seed generates: a rank makes only the blocks that its shard touches


class Role(NamedTuple):
    """What a parameter is for: its kind decides who optimises it (muon.ROLES) and whether float8 may take it (blocks)."""

    kind: str  # one of KINDS
    mean: float = 0.0  # initial values: normal, or all `mean` where std is 0
    std: float = 0.0
    rows: tuple[int, ...] = ()  # of a block: heights of the row blocks that Muon orthogonalises apart


KINDS = ("embedding", "head", "block", "gate", "vector")


class Linear(nn.Linear):
    """A matrix (n_out, n_in) without bias. "block": Muon's; "gate": a small projection that starts at zero, so that its
    sigmoid starts at a half; "head": the output."""

    def __init__(self, n_in: int, n_out: int, kind: str = "block", std: float = 0.02, rows: tuple = ()):
        super().__init__(n_in, n_out, bias=False)
        self.weight.role = Role(kind, std=std, rows=(rows or (n_out,)) if kind == "block" else ())


def vector(size: int, value: float) -> nn.Parameter:
    """A 1-D parameter that starts at `value`."""
    p = nn.Parameter(torch.full((size,), value))
    p.role = Role("vector", mean=value)
    return p


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.scale = vector(dim, 1.0)

    def forward(self, x):
        return rms_norm(x, self.scale, EPS)


def rope_tables(dim: int, length: int, theta: float, device=None):
    """cos | cos and -sin | sin of position * theta^(-2j/dim), each (length, dim): fp32, from float64 angles."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat([cos, cos], -1).to(device), torch.cat([-sin, sin], -1).to(device)


def lambda_start(s, layer: int) -> float:
    """lambda_0 of attention="diff": the paper's value by depth, unless set."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer) if s.diff_lambda_init is None else s.diff_lambda_init


def into_stream(settings) -> float:
    """std of the projections into the residual stream: it shrinks with depth, as GPT-2's and the first Nova script's."""
    return 0.02 / math.sqrt(2 * settings.n_layers)


class Attention(nn.Module):
    """The three forms of the file's docstring. qkv.weight holds the rows q | k | v; under "diff" a head's D rows of q
    and of k are its two streams of D/2, as in the first Nova script. That script rotated pairs across the two streams
    (scores then depended on absolute positions), split v too, and never subtracted."""

    def __init__(self, s, layer: int):
        super().__init__()
        self.form, self.H, self.K, self.D = s.attention, s.n_heads, s.n_kv_heads, s.head_dim
        self.streams = 2 if self.form == "diff" else 1
        self.kernel = None  # choose_attention's answer; None: by the device
        query_maps = 2 * self.H if self.form == "diff_v2" else self.H
        self.rows = (query_maps * self.D, self.K * self.D, self.K * self.D)  # q | k | v
        blocks, height = self.rows, self.D // self.streams
        if s.muon_split_heads:  # every map of q and k, and every head of v, is orthogonalised by itself
            blocks = (height,) * ((self.rows[0] + self.rows[1]) // height) + (self.D,) * self.K
        self.qkv = Linear(s.d_model, sum(self.rows), rows=blocks)
        self.o_proj = Linear(self.H * self.D, s.d_model, std=into_stream(s))
        self.q_norm, self.k_norm = RMSNorm(self.D), RMSNorm(self.D)
        if self.form == "diff":
            self.h_norm = RMSNorm(self.D)
            self.diff_lambda = vector(self.H, lambda_start(s, layer))
        elif self.form == "diff_v2":
            self.lambda_proj = Linear(s.d_model, self.H, "gate", std=0.0)
        self.head_gate = vector(self.H, 1.0) if s.head_gate else None
        self.gate_proj = Linear(s.d_model, self.H, "gate", std=0.0) if s.attn_gate else None

    def products(self, T: int) -> int:
        """Multiplications of one token's scores and values in a sequence of T, see flops_per_token."""
        maps = self.rows[0] // self.D * self.streams
        return maps * T * (self.D // self.streams + self.D)

    def forward(self, x, cos, sin, keep, cache=None):
        """x (B, T, d_model), normed; cos, sin (T, D/streams) fp32; keep = 1 - lambda_0, 0-dim fp32; cache(k, v) returns
        those of all positions so far (sample.py)."""
        B, T, _ = x.shape
        q, k, v = self.qkv(x).split(self.rows, -1)
        q = self.position(q, self.q_norm.scale, cos, sin)  # (B, T, query maps, streams, D/streams)
        k = self.position(k, self.k_norm.scale, cos, sin)
        v = v.view(B, T, self.K, self.D)
        if cache is not None:
            k, v = cache(k, v)
        kernel = self.kernel or ("blocks" if x.device.type == "cpu" else "padded")
        if kernel == "blocks" and cache is None:
            second = -self.diff_lambda if self.form == "diff" else None
            y = BlockAttention.apply(q, k, v, second, (self.D // self.streams) ** -0.5)
        elif self.form == "diff":
            y1, y2 = self.two_streams(q, k, v, kernel == "wide")
            y = y1 - self.diff_lambda[:, None] * y2
        else:
            q, k, v = (t.transpose(1, 2) for t in (q.flatten(3), k.flatten(3), v))
            y = sdpa(q, k, v, self.D**-0.5).transpose(1, 2)  # (B, T, query maps, D)
        if self.form == "diff":
            y = rms_norm(y, self.h_norm.scale, EPS) * keep
        elif self.form == "diff_v2":  # maps 2h and 2h + 1 are head h's, and read the same kv head
            y = y[:, :, 0::2] - torch.sigmoid(self.lambda_proj(x)).unsqueeze(-1) * y[:, :, 1::2]
        if self.head_gate is not None:
            y = y * self.head_gate[:, None]
        if self.gate_proj is not None:
            y = y * torch.sigmoid(self.gate_proj(x)).unsqueeze(-1)
        return self.o_proj(y.flatten(2))  # (B, T, H, D) -> (B, T, d_model)

    def position(self, x, scale, cos, sin):
        """QK-norm and rotary position of every map by itself: (B, T, n*D) -> (B, T, n, streams, D/streams)."""
        maps = x.unflatten(-1, (-1, self.streams, self.D // self.streams))
        return rotate(rms_norm(maps, scale.view(self.streams, -1), EPS), cos, sin)

    def two_streams(self, q, k, v, wide: bool):
        """A1 v and A2 v, each (B, T, H, D), from q, k (B, T, heads, 2, D/2) and v (B, T, K, D)."""
        scale = (self.D // 2) ** -0.5
        if wide:  # one call; heads are ordered (kv head, stream, query head of the group)
            B, T = q.shape[:2]
            q = q.unflatten(2, (self.K, -1)).permute(0, 2, 4, 3, 1, 5).flatten(1, 3)  # (B, 2H, T, D/2)
            k = k.permute(0, 2, 3, 1, 4).flatten(1, 2)  # (B, 2K, T, D/2)
            v = v.transpose(1, 2).repeat_interleave(2, 1)  # (B, 2K, T, D)
            y = sdpa(q, k, v, scale).unflatten(1, (self.K, 2, -1))  # (B, K, 2, H/K, T, D)
            return tuple(y[:, :, i].flatten(1, 2).transpose(1, 2) for i in (0, 1))
        # With the other stream's keys at zero, a whole query head (q1 | q2) scores q1.k1 or q2.k2: any kernel will do,
        # and neither q nor v is copied. V in halves costs the same FLOPs and twice the softmax.
        q, v = q.flatten(3).transpose(1, 2), v.transpose(1, 2)
        k1, k2 = F.pad(k[..., 0, :], (0, self.D // 2)), F.pad(k[..., 1, :], (self.D // 2, 0))
        return tuple(sdpa(q, key.transpose(1, 2), v, scale).transpose(1, 2) for key in (k1, k2))


class SwiGLU(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.gate = Linear(s.d_model, s.ffn_hidden)
        self.up = Linear(s.d_model, s.ffn_hidden)
        self.down = Linear(s.ffn_hidden, s.d_model, std=into_stream(s))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer. `forward` is what FSDP hooks; `body` is what is compiled and recomputed, so names never change."""

    def __init__(self, s, layer: int):
        super().__init__()
        self.attn_norm, self.ffn_norm = RMSNorm(s.d_model), RMSNorm(s.d_model)
        self.attn, self.ffn = Attention(s, layer), SwiGLU(s)
        self.ls_a, self.ls_f = (vector(s.d_model, s.layer_scale) if s.layer_scale else None for _ in range(2))
        self.checkpointing = s.activation_checkpointing
        self.ffn_hidden = s.ffn_hidden
        self.run = self.body  # or its compiled form, see compile_blocks

    def forward(self, x, cos, sin, keep, *cache):
        """x (B, T, d_model) -> the same; the tables are fp32 and must not be cast."""
        return self.run(x, cos, sin, keep, *cache)

    def body(self, *inputs):
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self.layer(*inputs)
        context = {}
        if self.checkpointing == "selective":
            policy = functools.partial(save_policy, self.ffn_hidden)
            context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
        return checkpoint(self.layer, *inputs, use_reentrant=False, preserve_rng_state=False, **context)

    def layer(self, x, cos, sin, keep, *cache):
        x = self.add(x, self.ls_a, self.attn(self.attn_norm(x), cos, sin, keep, *cache))
        return self.add(x, self.ls_f, self.ffn(self.ffn_norm(x)))

    @staticmethod
    def add(x, scale, branch):
        return x + branch if scale is None else torch.addcmul(x, scale, branch)


FORMS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
NAMES = ("mm", "_scaled_mm", *(f"_scaled_dot_product_{form}" for form in FORMS))
EXPENSIVE = {getattr(torch.ops.aten, name).default for name in NAMES}


def save_policy(ffn_hidden: int, context, operation, *inputs, **kwargs):
    """Selective checkpointing: keep attention and the narrow matmuls, about 6.5 d_model values a token; the rest, a ninth
    of the step's FLOPs, is made again. So is a CPU's attention: its products are many small ones."""
    if operation in EXPENSIVE and not (inputs[1].ndim == 2 and inputs[1].shape[-1] == ffn_hidden):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def rows_loss(logits, targets, vocab: int, cap: float, z_loss: float, training: bool):
    """Of logits (n, padded vocab), which are overwritten, and targets (n,): cross-entropy (n,), 0 where ignored, and the
    sum of the z-loss, both fp32; the gradient (n, padded vocab) in the logits' dtype, None unless training. The target's
    own entry is made apart, so that a compiler has nothing in between to store."""
    dtype, valid, target = logits.dtype, targets >= 0, targets.clamp(min=0)[:, None]
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    if cap:
        tanh = logits.div_(cap).tanh_()
        logits = tanh * cap
        slope = tanh.square_().neg_().add_(1)
    logits[:, vocab:] = -math.inf  # padded ids have no probability
    lse = logits.logsumexp(1)
    loss = (lse - logits.gather(1, target)[:, 0]) * valid
    regulariser = z_loss * (lse.square() * valid).sum() if z_loss else None
    if not training:
        return loss, regulariser, None
    grad = logits.sub_(lse[:, None]).exp_()  # probabilities
    if z_loss:
        grad.mul_((1 + 2 * z_loss * lse)[:, None])
    own = grad.gather(1, target) - 1
    if cap:
        own, grad = own * slope.gather(1, target), grad.mul_(slope)
    grad, own = grad.mul_(valid[:, None]).to(dtype), own * valid[:, None]
    return loss, regulariser, grad.scatter_(1, target, own.to(dtype))


class SoftcapCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropy(cap * tanh(x W^T / cap)) + z_loss * logsumexp^2, without the (tokens, vocab) logits.

    Gradients are made chunk by chunk in forward, where the chunk's probabilities are at hand: at V 65,536 less time
    than the whole loss and a tenth of its memory. dW is summed in fp32. torch's linear_cross_entropy does not serve: no
    soft-cap, a loss in the input's dtype (bf16: 11.06 where fp32 gives 11.14), several times slower in chunks.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab, cap, z_loss, chunk, rows_loss=rows_loss):
        """x (N, d), weight (padded vocab, d), targets (N,), -1 ignored -> loss sum (), cross-entropy (N,); fp32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        training = dx is not None or dw is not None
        total = torch.zeros((), dtype=wide, device=x.device)
        token_loss = torch.empty(x.shape[0], dtype=wide, device=x.device)
        for start in range(0, x.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits, own = F.linear(x[rows], weight), targets[rows]
            token_loss[rows], regulariser, grad = rows_loss(logits, own, vocab, cap, z_loss, training)
            total += token_loss[rows].sum()
            if z_loss:
                total += regulariser
            if dx is not None:
                dx[rows] = grad @ weight
            if dw is not None:
                dw += grad.t() @ x[rows]
            del logits, grad  # or the next chunk's logits would lie beside them
        ctx.save_for_backward(dx, dw)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(token_loss)
        return total, token_loss

    @staticmethod
    def backward(ctx, scale, _):
        dx, dw = ctx.saved_tensors
        # scale is 1 / tokens: rounded to bf16 it would change every gradient of the blocks by up to 0.4 %
        dx = None if dx is None else (dx.to(scale.dtype) * scale).to(dx.dtype)
        dw = None if dw is None else (dw * scale).to(ctx.weight_dtype)
        return dx, dw, None, None, None, None, None, None


class Nova(nn.Module):
    """The whole model, on the current device, with torch's initial weights until `init_weights`.

    The first loss is ln V at every width. Tied: a token's own logit is d * std after the final norm, so std 1/d makes it
    1 (0.02 at d 4096 starts at a loss of 46). Untied: logits of std 0.2, small, but not zero, which would starve the
    body of its first gradient. The stream starts as small as the embedding, and stays so on purpose: every block reads
    it through a norm, and a norm after the embedding would drown the branches (LayerScale 0.1): 0.3 nats worse after 300
    steps of a quickstart model."""

    def __init__(self, settings):
        super().__init__()
        self.settings = s = settings
        if s.vocab_size is None:
            raise bad(s, "vocab_size", "is not known: set it, or read it from the data's metadata.json")
        self.embed = nn.Embedding(s.padded_vocab_size, s.d_model)
        self.embed.weight.role = Role("embedding", std=1 / s.d_model if s.tie_embeddings else 0.02)
        self.layers = nn.ModuleList(Block(s, i) for i in range(s.n_layers))
        self.norm = RMSNorm(s.d_model)
        self.lm_head = None
        if not s.tie_embeddings:
            self.lm_head = Linear(s.d_model, s.padded_vocab_size, "head", std=0.2 / math.sqrt(s.d_model))
        self.tables = None  # RoPE tables and 1 - lambda_0: see constants
        self.ids_checked = False
        self.fp8 = self.compiled = False  # set by convert_fp8 and compile_blocks
        self.rows_loss = rows_loss  # or its compiled form, see compile_blocks
        self.roles = {}  # Role by name: parameters themselves are replaced by fully_shard and to_empty
        for name, p in self.named_parameters():
            if not hasattr(p, "role"):
                raise ModelError(f"{name} has no role: make it with Linear(…) or vector(…), or set its .role")
            self.roles[name] = p.role

    def forward(self, ids, targets=None, caches=None):
        """ids (B, T) int64 -> logits (B, T, padded vocab) fp32, padded ids -inf; with targets (B, T), the *next* tokens,
        -1 ignored -> (loss sum (), the gradient's root; cross-entropy (B, T), detached, 0 where ignored), both fp32.

        caches: a sample.Cache per layer; ids then go on after the positions that these hold, one at a time."""
        self.check(ids, targets)
        s = self.settings
        cos, sin, keep = self.constants(ids.device)
        begin = caches[0].length if caches else 0
        if begin and ids.shape[1] > 1 or begin + ids.shape[1] > s.max_len:
            raise ModelError(f"ids {tuple(ids.shape)} after {begin} cached positions of at most {s.max_len}")
        cos, sin = (table[begin : begin + ids.shape[1]] for table in (cos, sin))
        x = self.embed(ids)  # (B, T, d_model)
        for i, block in enumerate(self.layers):
            x = block(x, cos, sin, keep[i], *([caches[i]] if caches else []))
        x = self.norm(x)
        head = self.embed.weight if self.lm_head is None else self.lm_head.weight
        if targets is None:
            logits = F.linear(x, head)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if s.logit_softcap:
                logits = s.logit_softcap * torch.tanh(logits / s.logit_softcap)
            logits[..., s.vocab_size :] = -math.inf
            return logits
        if (
            not torch.is_grad_enabled()
        ):  # a function's needs_input_grad does not know: evaluation would make dW
            head = head.detach()
        options = s.vocab_size, s.logit_softcap, s.z_loss, s.loss_chunk, self.rows_loss
        loss, token_loss = SoftcapCrossEntropy.apply(x.flatten(0, 1), head, targets.flatten(), *options)
        return loss, token_loss.view(targets.shape)

    def constants(self, device):
        """(cos, sin, [1 - lambda_0 of each layer]) in fp32. Plain tensors made on first use: they are no buffers, so
        neither .to(dtype) nor FSDP casts them, and to_empty has nothing to leave unset."""
        if self.tables is None or self.tables[0].device != device:
            s, streams = self.settings, self.layers[0].attn.streams
            with torch.inference_mode(False):  # tables made by a first call in inference mode could not train
                cos, sin = rope_tables(s.head_dim // streams, s.max_len, s.rope_theta, device)
                keep = torch.tensor([1 - lambda_start(s, i) for i in range(s.n_layers)], device=device)
                self.tables = cos, sin, keep.unbind()
        return self.tables

    def check(self, ids, targets):
        """Raise ModelError for inputs that do not fit, naming the setting."""
        s = self.settings
        if ids.ndim != 2 or ids.dtype != torch.int64 or 0 in ids.shape:
            raise ModelError(f"ids must be (B, T) int64, not {tuple(ids.shape)} {ids.dtype}")
        if ids.shape[1] > s.max_len:
            raise bad(s, "max_len", f"the sequence has {ids.shape[1]} tokens")
        if self.fp8 and torch.is_grad_enabled() and ids.numel() % 16:
            raise bad(s, "micro_batch", f"float8 needs a multiple of 16 tokens, not {ids.numel()}")
        if targets is not None and targets.shape != ids.shape:
            raise ModelError(f"targets {tuple(targets.shape)} must have the shape of ids {tuple(ids.shape)}")
        if ids.device.type == "cpu" or not self.ids_checked:  # on a GPU only once: it waits for the device
            self.ids_checked = True
            for what, t, lowest in (("ids", ids, 0), ("targets", targets, -1)):
                if t is not None and not t.is_meta:
                    low, high = (v.item() for v in t.aminmax())
                    if low < lowest or high >= s.vocab_size:
                        problem = f"{what} hold {low}..{high}, outside {lowest}..{s.vocab_size - 1}"
                        raise bad(s, "vocab_size", problem)


@torch.no_grad()
def init_weights(model, settings):
    """Fill the parameters. Rows come in blocks with a seed of (seed, name, block) each, so the weights are the same for
    every world size on one kind of device, and a rank generates only the blocks that its shard touches."""
    for name, p in model.named_parameters():
        role, local, layout = model.roles[name], kernels.local(p), kernels.Layout(p, name)
        start = sum(layout.heights(p.shape[0])[: layout.rank])
        if not role.std:
            local.fill_(role.mean)
            continue
        for block in range(start // INIT_ROWS, -(-(start + local.shape[0]) // INIT_ROWS)):
            key = hashlib.sha256(f"{settings.seed}/{name}/{block}".encode()).digest()
            generator = torch.Generator(local.device).manual_seed(int.from_bytes(key[:8]) >> 1)
            first = block * INIT_ROWS
            rows = torch.empty(min(INIT_ROWS, p.shape[0] - first), *p.shape[1:], device=local.device)
            rows.normal_(role.mean, role.std, generator=generator)
            low, high = max(first, start), min(first + rows.shape[0], start + local.shape[0])
            local[low - start : high - start] = rows[low - first : high - first]


def build_model(settings, mesh, device, log=print) -> Nova:
    """The initialised, sharded model, made in the one order that works: one rank takes the same path as a thousand.
    `mesh` is 1-D, or 2-D ("replicate", "shard") for HSDP."""
    s, device = settings, torch.device(device)
    chosen = kernels.choose(s, device)
    for reason in chosen["reasons"]:
        log(reason)
    kernel = kernels.choose_attention(s, device, log)
    model = on_meta(s)
    for block in model.layers:
        block.attn.kernel = kernel
    if chosen["fp8"]:
        kernels.convert_fp8(model, s, log)
    if chosen["compile"]:
        kernels.compile_blocks(model, s, log)
    # inputs as they are: the RoPE tables are fp32, and x is bf16 already
    dtypes = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    precision = fsdp.MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    offload = fsdp.OffloadPolicy()
    if s.cpu_offload:
        offload = fsdp.CPUOffloadPolicy(pin_memory=device.type == "cuda")
    policy = dict(mesh=mesh, mp_policy=precision, offload_policy=offload)
    for block in model.layers:
        fsdp.fully_shard(block, reshard_after_forward=s.reshard_after_forward, **policy)
    # The root group holds embedding, final norm and head together (tied modules must share a group), and its backward
    # follows its forward at once: nothing to free in between.
    fsdp.fully_shard(model, reshard_after_forward=False, **policy)
    model.to_empty(device="cpu" if s.cpu_offload else device)
    init_weights(model, s)
    return model


def compile_shapes(net, lengths: list[int], device):
    """One forward and backward of a micro-batch for each context length of the schedule, and the forwards of evaluation
    and samples: everything is compiled before the short timeouts begin. No parameter changes."""
    s = net.settings
    for length in lengths:
        ids = torch.zeros(s.micro_batch * s.max_len // length, length, dtype=torch.int64, device=device)
        loss, _ = net(ids, ids)
        loss.backward()
    net.zero_grad(set_to_none=True)
    net.eval()
    with torch.no_grad():  # whole rows, as val_batches and a padded sample have them
        ids = ids.new_zeros(s.micro_batch, s.max_len)
        net(ids, ids)
        net(ids[:1])
    back_to_training(net)


def back_to_training(net):
    """After forwards without a backward: parameters are the sharded ones again, which optimizers and saves know."""
    net.train()
    for module in net.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def on_meta(settings) -> Nova:
    """Names, shapes and roles without the memory: milliseconds at any size."""
    with torch.device("meta"):
        return Nova(settings)


def count_params(settings) -> dict[str, int]:
    """Parameters of each kind of role, and in total (a tied matrix counts once, as embedding)."""
    model, counts = on_meta(settings), dict.fromkeys(KINDS, 0)
    for name, p in model.named_parameters():
        counts[model.roles[name].kind] += p.numel()
    return counts | {"total": sum(counts.values())}


def muon_blocks(settings) -> list[tuple[int, int]]:
    """(rows, columns) of everything that Muon orthogonalises by itself."""
    model = on_meta(settings)
    return [(rows, p.shape[-1]) for name, p in model.named_parameters() for rows in model.roles[name].rows]


def flops_per_token(settings, T: int) -> float:
    """Matmul FLOPs of one token's forward and backward (twice the forward) in a sequence of T.

    nanoGPT's and torch.utils.flop_counter's convention: attention counts all T x T scores, although half are masked, so
    MFU figures compare with theirs. Recomputation and padding of heads do not count; embedding look-ups are free.
    """
    model = on_meta(settings)
    free = set() if settings.tie_embeddings else {"embed.weight"}
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name not in free)
    return 6.0 * (matrices + sum(m.products(T) for m in model.modules() if hasattr(m, "products")))
