"""build_optimizers, both AdamWs, and optimizer state: what goes where, what is refused, what a checkpoint gets back."""

import sys

import pytest
import reference
import torch
import torch.nn as nn
from conftest import tiny_settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from workers import run

from kernels.adamw8bit import QUANT_BLOCK, AdamW8bit, dequantize, quantize
from model import Nova, Role
from muon import (
    Muon,
    MuonError,
    build_optimizers,
    clip_grads,
    load_optimizer_state,
    local,
    optimizer_state,
    set_rates,
)


def initial_nova(embed_rows=None, **changes):
    """`embed_rows`: an embedding of that many rows instead, for tests that never call forward."""
    settings = tiny_settings(**changes)
    torch.manual_seed(0)
    nova = Nova(settings)
    if embed_rows:
        nova.embed.weight = nn.Parameter(torch.empty(embed_rows, settings.d_model))
    with torch.no_grad():
        for name, p in nova.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 0.05)
            elif "scale" in name:
                p.fill_(1.0)
            else:
                p.fill_(0.1)
    return nova, settings


def shard(nova, world, hsdp=None):
    mesh = init_device_mesh(
        "cpu", hsdp or (world,), mesh_dim_names=("replicate", "shard")[-len(hsdp or (1,)) :]
    )
    for layer in nova.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(nova, mesh=mesh)


def set_gradients(nova, t: int):
    """Gradients of step t, equal bit for bit at every world size; of a few rows only for the embedding."""
    g = torch.Generator().manual_seed(1000 + t)
    for name, p in nova.named_parameters():
        whole = torch.randn(p.shape, generator=g) * 0.01
        if name.startswith("embed"):
            whole[torch.rand(p.shape[0], generator=g) < 0.5] = 0
        if isinstance(p, DTensor):
            i = [i for i, placement in enumerate(p.placements) if placement.is_shard()][0]
            rows = whole.chunk(p.device_mesh.size(i))
            r = p.device_mesh.get_local_rank(i)
            rows = rows[r] if r < len(rows) else whole[:0]
            whole = DTensor.from_local(rows, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        p.grad = whole


def steps(nova, optimizers, first, last):
    for t in range(first, last):
        set_gradients(nova, t)
        set_rates(optimizers, 2e-3, 1e-3, 0.95)
        for optimizer in optimizers:
            optimizer.step()


def weights(nova) -> dict:
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in nova.named_parameters()
    }


def build(nova, settings, log=None):
    return build_optimizers(nova, settings, log or (lambda text: None))


# --- what goes where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["diff", "diff_v2", "standard"])
@pytest.mark.parametrize("tied", [True, False])
def test_each_trainable_parameter_exactly_once(attention, tied):
    """Seven matrices a layer (q | k | v are one parameter, three blocks) to Muon; no decay on vectors and gates; the table
    adds up to the model."""
    nova, settings = initial_nova(attention=attention, tie_embeddings=tied, attn_gate=True)
    lines = []
    muon, adamw = build(nova, settings, lines.append)
    names = {p: n for n, p in nova.named_parameters()}
    held = [p for o in (muon, adamw) for g in o.param_groups for p in g["params"]]
    assert len(held) == len(set(held)) == len(names) and set(held) == set(names)
    matrices = reference.block_matrices(settings)
    assert {names[p].split(".", 2)[2] for p in muon.names} == set(matrices)
    assert (
        sum(len(muon.blocks[p]) for p in muon.names) == (len(matrices) + 2) * settings.n_layers
    )  # q | k | v
    for group in adamw.param_groups:
        for p in group["params"]:
            table = names[p] in ("embed.weight", "lm_head.weight")
            assert group["weight_decay"] == (settings.weight_decay if table else 0), names[p]
    assert sum(int(line[38:54].replace(",", "")) for line in lines[1:]) == sum(p.numel() for p in names)
    assert sum(int(line[30:38]) for line in lines[1:]) == len(names)
    print("\n".join(lines))


def test_frozen_parameters_are_left_alone():
    nova, settings = initial_nova()
    nova.embed.weight.requires_grad_(False)
    held = [p for o in build(nova, settings) for g in o.param_groups for p in g["params"]]
    assert all(p is not nova.embed.weight for p in held)


