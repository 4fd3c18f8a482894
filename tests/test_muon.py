"""Muon: orthogonalisation against SVD and float64; sharded steps against a float64 loop and one process, on real ranks.

The failure mode of a sharded optimizer is a hang, so every world runs under the harness's deadline.
"""

import contextlib
import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from conftest import cpu_mesh, full, weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from workers import run

import muon
from kernels.sharded import zeros_like
from muon import KELLER_JORDAN, POLAR_EXPRESS, Muon, MuonError, clip_grads, local, orthogonalize, update_scale

D, FFN = 36, 50  # 50 rows on 4 ranks: 13, 13, 13, 11
SPLITS = {None: None, "qkv": (36, 12, 12), "heads": (12,) * 5}
WORLDS = [(1, None), (2, None), (4, None), (2, (2, 1)), (4, (2, 2))]
LR, DECAY, MOMENTA = 1e-2, 0.1, (0.85, 0.9, 0.95)  # momentum warm-up is part of every comparison


def with_spectrum(m: int, n: int, spectrum, seed=0):
    """(m, n) float64 with the singular values `spectrum`, and its U V^T."""
    g = torch.Generator().manual_seed(seed)
    U, _, V = torch.linalg.svd(torch.randn(m, n, generator=g, dtype=torch.float64), full_matrices=False)
    return U * spectrum @ V, U @ V


def polynomial(s, coeffs):
    """What the five quintics make of singular values s."""
    s = s / s.norm() / 1.02
    for a, b, c in coeffs:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("shape", [(64, 224), (224, 64), (256, 896), (96, 96)])
@pytest.mark.parametrize("kind", ["gauss", "1/k"])
def test_singular_values_end_in_the_band(shape, kind):
    """Polar Express in bf16 takes Gaussian and 1/k spectra into [0.8, 1.2] (0.86 to 1.14 on paper, the rest is bf16)."""
    if kind == "gauss":  # a square one also has values near 0, which no five steps lift
        shape = (96, 160) if shape == (96, 96) else shape
        G = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    else:
        G = with_spectrum(*shape, 1.0 / torch.arange(1, min(shape) + 1))[0].float()
    X = orthogonalize(G)
    assert X.shape == G.shape and X.dtype == torch.bfloat16
    values = torch.linalg.svdvals(X.double())
    assert 0.8 < values.min() and values.max() < 1.2, values
    rms = X.float().square().mean().sqrt() * update_scale(shape)
    assert 0.18 < rms < 0.22, "update RMS is 0.2 (Moonlight)"


@pytest.mark.parametrize("coeffs, error", [(POLAR_EXPRESS, 0.13), (KELLER_JORDAN, 0.3)])
def test_distance_to_the_svd(coeffs, error):
    """In float64 the distance to U V^T is the polynomial's own: 0.09-0.10 for Polar Express, 0.17-0.24 for Keller
    Jordan's; and the singular vectors are kept exactly, only values differ."""
    for spectrum in (1 + torch.rand(64, dtype=torch.float64), 1.0 / torch.arange(1, 65, dtype=torch.float64)):
        G, UV = with_spectrum(64, 224, spectrum)
        X = orthogonalize(G, coeffs, torch.float64)
        assert (X - UV).norm() / UV.norm() < error
        symmetric = X @ UV.mT  # U f(S) U^T: symmetric if the singular vectors are UV's
        assert (symmetric - symmetric.mT).abs().max() < 1e-12


def test_float64_equals_the_polynomial_on_singular_values():
    """Independent of the matrix code: the five quintics applied to each singular value."""
    spectrum = torch.logspace(0, -3, 40, dtype=torch.float64)
    G, UV = with_spectrum(40, 90, spectrum)
    for coeffs in (POLAR_EXPRESS, KELLER_JORDAN):
        expected = with_spectrum(40, 90, polynomial(spectrum, coeffs))[0]
        for H, want in ((G, expected), (G.mT.contiguous(), expected.mT)):
            assert (orthogonalize(H, coeffs, torch.float64) - want).abs().max() < 1e-10


