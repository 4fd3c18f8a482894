"""Muon for sharded matrices, AdamW beside it.

Muon: momentum, then the nearest semi-orthogonal matrix as the update (Jordan et al., kellerjordan.github.io/posts/muon).
It needs whole matrices; FSDP2 leaves each rank with rows. The idea here: **every matrix is orthogonalised once, whole, by
one owner.** A bucket of matrices takes three phases:

    gather   momentum of the own rows; one uneven all-to-all takes all rows of a matrix to its owner
    owner    orthogonalises its matrices, in bf16
    scatter  one all-to-all takes the update's rows back; each rank applies them to its own fp32 rows

Buckets run as a pipeline: while one is orthogonalised, the next is gathered and the last one scattered. Under HSDP the
replicas take turns on buckets and broadcast the result. What is no block matrix goes to AdamW: see `ROLES`.

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

from kernels import AdamW8bit, Layout, MuonError, exchange, local, pack, unpack, zeros_like
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

# Elements per owner and bucket: 134 MB of bf16, enough for full link speed; about four are alive. Where nothing is
# exchanged a bucket is smaller, so that momentum, update and weights stay in cache.
BUCKET, LOCAL_BUCKET = 1 << 26, 1 << 20
# Matrices of this many elements fill the device one by one; smaller ones of a shape share batches of up to four times that,
# as much as a CPU's cache holds (192 of 32x128: a seventh of the time of one by one).
LARGE = {"cpu": 1 << 18, "cuda": 1 << 23}
HALVES = 1 << 26  # FLOPs from which half a symmetric product pays for two calls and a copy


def orthogonalize(G: Tensor, coeffs=POLAR_EXPRESS, dtype=torch.bfloat16, scale: float = 1.0) -> Tensor:
    """`scale` times the nearest semi-orthogonal matrix U V^T of each G = U S V^T.   (m, n) or (b, m, n) -> same, in `dtype`

    With POLAR_EXPRESS singular values end in [0.86, 1.14] where they started above 1/1000 of the norm; 0 stays 0.
    """
    X = G.to(dtype)
    norm = torch.linalg.vector_norm(
        X, dim=(-2, -1), keepdim=True
    )  # summed in fp32; its rounding is below the 2 %
    X = X / (1.02 * norm).clamp_min(1e-20)  # spectral norm <= 1
    tall = G.size(-2) > G.size(-1)
    X = X.mT.contiguous() if tall else X
    # kept over the iterations: page faults cost a CPU more than the copies
    A = X.new_empty(*X.shape[:-1], X.size(-2))
    B, Y = torch.empty_like(A), torch.empty_like(X)
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


def orthogonalize_flops(rows: int, columns: int) -> int:
    """FLOPs of `orthogonalize`: X X^T, its square and one product with X, in each of five iterations."""
    short, long = sorted((rows, columns))
    return 5 * (4 * short**2 * long + 2 * short**3)


def update_scale(shape) -> float:
    """Factor that gives an orthogonalised (m, n) an RMS of 0.2 per entry, AdamW's (Moonlight)."""
    return 0.2 * math.sqrt(max(shape))