def test_parameters_without_a_rule_are_refused():
    """No silent fallback: an unknown name, a bf16 master, a flat block matrix, row blocks of something else."""
    nova, settings = initial_nova()
    nova.layers[1].extra = nn.Linear(4, 4, bias=False)
    with pytest.raises(MuonError, match=r"layers\.1\.extra\.weight.*no role"):
        build(nova, settings)
    nova, settings = initial_nova()
    with pytest.raises(MuonError, match="bfloat16: masters must be fp32"):
        build(nova.bfloat16(), settings)
    nova, settings = initial_nova()
    nova.layers[0].ffn.up.weight = nn.Parameter(torch.zeros(77))
    with pytest.raises(MuonError, match=r"layers\.0\.ffn\.up\.weight.*fully_shard"):
        build(nova, settings)
    for name, role, problem in (
        ("norm.scale", Role("block", rows=(64,)), "Muon needs whole 2-D matrices"),
        ("layers.0.attn.qkv.weight", Role("block", rows=(1, 2)), "do not add up"),
        ("norm.scale", Role("router"), "no role says how to optimise it.*router"),
    ):
        nova, settings = initial_nova()
        nova.roles[name] = role
        with pytest.raises(MuonError, match=f"{name}.*{problem}"):
            build(nova, settings)


def built_too_early(rank, world):
    nova, settings = initial_nova()
    muon, adamw = build(nova, settings)
    shard(nova, world)
    nova(torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))[0].backward()
    with pytest.raises(MuonError, match="before fully_shard"):
        muon.step()
    with pytest.raises(MuonError, match="build optimizers after fully_shard"):
        optimizer_state(nova, [muon, adamw])


def test_optimizers_built_before_sharding_are_found_out():
    run(built_too_early, 2)


def test_settings_reach_the_optimizers():
    """Rates, decay, betas, coefficients, and heads one by one."""
    nova, settings = initial_nova(
        muon_coeffs="keller_jordan", muon_split_heads=True, beta1=0.8, beta2=0.9, adam_eps=1e-7, weight_decay=0.3,
        attention="standard",
    )  # fmt: skip
    muon, adamw = build(nova, settings)
    assert muon.coeffs[0] == muon.coeffs[4] == (3.4445, -4.7750, 2.0315)
    assert muon.blocks[nova.layers[0].attn.qkv.weight] == (16,) * 8
    assert muon.param_groups[0]["weight_decay"] == 0.3 and muon.param_groups[0]["momentum"] == 0.95
    assert adamw.param_groups[0]["betas"] == (0.8, 0.9) and adamw.param_groups[0]["eps"] == 1e-7
    set_rates([muon, adamw], 1.0, 2.0, 0.85)
    assert [g["lr"] for o in (muon, adamw) for g in o.param_groups] == [1.0, 2.0, 2.0]
    assert muon.param_groups[0]["momentum"] == 0.85


# --- 8-bit -------------------------------------------------------------------------------------------------------------


def eight_bit_parameter(n=5000, count=30, empty=0.0):
    p = nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(0)))
    optimizer = AdamW8bit([p], lr=1e-2)
    for t in range(count):
        g = torch.Generator().manual_seed(t)
        p.grad = torch.randn(n, generator=g) * torch.logspace(0, -4, n)
        p.grad[: int(empty * n)] = 0
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("empty", [0.0, 0.4])
def test_requantising_gives_the_same_codes(empty):
    """Dequantise, quantise: 100 % of codes come back, scales to fp32 rounding, also the last block that is not full and
    blocks whose largest entry is negative, where bitsandbytes' own quantiser would shrink values by 0.7 %."""
    p, optimizer = eight_bit_parameter(empty=empty)
    state = optimizer.inner.state[optimizer.pieces[p]]
    for i in (1, 2):
        codes, scales, code = state[f"state{i}"], state[f"absmax{i}"], state[f"qmap{i}"]
        values = dequantize(codes, scales, code)
        again, new_scales = quantize(values, code)
        used = scales.repeat_interleave(QUANT_BLOCK)[: p.numel()] > 0
        assert used.float().mean() > 1 - empty - 0.1
        assert torch.equal(again[used], codes[used])
        assert torch.allclose(new_scales, scales, rtol=1e-6)
        assert torch.allclose(dequantize(again, new_scales, code), values, rtol=1e-6, atol=0)
    assert (values.view(-1)[:4864].view(-1, 256).amin(1) < 0).any() or i == 2


