"""Muon for sharded matrices, AdamW beside it.

Muon: momentum, then the nearest semi-orthogonal matrix as the update (Jordan et al., kellerjordan.github.io/posts/muon).
It needs whole matrices; FSDP2 leaves each rank with rows. The idea here: **every matrix is orthogonalised once, whole, by
one owner.** A bucket of matrices takes three phases:

    gather   momentum of the own rows; one uneven all-to-all takes all rows of a matrix to its owner
    owner    orthogonalises its matrices, in bf16
    scatter  one all-to-all takes the update's rows back; each rank applies them to its own fp32 rows

Buckets run as a pipeline: while one is orthogonalised, the next is gathered and the last one scattered. Under HSDP the
replicas take turns on buckets and broadcast the result. One process takes the same path, without the collectives.

Everything that is not a block matrix goes to AdamW: torch's, or bitsandbytes' 8-bit on each rank's own rows.
`build_optimizers` says which parameter goes where, and refuses what it has no rule for.

References: Polar Express 2505.16932, Moonlight (the 0.2 RMS rule) 2502.16982, 8-bit states 2110.02861. Sharding by
owner and all-to-all as in microsoft/dion; the measurements behind the defaults are in the repository's bench.
"""

import math
import zlib
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from settings import Settings

# Five quintics, each the best for the interval that the one before it leaves; all but the last carry the paper's safety
# factor 1.02, which is why the norm below does too. Against KELLER_JORDAN: the same FLOPs, singular values in
# [0.86, 1.14] instead of [0.68, 1.2] for a 1/k spectrum.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
KELLER_JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
COEFFS = {"polar_express": POLAR_EXPRESS, "keller_jordan": KELLER_JORDAN}

BUCKET = (
    1 << 26
)  # elements per owner and bucket: 134 MB of bf16, enough for full link speed; about four are alive
LOCAL_BUCKET = (
    1 << 20
)  # where nothing is exchanged: smaller, so that momentum, update and weights stay in cache
# Matrices of this many elements fill the device one by one; smaller ones of a shape share batches of up to four times that,
# as much as a CPU's cache holds (192 of 32x128: a seventh of the time of one by one).
LARGE = {"cpu": 1 << 18, "cuda": 1 << 23}
HALVES = 1 << 26  # FLOPs from which half a symmetric product pays for two calls and a copy
QUANT_BLOCK = 256  # entries that share one scale in bitsandbytes' 8-bit optimizers


class MuonError(ValueError):
    """A parameter that no optimizer here can take, or optimizer state that does not fit the model."""

    exit_code = 64


def orthogonalize(G: Tensor, coeffs=POLAR_EXPRESS, dtype=torch.bfloat16, scale: float = 1.0) -> Tensor:
    """`scale` times the nearest semi-orthogonal matrix U V^T of each G = U S V^T.   (m, n) or (b, m, n) -> same, in `dtype`

    Singular values end in [0.86, 1.14] where they started above 1/1000 of the norm; 0 stays 0.
    """
    norm = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    X = G.to(dtype) / (1.02 * norm).clamp_min(1e-20).to(dtype)  # spectral norm <= 1
    tall = G.size(-2) > G.size(-1)
    X = X.mT.contiguous() if tall else X
    Y, A = (
        torch.empty_like(X),
        X.new_empty(*X.shape[:-1], X.size(-2)),
    )  # fresh memory costs a CPU more than the copies
    B = torch.empty_like(A)
    mm = torch.addmm if G.ndim == 2 else torch.baddbmm
    for i, (a, b, c) in enumerate(coeffs):
        s = scale if i == len(coeffs) - 1 else 1.0
        symmetric_product(X, X.mT, A)
        symmetric_product(A, A, B, A, s * b, s * c)  # b A + c A^2
        mm(X, B, X, beta=s * a, out=Y)  # a X + (b A + c A^2) X
        X, Y = Y, X
    return X.mT if tall else X