def test_batches_equal_single_matrices_and_zero_stays_zero():
    for shape in ((5, 24, 40), (5, 40, 24)):
        G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        G[2] = 0
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            X = orthogonalize(G, dtype=dtype)
            assert (X[2] == 0).all()
            for i in range(5):
                assert (X[i] - orthogonalize(G[i], dtype=dtype)).abs().max() < bound
    assert (orthogonalize(torch.zeros(8, 8)) == 0).all()


@pytest.mark.parametrize("shape", [(256, 1024), (1024, 256), (513, 600)])
def test_half_products_change_nothing(shape, monkeypatch):
    """Large matrices compute half of each symmetric product, odd heights included; the result is the whole product's."""
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        monkeypatch.setattr(muon, "HALVES", 1 << 20)
        halves = orthogonalize(G, dtype=dtype)
        monkeypatch.setattr(muon, "HALVES", 1 << 60)
        whole = orthogonalize(G, dtype=dtype)
        assert (halves - whole).abs().max() < bound
        assert halves.float().norm() / whole.float().norm() == pytest.approx(1, abs=1e-3)


class Net(nn.Module):
    """Matrices of every awkward kind: fused, tall, 50 rows, 3 rows (none on the last of four ranks), never used."""

    def __init__(self):
        super().__init__()
        for name, inside, outside in (("qkv", D, 60), ("up", D, FFN), ("down", FFN, D)):
            self.add_module(name, nn.ModuleList(nn.Linear(inside, outside, bias=False) for _ in range(3)))
        self.gate = nn.Linear(D, 3, bias=False)
        self.unused = nn.Linear(D, D, bias=False)

    def forward(self, x):
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            q, k, v = qkv(x).split((36, 12, 12), -1)
            x = x + torch.tanh(q * torch.cat([k, v, k], -1))
            x = x + down(torch.relu(up(x)))
        return x * self.gate(x).sum(-1, keepdim=True).tanh()


def initial_net() -> Net:
    torch.manual_seed(0)
    return Net()


def shard(net, world, hsdp):
    mesh = cpu_mesh(world, hsdp)
    for layer in (*net.qkv, *net.up, *net.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def loss(net, t, part=0, parts=1):
    """Of step t; a sum over the batch, so that parts add up to the whole."""
    batch = torch.randn(64, D, generator=torch.Generator().manual_seed(100 + t))
    return net(batch.chunk(parts)[part].to(net.gate.weight.dtype)).square().sum() / 64


def float64_loop(split, steps: int) -> dict:
    """Muon written down once more, in float64, on whole matrices, through the SVD. -> weights by name"""
    net = initial_net().double()
    buffers = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for t in range(steps):
        net.zero_grad()
        loss(net, t).backward()
        for n, p in net.named_parameters():
            if p.grad is None:
                continue
            buffers[n] = MOMENTA[t] * buffers[n] + (1 - MOMENTA[t]) * p.grad
            ahead = MOMENTA[t] * buffers[n] + (1 - MOMENTA[t]) * p.grad
            parts = []
            for block in ahead.split(SPLITS[split]) if split and "qkv" in n else [ahead]:
                U, s, V = torch.linalg.svd(block, full_matrices=False)
                parts.append(U * polynomial(s, POLAR_EXPRESS) @ V * 0.2 * math.sqrt(max(block.shape)))
            with torch.no_grad():
                p.copy_(p * (1 - LR * DECAY) - LR * torch.cat(parts))
    return {n: p.detach() for n, p in net.named_parameters()}


@contextlib.contextmanager
def collectives(counts: Counter):
    """Count what Muon may call; `full_tensor` and redistribution are never allowed inside a step."""

    def counted(name):
        function = getattr(dist, name)
        return lambda *a, **k: counts.update([name]) or function(*a, **k)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "broadcast"):
            patch.setattr(dist, name, counted(name))
        for name in ("full_tensor", "redistribute"):
            patch.setattr(DTensor, name, lambda *a, **k: pytest.fail("a whole tensor was gathered"))
        yield