def test_eight_bit_agrees_with_fp32():
    """Over 30 steps on dense gradients the total update differs by the quantiser's error, a few per cent."""
    p, _ = eight_bit_parameter()
    q = nn.Parameter(torch.randn(5000, generator=torch.Generator().manual_seed(0)))
    start = q.detach().clone()
    adamw = torch.optim.AdamW([q], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for t in range(30):
        q.grad = torch.randn(5000, generator=torch.Generator().manual_seed(t)) * torch.logspace(0, -4, 5000)
        adamw.step()
    error = (p - q).norm() / (q - start).norm()
    assert 1e-4 < error < 0.06, error


def test_rates_reach_the_eight_bit_optimizer():
    """bitsandbytes keeps groups of its own: the schedule's rate must get there."""
    p, optimizer = eight_bit_parameter()
    before = p.detach().clone()
    set_rates([optimizer], 1.0, 0.0, 0.95)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p, before)
    set_rates([optimizer], 1.0, 1e-2, 0.95)
    optimizer.step()
    assert not torch.equal(p, before)


def test_eight_bit_moves_rows_that_have_moved():
    """FSDP may put a parameter's rows into other memory at any time: the step must not work on what was there before."""
    p, optimizer = eight_bit_parameter(count=1)
    p.data = p.data.clone()
    before = p.detach().clone()
    optimizer.step()
    assert not torch.equal(p, before)


def test_eight_bit_decays_what_fp32_decays():
    """bitsandbytes keeps groups of its own: tables are decayed, norms and gates are not."""
    nova, settings = initial_nova(adamw="8bit", weight_decay=0.3)
    _, adamw = build(nova, settings)
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.3, 0.0]
    assert [g["weight_decay"] for g in adamw.inner.param_groups] == [0.3, 0.0]