def symmetric_product(P: Tensor, Q: Tensor, out: Tensor, add: Tensor | None = None, beta=0.0, alpha=1.0):
    """out = alpha P Q + beta add, for results known to be symmetric: a large one has its upper right quarter copied."""
    if P.ndim == 2 and 2 * P.numel() * P.size(0) >= HALVES:
        half = P.size(0) // 2
        left, corner = out[:, :half], out[half:, half:]
        if add is None:
            torch.mm(P, Q[:, :half], out=left)
            torch.mm(P[half:], Q[:, half:], out=corner)
        else:
            torch.addmm(add[:, :half], P, Q[:, :half], beta=beta, alpha=alpha, out=left)
            torch.addmm(add[half:, half:], P[half:], Q[:, half:], beta=beta, alpha=alpha, out=corner)
        out[:half, half:] = left[half:].mT
    elif add is None:
        torch.matmul(P, Q, out=out)
    else:
        (torch.addmm if P.ndim == 2 else torch.baddbmm)(add, P, Q, beta=beta, alpha=alpha, out=out)


def update_scale(shape) -> float:
    """Factor that gives an orthogonalised (m, n) an RMS of 0.2 per entry, AdamW's (Moonlight)."""
    return 0.2 * math.sqrt(max(shape))


def local(t: Tensor) -> Tensor:
    """This rank's rows, as a plain tensor that shares the storage."""
    t = t.detach()
    t = t.to_local() if isinstance(t, DTensor) else t
    return getattr(t, "_tensor", t)  # torchao wraps weights that are all-gathered in float8