def train(net, split, dtype, bucket):
    """Three steps. -> (optimizer, the collectives that its steps called)"""
    blocks = {f"qkv.{i}.weight": SPLITS[split] for i in range(3)} if split else None
    optimizer = Muon(net.named_parameters(), LR, 0.0, DECAY, blocks)
    optimizer.dtype, optimizer.bucket = dtype, bucket
    counts = Counter()
    for t in range(3):
        optimizer.zero_grad()
        loss(net, t).backward()
        muon.set_rates([optimizer], LR, 0.0, MOMENTA[t])
        with collectives(counts):
            optimizer.step()
    return optimizer, counts


fp32, bf16 = torch.float32, torch.bfloat16
CASES = (None, fp32, 1500), ("qkv", fp32, 1 << 26), ("heads", fp32, 1500), ("qkv", bf16, 1500)


def compare(rank, world, hsdp):
    start = weights(initial_net())
    for split, dtype, bucket in CASES:
        want, one = float64_loop(split, 3), initial_net()
        train(one, split, dtype, 1 << 26)
        one = weights(one)
        net = shard(initial_net(), world, hsdp)
        optimizer, counts = train(net, split, dtype, bucket)
        assert optimizer.state[net.gate.weight]["momentum"].placements == net.gate.weight.placements
        buckets = len(optimizer._plan())
        assert (buckets > 1) == (bucket == 1500)
        if hsdp:  # a replica joins the exchanges of its own turns, and all broadcasts
            replica = net.gate.weight.device_mesh.get_local_rank(0)
            mine = len(range(replica, buckets, 2)) if hsdp[1] > 1 else 0
            assert counts["all_to_all_single"] == 3 * 2 * mine and counts["broadcast"] == 3 * buckets
        else:
            assert counts == ({"all_to_all_single": 3 * 2 * buckets} if world > 1 else {})
        for p in net.parameters() if hsdp else []:  # replicas are bitwise equal
            theirs = local(p).clone()
            dist.broadcast(theirs, group=p.device_mesh.get_group(0), group_src=0)
            assert torch.equal(theirs, local(p))
        for n, got in weights(net).items():
            assert torch.equal(got, one[n]), n
            if n == "unused.weight":
                assert torch.equal(got, start[n])  # no gradient: no decay either
                continue
            move, exact = (got - start[n]).double(), want[n] - start[n].double()
            assert (move - exact).norm() <= (2e-4 if dtype == torch.float32 else 0.3) * exact.norm(), n
            assert torch.cosine_similarity(move.flatten(), exact.flatten(), 0) > 0.99, n