def small_run(rank, world, adamw):
    nova, settings = initial_nova(adamw=adamw)
    start = weights(nova)
    shard(nova, world)
    optimizers, losses = build(nova, settings), []
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(0, 40, (4, 33), generator=g).sort(1).values
        loss = nova(ids[:, :-1], ids[:, 1:])[0] / 128
        loss.backward()
        clip_grads(nova, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    end = weights(nova)
    return losses, {n: end[n] - start[n] for n in end}


@pytest.mark.parametrize("world", [1, 2])
def test_a_small_run_with_either_adamw(world):
    """A Nova learns alike with 8-bit and fp32 moments: losses to 2 %, the embedding's move to the quantiser's error."""
    fp32, moved = run(small_run, world, adamw="fp32")[0]
    bit8, moved8 = run(small_run, world, adamw="8bit")[0]
    assert fp32[-1] < fp32[0] - 0.5
    assert abs(bit8[-1] - fp32[-1]) < 0.02 * fp32[-1]
    a, b = moved["embed.weight"], moved8["embed.weight"]
    assert (a - b).norm() / a.norm() < 0.1


def test_without_bitsandbytes_the_error_names_the_alternative(monkeypatch):
    nova, settings = initial_nova(adamw="8bit")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # import fails
    with pytest.raises(MuonError, match='adamw="fp32"') as caught:
        build(nova, settings)
    assert caught.value.exit_code == 64


def test_bitsandbytes_that_loads_but_does_not_work_is_an_error(monkeypatch):
    """Its native library is missing on some machines: found by a step on the device, not by the import."""
    import bitsandbytes

    def broken(self, closure=None):
        raise RuntimeError("CUDA Setup failed: libbitsandbytes_cuda130.so not found")

    nova, settings = initial_nova(adamw="8bit")
    with monkeypatch.context() as m:
        m.setattr(bitsandbytes.optim.AdamW8bit, "step", broken)
        with pytest.raises(MuonError, match='libbitsandbytes.*adamw="fp32"'):
            build(nova, settings)
        m.setattr(bitsandbytes.optim.AdamW8bit, "step", lambda self, closure=None: None)
        with pytest.raises(MuonError, match='test step.*adamw="fp32"'):
            build(nova, settings)
    build(nova, settings)


# --- state -------------------------------------------------------------------------------------------------------------


def saved(rank, world, adamw, hsdp=None, embed_rows=None):
    """Two steps, the state, three more steps. -> (weights then, shared as whole tensors, own, weights later)"""
    nova, settings = initial_nova(embed_rows, adamw=adamw)
    shard(nova, world, hsdp)
    optimizers = build(nova, settings)
    keys = set(optimizer_state(nova, optimizers)[0])
    steps(nova, optimizers, 0, 2)
    shared, own = optimizer_state(nova, optimizers)
    assert set(shared) == keys, "keys must not depend on the step"
    for name, p in nova.named_parameters():
        for key, tensor in shared.items():
            if name in key and not key.endswith("step"):
                assert tensor.placements == p.placements and tensor.dtype == p.dtype
    shared = {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for k, t in shared.items()}
    own = {k: t.clone() for k, t in own.items()}
    now = weights(nova)
    steps(nova, optimizers, 2, 5)
    return now, shared, own, weights(nova)


def resumed(rank, world, adamw, now, shared, own, hsdp=None, embed_rows=None):
    """A new process: weights and state filled in place as a checkpoint does, three steps. -> weights"""
    nova, settings = initial_nova(embed_rows, adamw=adamw)
    shard(nova, world, hsdp)
    optimizers = build(nova, settings)
    steps(nova, optimizers, 7, 8)  # whatever was there before must be gone
    mine, _ = optimizer_state(nova, optimizers)
    assert set(mine) == set(shared)
    whole = dict(nova.named_parameters()) | mine
    for key, tensor in (now | shared).items():
        rows = tensor
        if isinstance(whole[key], DTensor):
            i = [i for i, p in enumerate(whole[key].placements) if p.is_shard()][0]
            parts = tensor.chunk(whole[key].device_mesh.size(i))
            r = whole[key].device_mesh.get_local_rank(i)
            rows = parts[r] if r < len(parts) else tensor[:0]
        with torch.no_grad():
            local(whole[key]).copy_(rows)
    load_optimizer_state(nova, optimizers, mine, None if own is None else own[rank])
    steps(nova, optimizers, 2, 5)
    return weights(nova)


def worst(a: dict, b: dict, start: dict) -> float:
    """Largest error of the three steps' move, relative to it."""
    return max(((a[n] - b[n]).norm() / (b[n] - start[n]).norm()).item() for n in a)


@pytest.mark.parametrize("world, hsdp", [(2, None), (1, None), (4, None), (4, (2, 2))])
def test_fp32_state_moves_between_world_sizes_bit_exactly(world, hsdp):
    """Saved at 2 ranks; three steps later weights are those of the run that never stopped, for equal gradients."""
    now, shared, own, later = run(saved, 2, adamw="fp32")[0]
    assert own == {} and any(k.startswith("muon.layers.0.attn.qkv.weight") for k in shared)
    for result in run(resumed, world, adamw="fp32", now=now, shared=shared, own=None, hsdp=hsdp):
        assert worst(result, later, now) == 0


@pytest.mark.parametrize("embed_rows", [320, 501])
@pytest.mark.parametrize("world", [2, 1, 4])
def test_eight_bit_state(world, embed_rows):
    """Bit-exact at the same world size (codes). At another one too where the blocks of 256 fall on the same entries, as
    with a padded vocabulary; to the quantiser's error where they don't (501 rows)."""
    results = run(saved, 2, adamw="8bit", embed_rows=embed_rows)
    now, shared, _, later = results[0]
    own = [r[2] for r in results]
    # alone has 4,096 entries on a rank
    assert {k.rpartition(".")[0] for k in own[0]} == {"adamw.embed.weight"}
    assert {k.rpartition(".")[2] for k in own[0]} == {"state1", "state2", "absmax1", "absmax2"}
    if world == 2:
        for result in run(resumed, 2, adamw="8bit", now=now, shared=shared, own=own, embed_rows=embed_rows):
            assert worst(result, later, now) == 0
    for result in run(resumed, world, adamw="8bit", now=now, shared=shared, own=None, embed_rows=embed_rows):
        error = worst(result, later, now)
        print(world, embed_rows, error)
        assert error < (1e-5 if embed_rows == 320 or world == 2 else 0.02)
        for n in later:
            assert n == "embed.weight" or torch.equal(result[n], later[n]), n


def steps_of_a_head(rank, world, adamw):
    """The step counts of all parameters on a rank whose share of the one head's gate is empty, live and restored."""
    nova, settings = initial_nova(adamw=adamw, n_heads=1, n_kv_heads=1)
    shard(nova, world)
    optimizers = build(nova, settings)
    steps(nova, optimizers, 0, 3)
    shared, _ = optimizer_state(nova, optimizers)
    empty = not local(dict(nova.named_parameters())["layers.0.attn.head_gate"]).numel()
    live = {float(v) for k, v in shared.items() if k.endswith(".step")}
    for key in [k for k in shared if k.endswith(".step")]:
        shared[key] = torch.tensor(7.0)
    load_optimizer_state(nova, optimizers, shared, None)
    again = {float(v) for k, v in optimizer_state(nova, optimizers)[0].items() if k.endswith(".step")}
    return empty, live, again


@pytest.mark.parametrize("adamw", ["8bit", "fp32"])
def test_a_rank_without_rows_counts_steps_too(adamw):
    """A checkpoint may take the count from any rank. From 0 a resume would correct its moments for a first step: tenfold."""
    assert run(steps_of_a_head, 2, adamw=adamw) == [(False, {3.0}, {7.0}), (True, {3.0}, {7.0})]


def test_small_second_moments_do_not_round_to_zero():
    """exp_avg / (sqrt(0) + eps) would be a leap of the weight at the next step without a gradient."""
    code = eight_bit_parameter(count=1)[1].inner.name2qmap["udynamic"]
    values = torch.tensor([1.0, 1e-9, 1e-30, 0.0])
    codes, scales = quantize(values, code)
    assert (dequantize(codes, scales, code)[:3] > 0).all() and dequantize(codes, scales, code)[3] == 0


@pytest.mark.parametrize("before, after", [("8bit", "fp32"), ("fp32", "8bit")])
def test_state_of_one_adamw_loads_into_the_other(before, after):
    """The shared part has the same keys, so adamw may change at a resume (where settings allow it)."""
    now, shared, _, later = run(saved, 2, adamw=before)[0]
    result = run(resumed, 2, adamw=after, now=now, shared=shared, own=None)[0]
    assert worst(result, later, now) < 0.05


def test_state_that_does_not_fit_is_refused():
    nova, settings = initial_nova()
    optimizers = build(nova, settings)
    shared, _ = optimizer_state(nova, optimizers)
    missing = dict(shared)
    missing.pop("muon.layers.1.ffn.up.weight.momentum")
    with pytest.raises(MuonError, match=r"layers\.1\.ffn\.up\.weight\.momentum"):
        load_optimizer_state(nova, optimizers, missing, None)
    with pytest.raises(MuonError, match="1 in all"):
        load_optimizer_state(nova, optimizers, shared | {"adamw.norm.scale.exp_avg": torch.zeros(3)}, None)


def test_state_is_complete_before_the_first_step():
    """Every parameter has its state from the start, so that a checkpoint's keys never depend on the step or the rank."""
    nova, settings = initial_nova()
    shared, own = optimizer_state(nova, build(nova, settings))
    muons = [n for n, p in nova.named_parameters() if "layers" in n and p.ndim == 2]
    others = [n for n, _ in nova.named_parameters() if n not in muons]
    expected = {f"muon.{n}.momentum" for n in muons}
    expected |= {f"adamw.{n}.{k}" for n in others for k in ("exp_avg", "exp_avg_sq", "step")}
    assert set(shared) == expected and own == {}
    assert isinstance(build(nova, settings)[0], Muon)


def test_state_that_a_fork_adds_to_muon_is_saved_and_loaded_too():
    """Row moments, say. Left out of a checkpoint they would start at zero after a resume, without a word."""
    nova, settings = initial_nova()
    optimizers = build(nova, settings)
    p = optimizers[0].param_groups[0]["params"][0]
    optimizers[0].state[p]["rows"] = torch.full((p.shape[0], 1), 3.0)
    shared, own = optimizer_state(nova, optimizers)
    saved = {k: v.clone() for k, v in shared.items()}
    (key,) = (k for k in shared if k.endswith(".rows"))
    optimizers[0].state[p]["rows"].zero_()
    load_optimizer_state(nova, optimizers, saved, own)
    assert key.startswith("muon.layers.0") and (optimizers[0].state[p]["rows"] == 3.0).all()