def orthogonalize_blocks(matrices, heights, names, coeffs, dtype, watch=None) -> list[Tensor]:
    """The update of each whole matrix (rows, columns), by row blocks of the given heights; small blocks of one shape share
    a batch. `watch`: see Muon."""
    blocks, labels = [], []
    for M, rows, name in zip(matrices, heights, names, strict=True):
        blocks += M.split(rows)
        labels += [name] if len(rows) == 1 else [f"{name}[{i}]" for i in range(len(rows))]
    same = defaultdict(list)
    for i, block in enumerate(blocks):
        same[block.shape].append(i)
    done = [None] * len(blocks)
    for shape, ids in same.items():
        scale, device = update_scale(shape), blocks[ids[0]].device
        large = LARGE.get(device.type, LARGE["cuda"])
        many = 1 if shape.numel() >= large else 4 * large // shape.numel()
        for chunk in (ids[i : i + many] for i in range(0, len(ids), many)):
            if many == 1:
                batch = [orthogonalize(blocks[chunk[0]], coeffs, dtype, scale)]
            else:
                G = pack([blocks[i] for i in chunk], dtype, device).view(-1, *shape)
                batch = orthogonalize(G, coeffs, dtype, scale)
            for i, update in zip(chunk, batch, strict=True):
                done[i] = update
        if watch:
            for i in ids:
                watch(labels[i], blocks[i], done[i].float() / scale)
    parts = iter(done)
    parts = [[next(parts) for _ in rows] for rows in heights]
    return [torch.cat(part) if len(part) > 1 else part[0] for part in parts]


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for whole 2-D matrices; give the rest to AdamW.

    `params`: (name, parameter) pairs, or groups of them. `lr` and `weight_decay` are AdamW's: the update has an RMS of
    0.2 * lr, the decay is lr * weight_decay, on the fp32 rows. `row_blocks[name]`: heights of the row blocks of a fused
    matrix (q | k | v), each orthogonalised by itself.

    Build it after `fully_shard` (which replaces parameters) and after the weights are real. A gradient that is None
    leaves its matrix alone, and must be None on every rank: `clip_grads` checks that. `step` uses gradients up: they hold
    the Nesterov momentum afterwards, which saves a copy of each.

    `watch(name, G, O)`, if set, is called by the owner of each orthogonalised block with what went in and with its
    orthogonal factor (before the scale); a block of a fused matrix is called `name[i]`. `bucket`: see BUCKET.
    """

    dtype, bucket, watch = torch.bfloat16, BUCKET, None

    def __init__(self, params, lr=4e-4, momentum=0.95, weight_decay=0.1, row_blocks=None, coeffs=None):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.coeffs, self.names, self.blocks = coeffs or POLAR_EXPRESS, {}, {}
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.ndim != 2 or 0 in p.shape or not p.is_floating_point():
                    needs = "Muon needs whole 2-D matrices; flat ones are FSDP1's: use fully_shard"
                    raise MuonError(f"{name} has shape {tuple(p.shape)}, {p.dtype}: {needs}")
                if p.is_meta:
                    raise MuonError(f"{name} is on the meta device: build optimizers once weights are real")
                Layout(p, name)
                blocks = tuple((row_blocks or {}).get(name, (p.shape[0],)))
                if sum(blocks) != p.shape[0] or min(blocks) < 1:
                    raise MuonError(f"{name} has {p.shape[0]} rows: its row blocks {blocks} do not add up")
                self.names[p], self.blocks[p] = name, blocks
                self.state[p]["momentum"] = zeros_like(p)  # now: the same checkpoint keys at any step

    @torch.no_grad()
    def step(self):
        tasks = [self._update(turn, *job) for turn, job in enumerate(self._plan())]
        for k in range(
            len(tasks) + 3
        ):  # four stages; the newest bucket first, so that its gather is under way
            for task in reversed(tasks[max(0, k - 3) : k + 1]):
                next(task, None)

    def _plan(self) -> list[tuple[dict, Layout, list[tuple[int, Tensor]]]]:
        """Buckets: (group, layout, [(owner, parameter)] by owner). The largest matrix goes first, each to the rank with the
        least to do. Made anew each step from the gradients present, so that there is no plan to go stale."""
        buckets, layouts, load = defaultdict(list), {}, {}
        todo = [(i, p) for i, g in enumerate(self.param_groups) for p in g["params"] if p.grad is not None]
        if not todo:
            raise MuonError("no matrix has a gradient: were the optimizers built before fully_shard?")
        work = {p: sum(orthogonalize_flops(rows, p.shape[1]) for rows in self.blocks[p]) for _, p in todo}
        for i, p in sorted(todo, key=lambda t: -work[t[1]]):
            key = (p.device_mesh, p.placements) if isinstance(p, DTensor) else p.device
            if key not in layouts:
                layouts[key] = Layout(p)
                load[key] = [(0, 0, rank) for rank in range(layouts[key].size)]
            bucket = min(self.bucket, LOCAL_BUCKET) if layouts[key].alone else self.bucket
            done, elements, owner = min(load[key])
            buckets[i, key, elements // bucket].append((owner, p))
            load[key][owner] = (done + work[p], elements + p.numel(), owner)
        ordered = {k: sorted(items, key=lambda t: t[0]) for k, items in buckets.items()}
        return [(self.param_groups[i], layouts[key], items) for (i, key, _), items in ordered.items()]

    def _orthogonalized(self, params: list[Tensor], matrices: list[Tensor]) -> list[Tensor]:
        heights, names = ([table[p] for p in params] for table in (self.blocks, self.names))
        return orthogonalize_blocks(matrices, heights, names, self.coeffs, self.dtype, self.watch)

    def _update(self, turn: int, group: dict, layout: Layout, items: list[tuple[int, Tensor]]):
        """One bucket. Each yield lets other buckets run while a collective is in flight; every rank yields equally often,
        or the replicas would start their broadcasts in different orders and hang."""
        params = [p for _, p in items]
        rows = [local(p) for p in params]
        grads, momenta = [local(p.grad) for p in params], [local(self.state[p]["momentum"]) for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_lerp_(grads, momenta, group["momentum"])  # Nesterov
        if layout.alone:
            updates = self._orthogonalized(params, [g.to(layout.device, self.dtype) for g in grads])
        else:
            sizes = [g.numel() for g in grads]
            mine = [p for owner, p in items if owner == layout.rank]
            if turn % layout.replicas == layout.replica:
                heights = [layout.heights(p.shape[0]) for p in mine]
                there = [0] * layout.size
                for size, (owner, _) in zip(sizes, items, strict=True):
                    there[owner] += size
                parts = [[rows * p.shape[1] for rows in h] for h, p in zip(heights, mine, strict=True)]
                here = [sum(part[rank] for part in parts) for rank in range(layout.size)]
                send = pack(grads, self.dtype, layout.device)
                received, wait = exchange(send, there, here, layout.group)
                del send
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
                yield
                yield
            if layout.replicas > 1:
                source = dict(group=layout.replica_group, group_src=turn % layout.replicas)
                work = dist.broadcast(update, **source, async_op=True)
                yield
                work.wait()
            updates = [u.view(r.shape) for u, r in zip(update.split(sizes), rows, strict=True)]
        torch._foreach_mul_(rows, 1 - group["lr"] * group["weight_decay"])
        for r, u in zip(rows, updates, strict=True):
            r.add_(u.to(r.device), alpha=-group["lr"])


# How a parameter of each role (model.Role.kind) is optimised: (optimizer, weight decay)
ROLES = {
    "block": ("muon", True),
    "embedding": ("adamw", True),
    "head": ("adamw", True),
    "gate": ("adamw", False),
    "vector": ("adamw", False),
}


MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, in a checkpoint


def build_optimizers(model: nn.Module, settings: Settings, log=print) -> list:
    """[muon, adamw] over all trainable parameters, each once. Call it after `fully_shard`, which replaces parameters
    (under FSDP1 the order was the reverse). The table of what goes where is logged."""
    table, muon_params, adamw_params = {}, [], {True: [], False: []}
    for name, p in model.named_parameters():  # a tied parameter comes once
        if not p.requires_grad:
            continue
        if p.dtype != torch.float32:
            raise MuonError(f"{name} is {p.dtype}: masters must be fp32, in bf16 small steps vanish")
        role = model.roles.get(name)
        if role is None or role.kind not in ROLES:
            raise MuonError(f"{name}, shape {tuple(p.shape)}: no role says how to optimise it: {role}")
        optimizer, decay = ROLES[role.kind]
        (muon_params if optimizer == "muon" else adamw_params[decay]).append((name, p))
        row = table.setdefault(role.kind, [optimizer, decay, 0, 0])
        row[2], row[3] = row[2] + 1, row[3] + p.numel()
    s, row_blocks = settings, {name: model.roles[name].rows for name, _ in muon_params}
    muon = Muon(muon_params, s.muon_lr, s.muon_momentum, s.weight_decay, row_blocks, COEFFS[s.muon_coeffs])
    decays = {True: s.weight_decay, False: 0.0}
    groups = [dict(params=v, weight_decay=decays[k]) for k, v in adamw_params.items() if v]
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
        lr = s.muon_lr if optimizer == "muon" else s.lr
        log(f"{kind:18}{label:12}{tensors:8d}{elements:16,d}{lr:10.2g}{decays[decay]:8.2g}")
    return [muon, adamw]


def set_rates(optimizers: list, muon_lr: float, lr: float, momentum: float):
    """Rates of the coming step, from the schedule."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            muon = isinstance(optimizer, Muon)
            group.update(dict(lr=muon_lr, momentum=momentum) if muon else dict(lr=lr))


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
    mark = float(zlib.crc32(" ".join(missing).encode()) & 0xFFFF)  # its square and sums over ranks are exact
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
        raise MuonError(f"gradients are None on some ranks only; on this one: {missing or 'no gradient'}")
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
                raise MuonError(f"{tuple(p.shape)} is not the model's: build optimizers after fully_shard")
            key = f"{'muon' if isinstance(optimizer, Muon) else 'adamw'}.{names[p]}"
            state = optimizer.state[p]
            if isinstance(optimizer, AdamW8bit):
                state = dict(zip(MOMENTS, optimizer.moments(p), strict=True))
                own.update({f"{key}.{k}": v for k, v in optimizer.codes(p).items()})
            shared.update({f"{key}.{k}": v for k, v in state.items()})
    return shared, own