def different_data(rank, world, hsdp):
    """One process that is handed the sharded run's reduced gradients makes the same weights, bit for bit."""
    net, one = shard(initial_net(), world, hsdp), initial_net()
    blocks = {"qkv.0.weight": SPLITS["qkv"]}
    optimizers = [Muon(m.named_parameters(), LR, 0.95, DECAY, blocks) for m in (net, one)]
    for t in range(3):
        net.zero_grad()
        (loss(net, t, rank, world) * world).backward()
        reference = initial_net()  # the reduced gradients are those of the whole batch
        reference.load_state_dict(weights(net))
        loss(reference, t).backward()
        for p, q, r in zip(net.parameters(), one.parameters(), reference.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.full_tensor().clone()  # step uses gradients up
            assert r.grad is None or (r.grad - q.grad).norm() < 1e-5 * r.grad.norm()
        for optimizer in optimizers:
            optimizer.step()
    return all(torch.equal(a, b) for a, b in zip(*(weights(m).values() for m in (net, one)), strict=True))


@pytest.mark.parametrize("world, hsdp", WORLDS)
def test_sharded_equals_float64_and_one_process(world, hsdp):
    """Every rank sees the same batch, so that gradients are bitwise those of one process: then updates are as well. fp32
    rounding through five quintics that multiply small singular values by up to 8 each gives 2e-4 against float64."""
    run(compare, world, deadline=120, hsdp=hsdp)
    assert all(run(different_data, world, deadline=120, hsdp=hsdp))


def random_pairs(*shapes) -> list:
    """(weight, gradient) of each shape."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=g), torch.randn(shape, generator=g)) for shape in shapes]


def moved(pairs, mesh=None, dtype=torch.bfloat16, **options) -> list:
    """Parameters after one step on `pairs`, which are cut over the mesh."""
    params = []
    for pair in pairs:
        weight, grad = (distribute_tensor(t, mesh, [Shard(0)]) if mesh else t.clone() for t in pair)
        params.append(nn.Parameter(weight))
        params[-1].grad = grad
    optimizer = Muon([(f"w{i}", p) for i, p in enumerate(params)], 0.1, **options)
    optimizer.dtype = dtype
    optimizer.step()
    return params


def large_matrices(rank, world):
    """In bf16, of a size that is worked on alone and by half products, uneven over ranks."""
    pairs, blocks = random_pairs((513, 600), (700, 401), (64, 48)), {"w1": (650, 50)}
    both = [moved(pairs, mesh, row_blocks=blocks) for mesh in (cpu_mesh(world), None)]
    return all(torch.equal(full(a), b) for a, b in zip(*both, strict=True))


def test_large_matrices_do_not_depend_on_the_world_size():
    assert all(run(large_matrices, 2, deadline=60))


def few_matrices(rank, world):
    """Fewer matrices than ranks: some own nothing, some hold no rows."""
    pairs = random_pairs((3, 8), (1, 5))
    params = moved(pairs, cpu_mesh(world), momentum=0.9, weight_decay=0.0, dtype=torch.float32)
    for p, (w, g) in zip(params, pairs, strict=True):
        expected = w - 0.1 * update_scale(w.shape) * orthogonalize(g, dtype=torch.float32)
        assert (full(p) - expected).abs().max() < 1e-5
    return [local(p).shape[0] for p in params]


def test_ranks_without_rows_or_matrices():
    assert run(few_matrices, 4, deadline=60) == [[1, 1], [1, 0], [1, 0], [0, 0]]


def host_rows(rank, world):
    """Where the state of a parameter lies whose rows are on the host and whose mesh is one of GPUs."""
    rows, mesh = torch.ones(4, 3), DeviceMesh("cuda", list(range(world)), _init_backend=False)
    meta = TensorMeta(torch.Size((4 * world, 3)), rows.stride(), rows.dtype)
    p = nn.Parameter(DTensor(rows, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False))
    zeros = zeros_like(p)
    return zeros.to_local().device.type, zeros.shape == p.shape and zeros.placements == p.placements


def test_state_lies_where_the_rows_lie():
    """cpu_offload on a GPU: momentum on the mesh's device would meet gradients on the host, and the step would fail."""
    assert run(host_rows, 2) == [("cpu", True)] * 2


def one_matrix(shape=(48, 80), dtype=torch.float32, **options):
    """-> (parameter, its value, a Muon for it); the parameter has a gradient"""
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(shape, generator=g).to(dtype))
    p.grad = torch.randn(shape, generator=g).to(dtype)
    return p, p.detach().clone(), Muon([("w", p)], **options)


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (16, 512), (512, 16)])
def test_update_rms_is_two_tenths_of_lr(shape):
    """Muon's rate is AdamW's: RMS 0.2 lr +- 10 % per entry, whatever the shape."""
    p, before, optimizer = one_matrix(shape, lr=3e-3, weight_decay=0.0)
    optimizer.step()
    assert (p - before).square().mean().sqrt().item() == pytest.approx(0.2 * 3e-3, rel=0.1)