def zeros_like(p: Tensor) -> Tensor:
    """Zeros, sharded like `p`."""
    zeros = torch.zeros_like(local(p))
    if isinstance(p, DTensor):
        return DTensor.from_local(
            zeros, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
    return zeros


class Layout:
    """How parameters lie on the mesh: `size` ranks share the rows, `replicas` groups of them hold copies."""

    def __init__(self, p: Tensor, name: str = "parameter"):
        self.group, self.size, self.rank = None, 1, 0
        self.replica_group, self.replicas, self.replica = None, 1, 0
        self.device = p.device
        if not isinstance(p, DTensor):
            return
        mesh = p.device_mesh
        if (
            mesh.device_type != p.device.type
        ):  # cpu_offload: rows live on the host, matrices are worked on here
            self.device = torch.device(mesh.device_type, getattr(torch, mesh.device_type).current_device())
        for i, placement in enumerate(p.placements):
            part = (mesh.get_group(i), mesh.size(i), mesh.get_local_rank(i))
            if mesh.size(i) == 1:
                continue
            if placement.is_replicate() and self.replicas == 1:
                self.replica_group, self.replicas, self.replica = part
            elif placement.is_shard(0) and self.size == 1:
                self.group, self.size, self.rank = part
            else:
                raise MuonError(
                    f"{name}: placements {p.placements} on mesh {tuple(mesh.shape)}; Muon takes rows sharded over one mesh "
                    "dimension and copies over one more (fully_shard with a 1-D or 2-D mesh)"
                )

    def heights(self, rows: int) -> list[int]:
        """Rows of a matrix on each rank, as torch.chunk deals them: the last ranks may hold fewer or none."""
        each = -(-rows // self.size)
        return [max(0, min(each, rows - each * r)) for r in range(self.size)]

    @property
    def alone(self) -> bool:
        return self.size == self.replicas == 1


def exchange(send: Tensor, there: list[int], here: list[int], group):
    """Start an all-to-all: `there[r]` elements go to, `here[r]` come from each rank r.   -> (received, wait)"""
    if group is None:
        return send, lambda: None
    received = send.new_empty(sum(here))
    return received, dist.all_to_all_single(received, send, here, there, group=group, async_op=True).wait


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for whole 2-D matrices; give the rest to AdamW.

    `params`: (name, parameter) pairs, or groups of them. `lr` and `weight_decay` are AdamW's: the update has an RMS of
    0.2 * lr, the decay is lr * weight_decay, on the fp32 rows. `row_blocks[name]`: heights of the row blocks of a fused
    matrix (q | k | v), each orthogonalised by itself.

    Build it after `fully_shard` (which replaces parameters) and after the weights are real. A gradient that is None
    leaves its matrix alone, and must be None on every rank: `clip_grads` checks that.

    `watch(name, G, O)`, if set, is called by the owner of each orthogonalised block with what went in and with its
    orthogonal factor (before the scale); a block of a fused matrix is called `name[i]`.
    """

    def __init__(
        self,
        params,
        lr: float = 4e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        row_blocks: dict[str, tuple[int, ...]] | None = None,
        coeffs=POLAR_EXPRESS,
        dtype=torch.bfloat16,
        bucket: int = BUCKET,
    ):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.coeffs, self.dtype, self.bucket, self.watch = coeffs, dtype, bucket, None
        self.names, self.blocks = {}, {}
        for group in self.param_groups:
            names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
            for name, p in zip(names, group["params"], strict=True):
                if p.ndim != 2 or 0 in p.shape or not p.is_floating_point():
                    raise MuonError(
                        f"{name} has shape {tuple(p.shape)}, {p.dtype}: Muon needs whole 2-D matrices. Flat 1-D pieces come "
                        "from FSDP1 or ZeRO: shard with fully_shard (FSDP2). Vectors belong to AdamW."
                    )
                if p.is_meta:
                    raise MuonError(
                        f"{name} is on the meta device: build the optimizers after the weights are real"
                    )
                Layout(p, name)
                blocks = tuple((row_blocks or {}).get(name, (p.shape[0],)))
                if sum(blocks) != p.shape[0] or min(blocks) < 1:
                    raise MuonError(
                        f"{name} has {p.shape[0]} rows, its row blocks {blocks} do not add up to that"
                    )
                self.names[p], self.blocks[p] = name, blocks
                self.state[p]["momentum"] = zeros_like(
                    p
                )  # now: the same checkpoint keys on all ranks at any step

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        tasks = [self._update(turn, *job) for turn, job in enumerate(self._plan())]
        for k in range(
            len(tasks) + 3
        ):  # a bucket has four stages; the newest goes first, so that its gather is under way
            for task in reversed(tasks[max(0, k - 3) : k + 1]):
                next(task, None)
        return loss

    def flops(self, p: Tensor) -> int:
        """Work to orthogonalise one matrix, per iteration."""
        total = 0
        for rows in self.blocks[p]:
            short, long = sorted((rows, p.shape[1]))
            total += 4 * short**2 * long + 2 * short**3
        return total

    def _plan(self) -> list[tuple[dict, Layout, list[tuple[int, Tensor]]]]:
        """Buckets: (group, layout, [(owner, parameter)] by owner). The largest matrix goes first, each to the rank with the
        least to do. Made anew each step from the gradients present, so that there is no plan to go stale."""
        buckets, layouts, load = defaultdict(list), {}, {}
        todo = [(i, p) for i, g in enumerate(self.param_groups) for p in g["params"] if p.grad is not None]
        if not todo:
            raise MuonError(
                "no matrix has a gradient: were the optimizers built before fully_shard? Build them after it"
            )
        todo = sorted(((self.flops(p), i, p) for i, p in todo), key=lambda t: -t[0])
        for flops, i, p in todo:
            key = (p.device_mesh, p.placements) if isinstance(p, DTensor) else p.device
            if key not in layouts:
                layouts[key] = Layout(p)
                load[key] = [(0, 0, rank) for rank in range(layouts[key].size)]
            bucket = min(self.bucket, LOCAL_BUCKET) if layouts[key].alone else self.bucket
            done, elements, owner = min(load[key])
            buckets[i, key, elements // bucket].append((owner, p))
            load[key][owner] = (done + flops, elements + p.numel(), owner)
        return [
            (self.param_groups[i], layouts[key], sorted(items, key=lambda t: t[0]))
            for (i, key, _), items in buckets.items()
        ]

    def _update(self, turn: int, group: dict, layout: Layout, items: list[tuple[int, Tensor]]):
        """One bucket. Each yield lets other buckets run while a collective is in flight; every rank yields equally often,
        or the replicas would start their broadcasts in different orders and hang."""
        params = [p for _, p in items]
        rows = [local(p) for p in params]
        grads, momenta = [local(p.grad) for p in params], [local(self.state[p]["momentum"]) for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_lerp_(
            grads, momenta, group["momentum"]
        )  # Nesterov, in place: a copy would cost more than it
        ahead = grads
        if layout.alone:
            updates = self._orthogonalized(params, ahead)
        else:
            sizes = [u.numel() for u in ahead]
            mine = [p for owner, p in items if owner == layout.rank]
            if turn % layout.replicas == layout.replica:
                heights = [layout.heights(p.shape[0]) for p in mine]
                there = [0] * layout.size
                for size, (owner, _) in zip(sizes, items, strict=True):
                    there[owner] += size
                here = [
                    sum(h[r] * p.shape[1] for h, p in zip(heights, mine, strict=True))
                    for r in range(layout.size)
                ]
                send = pack(ahead, self.dtype, layout.device)
                received, wait = exchange(send, there, here, layout.group)
                del ahead, send
                yield
                wait()
                wholes = self._orthogonalized(mine, unpack(received, heights, mine))
                pieces = [w.split(h) for w, h in zip(wholes, heights, strict=True)]
                send = pack([p[r] for r in range(layout.size) for p in pieces], self.dtype, layout.device)
                update, wait = exchange(send, here, there, layout.group)
                del wholes, pieces, send, received
                yield
                wait()
            else:
                update = torch.empty(sum(sizes), dtype=self.dtype, device=layout.device)
                del ahead
                yield
                yield
            if layout.replicas > 1:
                wait = dist.broadcast(
                    update, group=layout.replica_group, group_src=turn % layout.replicas, async_op=True
                ).wait
                yield
                wait()
            if update.device != rows[0].device:
                update = update.to(rows[0].device)
            updates = [u.view(r.shape) for u, r in zip(update.split(sizes), rows, strict=True)]
        torch._foreach_mul_(rows, 1 - group["lr"] * group["weight_decay"])
        for r, u in zip(rows, updates, strict=True):
            r.add_(u, alpha=-group["lr"])

    def _orthogonalized(self, params: list[Tensor], matrices: list[Tensor]) -> list[Tensor]:
        """The update of each whole matrix, by row blocks; small blocks of one shape share a batch."""
        blocks, labels = [], []
        for p, M in zip(params, matrices, strict=True):
            heights = self.blocks[p]
            blocks += M.split(heights)
            name = self.names[p]
            labels += [name] if len(heights) == 1 else [f"{name}[{i}]" for i in range(len(heights))]
        same = defaultdict(list)
        for i, block in enumerate(blocks):
            same[block.shape].append(i)
        done = [None] * len(blocks)
        for shape, ids in same.items():
            scale = update_scale(shape)
            large = LARGE.get(matrices[0].device.type, LARGE["cuda"])
            many = 1 if shape.numel() >= large else 4 * large // shape.numel()
            for chunk in (ids[i : i + many] for i in range(0, len(ids), many)):
                if many == 1:
                    batch = [orthogonalize(blocks[chunk[0]], self.coeffs, self.dtype, scale)]
                else:
                    G = pack([blocks[i] for i in chunk], self.dtype, matrices[0].device).view(-1, *shape)
                    batch = orthogonalize(G, self.coeffs, self.dtype, scale)
                for i, update in zip(chunk, batch, strict=True):
                    done[i] = update
            if self.watch:
                for i in ids:
                    self.watch(labels[i], blocks[i], done[i].float() / scale)
        parts = iter(done)
        parts = [[next(parts) for _ in self.blocks[p]] for p in params]
        return [torch.cat(part) if len(part) > 1 else part[0] for part in parts]


def pack(tensors: list[Tensor], dtype, device) -> Tensor:
    """One flat tensor, cast on the way."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=device)
    if tensors:
        views = [
            v.view(t.shape) for v, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)
        ]
        torch._foreach_copy_(views, tensors)
    return flat


def unpack(received: Tensor, heights: list[list[int]], params: list[Tensor]) -> list[Tensor]:
    """Whole matrices from what the ranks sent: rank 0's rows of each matrix, rank 1's rows of each, …"""
    columns = [p.shape[1] for p in params]
    ranks = range(len(heights[0]) if heights else 0)
    parts = iter(received.split([h[r] * n for r in ranks for h, n in zip(heights, columns, strict=True)]))
    parts = [[next(parts).view(-1, n) for n in columns] for _ in ranks]
    return [torch.cat(rows) if len(rows) > 1 else rows[0] for rows in zip(*parts, strict=True)]


class AdamW8bit(torch.optim.Optimizer):
    """bitsandbytes' AdamW with 8-bit moments, on each rank's own rows (it refuses DTensors).

    Moments are quantised in blocks of 256 entries of the local rows, so codes and scales fit one world size only;
    `moments` and `set_moments` translate to and from fp32 tensors that any world size can hold. Local pieces below
    4,096 entries keep 32-bit moments (bitsandbytes' own rule)."""

    def __init__(self, params, lr=2e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        bitsandbytes = import_bitsandbytes(self.param_groups[0]["params"][0].device)
        self.pieces = {}  # parameter -> this rank's rows as bitsandbytes' parameter; ranks without rows have none
        groups = []
        for group in self.param_groups:
            mine = {p: nn.Parameter(local(p)) for p in group["params"] if local(p).numel()}
            self.pieces.update(mine)
            groups.append(dict(params=list(mine.values()), lr=lr, weight_decay=group["weight_decay"]))
        self.inner = bitsandbytes.optim.AdamW8bit(
            groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        for i, group in enumerate(self.inner.param_groups):
            for j, piece in enumerate(group["params"]):
                self.inner.init_state(group, piece, i, j)  # now: the same checkpoint keys at any step

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
        for p, piece in self.pieces.items():
            piece.data = local(p)  # FSDP may have moved the rows to padded storage since
            piece.grad = None if p.grad is None else local(p.grad)
        self.inner.step()
        for piece in self.pieces.values():
            piece.grad = None
        return loss

    def codes(self, p: Tensor) -> dict[str, Tensor]:
        """This rank's live 8-bit codes and scales of `p`; empty where moments are 32-bit."""
        state = self.inner.state[self.pieces[p]] if p in self.pieces else {}
        quantised = state and state["state1"].dtype == torch.uint8
        return {k: state[k] for k in ("state1", "state2", "absmax1", "absmax2")} if quantised else {}

    def moments(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """exp_avg and exp_avg_sq in fp32, sharded like `p`, and the step (0-dim)."""
        out = zeros_like(p), zeros_like(p)
        if p not in self.pieces:
            return *out, torch.zeros(())
        state = self.inner.state[self.pieces[p]]
        for i, moment in enumerate(out, 1):
            values = state[f"state{i}"]
            if values.dtype == torch.uint8:
                values = dequantize(values, state[f"absmax{i}"], state[f"qmap{i}"])
            local(moment).copy_(values)
        return *out, torch.tensor(float(state["step"]))

    @torch.no_grad()
    def set_moments(self, p: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, codes: dict | None):
        """Restore: from `codes` (exact) where given, else from the fp32 moments (to the quantiser's error)."""
        if p not in self.pieces:
            return
        state = self.inner.state[self.pieces[p]]
        state["step"] = int(step)
        mine = self.codes(p)
        if mine and codes is not None:
            for key, tensor in mine.items():
                tensor.copy_(codes[key])
            return
        for i, moment in enumerate((exp_avg, exp_avg_sq), 1):
            values = local(moment)
            if mine:
                quantised, scales = quantize(values, state[f"qmap{i}"])
                state[f"absmax{i}"].copy_(scales)
                values = quantised
            state[f"state{i}"].copy_(values)


def dequantize(codes: Tensor, scales: Tensor, code: Tensor) -> Tensor:
    """fp32 values of bitsandbytes' block-wise codes; `code` (256,) are the values of the codes, ascending."""
    values = code[codes.int()].flatten()
    return values.mul_(scales.repeat_interleave(QUANT_BLOCK)[: values.numel()]).view(codes.shape)


def quantize(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `dequantize`: the codes come back equal.   -> (codes, scales)

    bitsandbytes' own quantiser would not do: its signed code ends at -0.993 but it scales by the largest magnitude, so a
    block whose largest entry is negative would shrink by 0.7 % in each round trip.
    """
    n = values.numel()
    blocks = torch.nn.functional.pad(values.float().flatten(), (0, -n % QUANT_BLOCK)).view(-1, QUANT_BLOCK)
    scales = blocks.amax(1) / code[-1]
    if code[0] < 0:
        scales = torch.maximum(scales, blocks.amin(1) / code[0])
    scales = scales.clamp_min(0)
    middle = (code[1:] + code[:-1]) / 2
    codes = torch.bucketize(blocks / torch.where(scales > 0, scales, 1)[:, None], middle, out_int32=True)
    return codes.flatten()[:n].view(values.shape).to(torch.uint8), scales


def import_bitsandbytes(device: torch.device):
    """bitsandbytes, after one 8-bit step has worked on `device`."""
    try:
        import bitsandbytes

        probe = nn.Parameter(torch.ones(4096, device=device))
        probe.grad = torch.ones_like(probe)
        bitsandbytes.optim.AdamW8bit([probe], lr=0.5, weight_decay=0.0).step()
        moved = probe.detach().mean().item()
        if abs(moved - 0.5) > 0.1:
            raise RuntimeError(f"a test step moved a weight from 1 to {moved:.3f}, not to 0.5")
        return bitsandbytes
    except Exception as e:
        raise MuonError(
            f'adamw="8bit" needs bitsandbytes, which does not work here on {device}: {type(e).__name__}: {e}. '
            'Install it (pip install bitsandbytes), or set adamw="fp32"'
        ) from e


# Which parameter goes where: the first rule that fits. (class, endings of the name, optimizer, weight decay)
RULES = (
    ("attention", ("attn.qkv.weight", "attn.o_proj.weight"), "muon", True),
    ("ffn", ("ffn.gate.weight", "ffn.up.weight", "ffn.down.weight"), "muon", True),
    ("embedding", ("embed.weight",), "adamw", True),
    ("head", ("lm_head.weight",), "adamw", True),
    ("gate projections", ("attn.lambda_proj.weight", "attn.gate_proj.weight"), "adamw", False),
    ("gates", ("attn.diff_lambda", "attn.head_gate", ".ls_a", ".ls_f"), "adamw", False),
    ("norms", ("norm.scale",), "adamw", False),
)


def classify(name: str, p: Tensor) -> tuple[str, str, bool]:
    """(class, "muon" or "adamw", decayed?) of a parameter. Raises MuonError where no rule fits."""
    for kind, endings, optimizer, decay in RULES:
        if name.endswith(endings):
            return kind, optimizer, decay
    raise MuonError(
        f"{name}, shape {tuple(p.shape)}: no rule says how to optimise it; add its name to RULES in muon.py"
    )


def build_optimizers(model: nn.Module, settings: Settings, row_blocks: dict, log=print) -> list:
    """[muon, adamw] over all trainable parameters, each once. Call it after `fully_shard`, which replaces parameters
    (under FSDP1 the order was the reverse). The table of what goes where is logged."""
    table, muon_params, adamw_params, first_name = {}, [], {True: [], False: []}, {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if not p.requires_grad or p in first_name:  # a tied parameter has two names and is one parameter
            continue
        first_name[p] = name
        if p.dtype != torch.float32:
            raise MuonError(
                f"{name} is {p.dtype}: masters must be fp32, small steps vanish in bf16 (matmuls run in bf16 anyway)"
            )
        kind, optimizer, decay = classify(name, p)
        (muon_params if optimizer == "muon" else adamw_params[decay]).append((name, p))
        row = table.setdefault(kind, [optimizer, decay, 0, 0])
        row[2], row[3] = row[2] + 1, row[3] + p.numel()
    if not muon_params or not (adamw_params[True] or adamw_params[False]):
        raise MuonError(
            f"the model has no {'AdamW parameters' if muon_params else 'block matrices for Muon'}"
        )
    s = settings
    if s.muon_split_heads:
        row_blocks = {n: split_heads(heights, s.head_dim) for n, heights in row_blocks.items()}
    unknown = set(row_blocks) - {n for n, _ in muon_params}
    if unknown:
        raise MuonError(f"row blocks of {sorted(unknown)}, which are no block matrices of the model")
    muon = Muon(muon_params, s.muon_lr, s.muon_momentum, s.weight_decay, row_blocks, COEFFS[s.muon_coeffs])
    groups = [
        dict(params=params, weight_decay=s.weight_decay if decay else 0.0)
        for decay, params in adamw_params.items()
        if params
    ]
    options = dict(lr=s.lr, betas=(s.beta1, s.beta2), eps=s.adam_eps)
    if s.adamw == "8bit":
        adamw = AdamW8bit(groups, **options)
    else:
        adamw = torch.optim.AdamW(groups, **options, fused=True)
        for group in adamw.param_groups:
            for p in group["params"]:  # now: the same checkpoint keys at any step
                step = torch.zeros((), device=p.device)
                adamw.state[p] = dict(step=step, exp_avg=zeros_like(p), exp_avg_sq=zeros_like(p))
    log(f"{'class':18}{'optimizer':12}{'tensors':>8}{'elements':>16}{'peak lr':>10}{'decay':>8}")
    for kind, (optimizer, decay, tensors, elements) in table.items():
        label = optimizer if optimizer == "muon" else f"adamw {s.adamw}"
        lr, wd = s.muon_lr if optimizer == "muon" else s.lr, s.weight_decay if decay else 0.0
        log(f"{kind:18}{label:12}{tensors:8d}{elements:16,d}{lr:10.2g}{wd:8.2g}")
    return [muon, adamw]


def split_heads(heights: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
    """Row blocks of q | k | v, cut into heads."""
    if any(h % head_dim for h in heights):
        raise MuonError(f"muon_split_heads: row blocks {heights} are not multiples of head_dim {head_dim}")
    return tuple(head_dim for h in heights for _ in range(h // head_dim))


def set_rates(optimizers: list, muon_lr: float, lr: float, momentum: float):
    """Rates of the coming step, from the schedule."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(optimizer, Muon):
                group["lr"], group["momentum"] = muon_lr, momentum
            else:
                group["lr"] = lr


@torch.no_grad()
def clip_grads(model: nn.Module, max_norm: float, scale: float = 1.0) -> Tensor:
    """Multiply all gradients by `scale`, then clip them to the global norm `max_norm` (0: no clipping).

    -> the norm over all shards after the scale, before the clip: 0-dim, fp32, on the CPU, equal on all ranks.
    Non-finite gradients are left as they are. A gradient that is None on some ranks only is an error on all of them,
    since Muon's exchange would hang; the check rides on the norm's own all-reduce.
    """
    parts, missing, grads = defaultdict(list), [], []
    for name, p in model.named_parameters():
        parts[(p.device_mesh, p.placements) if isinstance(p, DTensor) else p.device].append(p)
        if p.grad is None and p.requires_grad:
            missing.append(name)
    mark = float(
        zlib.crc32(" ".join(missing).encode()) & 0xFFFF
    )  # its square is exact, as are sums over ranks
    square, alike = 0.0, True
    for params in parts.values():
        layout = Layout(params[0])
        mine = [local(p.grad) for p in params if p.grad is not None]
        grads += mine
        norms = torch.stack(torch._foreach_norm(mine, dtype=torch.float32)) if mine else torch.zeros(1)
        norms = norms.double().to(layout.device)
        total = torch.stack([norms.square().sum(), norms.new_tensor(mark), norms.new_tensor(mark * mark)])
        for group in (layout.group, layout.replica_group):
            if group is not None:
                dist.all_reduce(total, group=group)
        sum_of_squares, marks, squared_marks = total.tolist()
        square += sum_of_squares / layout.replicas
        alike &= (
            layout.size * layout.replicas * squared_marks == marks**2
        )  # Cauchy-Schwarz: only if all are equal
    if not alike:
        raise MuonError(
            f"some gradients are None on some ranks only; on this one: {missing or 'no gradient'}"
        )
    norm = math.sqrt(square) * scale if square >= 0 else math.nan
    factor = scale * min(1.0, max_norm / (norm + 1e-6)) if max_norm else scale
    if factor != 1.0 and math.isfinite(norm):
        torch._foreach_mul_(grads, factor)
    return torch.tensor(norm, dtype=torch.float32)


def optimizer_state(model: nn.Module, optimizers: list) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(shared, own). `shared`: tensors that any world size can load, by parameter name; fp32 optimizers' are live.
    `own`: this rank's live 8-bit codes and scales, exact at the same world size; {} without 8-bit state."""
    names = {p: name for name, p in model.named_parameters()}
    shared, own = {}, {}
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p not in names:
                raise MuonError(
                    f"a parameter of shape {tuple(p.shape)} is not the model's: build optimizers after fully_shard"
                )
            if isinstance(optimizer, Muon):
                shared[f"muon.{names[p]}.momentum"] = optimizer.state[p]["momentum"]
                continue
            key = f"adamw.{names[p]}"
            if isinstance(optimizer, AdamW8bit):
                moments = dict(zip(("exp_avg", "exp_avg_sq", "step"), optimizer.moments(p), strict=True))
                own.update({f"{key}.{k}": v for k, v in optimizer.codes(p).items()})
            else:
                moments = optimizer.state[p]
            shared.update({f"{key}.{k}": v for k, v in moments.items()})
    return shared, own


@torch.no_grad()
def load_optimizer_state(model: nn.Module, optimizers: list, shared: dict, own: dict | None):
    """Take over what `optimizer_state` gave out and a checkpoint then filled. Without `own` (another world size, or saved
    with fp32 moments) 8-bit state is quantised anew from `shared`."""
    live, codes = optimizer_state(model, optimizers)
    for mine, given, what in ((live, shared, "shared"), (codes, own, "own")):
        if given is None:
            continue
        wrong = {
            k
            for k in mine.keys() | given.keys()
            if k not in mine or k not in given or mine[k].shape != given[k].shape
        }
        if wrong:
            raise MuonError(f"{what} optimizer state does not fit: {sorted(wrong)[:5]}, {len(wrong)} in all")
    for optimizer in optimizers:
        if isinstance(optimizer, AdamW8bit):
            names = {p: name for name, p in model.named_parameters()}
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                key = f"adamw.{names[p]}"
                mine = {k: own[f"{key}.{k}"] for k in optimizer.codes(p)} if own is not None else None
                optimizer.set_moments(
                    p, *(shared[f"{key}.{k}"] for k in ("exp_avg", "exp_avg_sq", "step")), mine
                )
    if not any(isinstance(o, AdamW8bit) for o in optimizers):
        codes = {}
    for key, tensor in live.items():
        if tensor is not shared[key]:
            local(tensor).copy_(local(shared[key]))