@torch.no_grad()
def load_optimizer_state(model: nn.Module, optimizers: list, shared: dict, own: dict | None):
    """Take over what `optimizer_state` gave out and a checkpoint then filled. Without `own` (another world size, or saved
    with fp32 moments) 8-bit state is quantised anew from `shared`."""
    live, codes = optimizer_state(model, optimizers)
    for mine, given, what in ((live, shared, "shared"), (codes, own, "own")):
        given = mine if given is None else given
        given = {k: v for k, v in given.items() if k.startswith(("muon.", "adamw."))}
        both = mine.keys() & given.keys()
        wrong = (mine.keys() ^ given.keys()) | {k for k in both if mine[k].shape != given[k].shape}
        if wrong:
            raise MuonError(f"{what} optimizer state does not fit: {sorted(wrong)[:5]}, {len(wrong)} in all")
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in (o for o in optimizers if isinstance(o, AdamW8bit)):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            key = f"adamw.{names[p]}"
            mine = {k: own[f"{key}.{k}"] for k in optimizer.codes(p)} if own is not None else None
            optimizer.set_moments(p, *(shared[f"{key}.{k}"] for k in MOMENTS), mine)
    for key, tensor in live.items():
        if tensor is not shared[key]:
            local(tensor).copy_(local(shared[key]))