def test_blocks_have_their_own_scale_and_rms():
    """q | k | v are three matrices: each block's RMS is 0.2 lr, and they move as three separate parameters would."""
    (pair,), heights = random_pairs((96, 64)), (64, 16, 16)
    (fused,) = moved([pair], row_blocks={"w0": heights}, weight_decay=0.0)
    for move in (fused - pair[0]).split(heights):
        assert move.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.1)
    parts = moved(zip(*(t.split(heights) for t in pair), strict=True), weight_decay=0.0)
    assert torch.equal(torch.cat(parts), fused)


def test_update_does_not_depend_on_the_gradients_scale():
    """So a clipped gradient moves the weights no less: clipping comes before, and acts on AdamW's share only."""
    moves = []
    for scale in (1.0, 1e-3, 1e3):
        p, before, optimizer = one_matrix(weight_decay=0.0)
        optimizer.dtype = torch.float32
        p.grad.mul_(scale)
        optimizer.step()
        moves.append(p - before)
    assert all((move - moves[0]).norm() < 1e-4 * moves[0].norm() for move in moves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weight_decay_is_its_exact_factor_and_momentum_keeps_the_dtype(dtype):
    """A zero gradient leaves only the decay: p (1 - lr wd), in fp32, not times the scaled rate; bf16 would lose it."""
    p, before, optimizer = one_matrix(dtype=dtype, lr=4e-4, weight_decay=0.1)
    p.grad.zero_()
    optimizer.step()
    assert torch.equal(p, before * (1 - 4e-4 * 0.1)) and not torch.equal(p, before)
    assert optimizer.state[p]["momentum"].dtype == dtype


def test_watch_sees_every_block_once_with_its_orthogonal_factor():
    _, _, optimizer = one_matrix((96, 64), row_blocks={"w": (64, 16, 16)})
    seen = {}
    optimizer.watch = lambda name, G, X: seen.__setitem__(name, (G.clone(), X))
    optimizer.step()
    assert list(seen) == ["w[0]", "w[1]", "w[2]"]
    for G, X in seen.values():
        assert (X - orthogonalize(G).float()).norm() < 0.02 * X.norm()  # the scale is folded in, in bf16
        assert 0.5 < torch.linalg.svdvals(X).median() < 1.2


def refused(name, p, word, **options):
    with pytest.raises(MuonError, match=word) as caught:
        Muon([(name, p)], **options)
    assert name in str(caught.value) and caught.value.exit_code == 64


@pytest.mark.parametrize("name, tensor, word, options", [
    ("layers.0.ls_a", torch.ones(8), "2-D", {}), ("conv", torch.ones(4, 4, 3), "2-D", {}),
    ("nothing", torch.ones(0, 4), "2-D", {}), ("integers", torch.ones(4, 4, dtype=torch.int32), "int32", {}),
    ("layers.0.attn.qkv.weight", torch.ones(1536), "FSDP1.*fully_shard", {}),
    ("w", torch.ones(6, 4), "do not add up", {"row_blocks": {"w": (4, 1)}}),
    ("w", torch.ones(6, 4, device="meta"), "meta", {}),
])  # fmt: skip
def test_only_whole_matrices_are_taken(name, tensor, word, options):
    refused(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()), word, **options)


def foreign_parameters(rank, world):
    """FSDP1's flat pieces, and matrices that are not cut by rows over one dimension of the mesh."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(initial_net(), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(MuonError, match="weight.*FSDP1.*fully_shard"):
        Muon(net.named_parameters())
    rows, columns, copies = Shard(0), Shard(1), Replicate()
    for placements in ((rows, rows), (rows, columns), (copies, columns), (copies, copies)):
        p = nn.Parameter(distribute_tensor(torch.ones(8, 8), cpu_mesh(world, (2, 2)), placements))
        refused("layers.0.w", p, "placements")


def test_fsdp1_and_foreign_placements_are_refused():
    run(foreign_parameters, 4, deadline=60)


def clipped(rank, world, hsdp, max_norm, scale):
    net = shard(initial_net(), world, hsdp)
    (loss(net, 0, rank, world) * world).backward()
    norm = clip_grads(net, max_norm, scale)
    assert type(norm) is torch.Tensor and norm.ndim == 0
    return norm.item(), {n: p.grad.full_tensor() for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("world, hsdp", WORLDS)
def test_clip_is_torchs_on_one_process(world, hsdp):
    """The norm over all shards (copies counted once), the factor, and the order: scale, norm, clip. A norm below the
    bound stays what it is."""
    for max_norm, scale in ((0.5, 1.0), (0.5, 1e-2), (0.0, 3.0), (1e6, 2.0)):
        net = initial_net()
        loss(net, 0).backward()
        grads = [p.grad.mul_(scale) for p in net.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat([g.flatten().double() for g in grads])).item()
        if max_norm:
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        results = run(clipped, world, hsdp=hsdp, max_norm=max_norm, scale=scale)
        assert len({r[0] for r in results}) == 1 and results[0][0] == pytest.approx(norm, rel=1e-5)
        for n, p in net.named_parameters():
            if p.grad is not None:
                assert (results[0][1][n] - p.grad).norm() < 1e-5 * p.grad.norm(), n


def asymmetric(rank, world, hsdp):
    net = shard(initial_net(), world, hsdp)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    if rank == 1:
        net.gate.weight.grad = None
    with pytest.raises(MuonError, match="None on some ranks only") as caught:
        clip_grads(net, 1.0)
    assert ("gate.weight" in str(caught.value)) == (rank == 1)
    net.gate.weight.grad = None
    assert clip_grads(net, 1.0).item() == 0  # missing everywhere is no fault
    # not finite on one rank: so is the norm on all, and other gradients are not poisoned
    for bad in (math.inf, math.nan):
        net.qkv[0].weight.grad = torch.full_like(net.qkv[0].weight, bad if rank == 0 else 1.0)
        net.up[0].weight.grad = torch.ones_like(net.up[0].weight)
        norm = clip_grads(net, 1.0, 2.0).item()
        assert not math.isfinite(norm) and (local(net.up[0].weight.grad) == 1).all()
    return norm


@pytest.mark.parametrize("world, hsdp", [(2, None), (2, (2, 1)), (4, (2, 2))])
def test_a_gradient_missing_on_one_rank_is_an_error_on_all(world, hsdp):
    """Muon's exchange would hang. And a NaN on one rank is a NaN norm on every rank."""
    assert all(math.isnan(norm) for norm in run(asymmetric, world, hsdp=hsdp))


def float8_gathered(rank, world):
    """torchao wraps weights that are all-gathered in float8: Muon moves the rows inside, as it would plain ones. (gloo
    cannot gather float8, so gradients are set by hand.)"""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    results = []
    for fp8 in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
        if fp8:
            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
            convert_to_float8_training(net, config=config)
        fully_shard(net, mesh=cpu_mesh(world))
        assert (type(net[0].weight.to_local()) is torch.Tensor) != fp8
        optimizer = Muon(net.named_parameters(), lr=1e-2)
        g = torch.Generator().manual_seed(1)
        for p in net.parameters():
            rows = torch.randn(p.shape, generator=g).chunk(world)[rank]
            p.grad = DTensor.from_local(rows, p.device_mesh, p.placements)
            assert type(local(p)) is type(optimizer.state[p]["momentum"].to_local()) is torch.Tensor
        clip_grads(net, 1.0)
        optimizer.step()
        results.append([local(p).clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_float8_weights_are_moved():
    run(float8_gathered, 2, deadline=90)
