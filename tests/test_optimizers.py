"""build_optimizers, both AdamWs, and optimizer state: what goes where, what is refused, what a checkpoint gets back."""

import functools
import sys

import pytest
import reference
import torch
import torch.nn as nn
from conftest import cpu_mesh, full, quiet, tiny_settings, weights
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from workers import run

from kernels import MuonError, local
from kernels.adamw8bit import QUANT_BLOCK, AdamW8bit, dequantize, quantize
from model import Nova, Role
from muon import Muon, build_optimizers, clip_grads, load_optimizer_state, optimizer_state, set_rates

build = functools.partial(build_optimizers, log=quiet)


def initial_nova(embed_rows=None, **changes):
    """`embed_rows`: an embedding of that many rows instead, for tests that never call forward."""
    settings = tiny_settings(**changes)
    torch.manual_seed(0)
    nova = Nova(settings)
    if embed_rows:
        nova.embed.weight = nn.Parameter(torch.empty(embed_rows, settings.d_model))
    with torch.no_grad():
        for name, p in nova.named_parameters():
            p.normal_(0, 0.05) if p.ndim == 2 else p.fill_(1.0 if "scale" in name else 0.1)
    return nova, settings


def shard(nova, world, hsdp=None):
    mesh = cpu_mesh(world, hsdp)
    for layer in nova.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(nova, mesh=mesh)


def built(world=None, hsdp=None, **changes):
    """-> (model, sharded where a world is given, [muon, adamw])"""
    nova, settings = initial_nova(**changes)
    if world:
        shard(nova, world, hsdp)
    return nova, build(nova, settings)


def cut_like(whole, p):
    """`whole`, cut into rows as p is; every rank has it already."""
    if not isinstance(p, DTensor):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def steps(nova, optimizers, first, last):
    """With gradients that are equal bit for bit at every world size; of a few rows only for the embedding."""
    for t in range(first, last):
        g = torch.Generator().manual_seed(1000 + t)
        for name, p in nova.named_parameters():
            grad = torch.randn(p.shape, generator=g) * 0.01
            if name.startswith("embed"):
                grad[torch.rand(p.shape[0], generator=g) < 0.5] = 0
            p.grad = cut_like(grad, p)
        set_rates(optimizers, 2e-3, 1e-3, 0.95)
        for optimizer in optimizers:
            optimizer.step()


def held(optimizers) -> list:
    return [p for o in optimizers for g in o.param_groups for p in g["params"]]


# --- what goes where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["diff", "diff_v2", "standard"])
@pytest.mark.parametrize("tied", [True, False])
def test_each_trainable_parameter_exactly_once(attention, tied):
    """Matrices to Muon; no decay on vectors and gates; the table adds up to the model. What is frozen stays outside."""
    nova, settings = initial_nova(attention=attention, tie_embeddings=tied, attn_gate=True)
    lines = []
    muon, adamw = build(nova, settings, log=lines.append)
    names = {p: n for n, p in nova.named_parameters()}
    params = held([muon, adamw])
    assert len(params) == len(set(params)) == len(names) and set(params) == set(names)
    matrices = reference.block_matrices(settings)
    assert {names[p].split(".", 2)[2] for p in muon.names} == set(matrices)
    # q | k | v are three blocks of one parameter
    assert sum(len(muon.blocks[p]) for p in muon.names) == (len(matrices) + 2) * settings.n_layers
    for group in adamw.param_groups:
        for name in (names[p] for p in group["params"]):
            table = name in ("embed.weight", "lm_head.weight")
            assert group["weight_decay"] == (settings.weight_decay if table else 0), name
    assert sum(int(line[38:54].replace(",", "")) for line in lines[1:]) == sum(p.numel() for p in names)
    assert sum(int(line[30:38]) for line in lines[1:]) == len(names)
    nova.embed.weight.requires_grad_(False)
    assert set(held(build(nova, settings))) == set(names) - {nova.embed.weight}


def test_parameters_without_a_rule_are_refused():
    """No silent fallback: an unknown name, a bf16 master, a flat block matrix, row blocks of something else."""
    for change, problem in (
        (lambda n: setattr(n.layers[1], "extra", nn.Linear(4, 4, bias=False)), r"layers\.1\.extra\.weight.*no role"),
        (lambda n: n.bfloat16(), "bfloat16: masters must be fp32"),
        (lambda n: setattr(n.layers[0].ffn.up, "weight", nn.Parameter(torch.zeros(77))),
         r"layers\.0\.ffn\.up\.weight.*fully_shard"),
        (lambda n: n.roles.update({"norm.scale": Role("block", rows=(64,))}),
         "norm.scale.*Muon needs whole 2-D matrices"),
        (lambda n: n.roles.update({"layers.0.attn.qkv.weight": Role("block", rows=(1, 2))}),
         "layers.0.attn.qkv.weight.*do not add up"),
        (lambda n: n.roles.update({"norm.scale": Role("router")}),
         "norm.scale.*no role says how to optimise it.*router"),
    ):  # fmt: skip
        nova, settings = initial_nova()
        change(nova)
        with pytest.raises(MuonError, match=problem):
            build(nova, settings)


def built_too_early(rank, world):
    """fully_shard replaces parameters: an optimizer built before it would see no gradient for ever."""
    nova, (muon, adamw) = built()
    shard(nova, world)
    nova(*torch.zeros(2, 2, 8, dtype=torch.long))[0].backward()
    with pytest.raises(MuonError, match="before fully_shard"):
        muon.step()
    with pytest.raises(MuonError, match="build optimizers after fully_shard"):
        optimizer_state(nova, [muon, adamw])


def test_optimizers_built_before_sharding_are_found_out():
    run(built_too_early, 2)


def test_settings_reach_the_optimizers():
    """Rates, decay, betas, coefficients, and heads one by one."""
    nova, (muon, adamw) = built(
        muon_coeffs="keller_jordan", muon_split_heads=True, beta1=0.8, beta2=0.9, adam_eps=1e-7, weight_decay=0.3,
        attention="standard",
    )  # fmt: skip
    assert muon.coeffs[0] == muon.coeffs[4] == (3.4445, -4.7750, 2.0315)
    assert muon.blocks[nova.layers[0].attn.qkv.weight] == (16,) * 8
    assert muon.param_groups[0]["weight_decay"] == 0.3 and muon.param_groups[0]["momentum"] == 0.95
    assert adamw.param_groups[0]["betas"] == (0.8, 0.9) and adamw.param_groups[0]["eps"] == 1e-7
    set_rates([muon, adamw], 1.0, 2.0, 0.85)
    assert [g["lr"] for o in (muon, adamw) for g in o.param_groups] == [1.0, 2.0, 2.0]
    assert muon.param_groups[0]["momentum"] == 0.85


# --- 8-bit -------------------------------------------------------------------------------------------------------------


def trained_vector(make=AdamW8bit, count=30, empty=0.0):
    """-> (parameter of 5,000 entries after `count` steps, its start, its optimizer)"""
    p = nn.Parameter(torch.randn(5000, generator=torch.Generator().manual_seed(0)))
    start, optimizer = p.detach().clone(), make([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for t in range(count):
        p.grad = torch.randn(5000, generator=torch.Generator().manual_seed(t)) * torch.logspace(0, -4, 5000)
        p.grad[: int(empty * 5000)] = 0
        optimizer.step()
    return p, start, optimizer


@pytest.mark.parametrize("empty", [0.0, 0.4])
def test_requantising_gives_the_same_codes(empty):
    """Dequantise, quantise: 100 % of codes come back, scales to fp32 rounding, also the last block that is not full and
    blocks whose largest entry is negative, where bitsandbytes' own quantiser would shrink values by 0.7 %."""
    p, _, optimizer = trained_vector(empty=empty)
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
    (p, _, _), (q, start, _) = trained_vector(), trained_vector(torch.optim.AdamW)
    error = (p - q).norm() / (q - start).norm()
    assert 1e-4 < error < 0.06, error


def test_the_eight_bit_step_takes_todays_rate_and_todays_rows():
    """bitsandbytes keeps groups of its own: the schedule's rate must get there. And FSDP may put a parameter's rows into
    other memory at any time: the step must not work on what was there before."""
    p, _, optimizer = trained_vector()
    p.grad, before = torch.ones_like(p), p.detach().clone()
    for rate in (0.0, 1e-2):
        p.data = p.data.clone()
        set_rates([optimizer], 1.0, rate, 0.95)
        optimizer.step()
        assert torch.equal(p, before) == (rate == 0.0)


def test_eight_bit_decays_what_fp32_decays():
    """bitsandbytes keeps groups of its own: tables are decayed, norms and gates are not."""
    _, (_, adamw) = built(adamw="8bit", weight_decay=0.3)
    for optimizer in (adamw, adamw.inner):
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]


def small_run(rank, world, adamw):
    nova, optimizers = built(world, adamw=adamw)
    start, losses = weights(nova), []
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


def test_bitsandbytes_that_is_missing_or_does_not_work_is_an_error_that_names_the_alternative(monkeypatch):
    """Its native library is missing on some machines: found by a step on the device, not by the import."""
    import bitsandbytes

    def broken(self):
        raise RuntimeError("CUDA Setup failed: libbitsandbytes_cuda130.so not found")

    nova, settings = initial_nova(adamw="8bit")
    adamw = bitsandbytes.optim.AdamW8bit
    for fault, words in (
        (lambda patch: patch.setitem(sys.modules, "bitsandbytes", None), "bitsandbytes"),  # import fails
        (lambda patch: patch.setattr(adamw, "step", broken), "libbitsandbytes"),
        (lambda patch: patch.setattr(adamw, "step", lambda self: None), "test step"),
    ):
        with monkeypatch.context() as m, pytest.raises(MuonError, match=f'{words}.*adamw="fp32"') as caught:
            fault(m)
            build(nova, settings)
        assert caught.value.exit_code == 64
    build(nova, settings)


# --- state -------------------------------------------------------------------------------------------------------------


def saved(rank, world, adamw, embed_rows=None):
    """Two steps, the state, three more steps. -> (weights then, shared as whole tensors, own, weights later)"""
    nova, optimizers = built(world, adamw=adamw, embed_rows=embed_rows)
    keys = set(optimizer_state(nova, optimizers)[0])
    steps(nova, optimizers, 0, 2)
    shared, own = optimizer_state(nova, optimizers)
    assert set(shared) == keys, "keys must not depend on the step"
    for name, p in nova.named_parameters():
        for key, tensor in shared.items():
            if name in key and not key.endswith("step"):
                assert tensor.placements == p.placements and tensor.dtype == p.dtype
    shared = {k: full(t).clone() for k, t in shared.items()}
    own = {k: t.clone() for k, t in own.items()}
    now = weights(nova)
    steps(nova, optimizers, 2, 5)
    return now, shared, own, weights(nova)


def resumed(rank, world, adamw, now, shared, own, hsdp=None, embed_rows=None):
    """A new process: weights and state filled in place as a checkpoint does, three steps. -> weights"""
    nova, optimizers = built(world, hsdp, adamw=adamw, embed_rows=embed_rows)
    steps(nova, optimizers, 7, 8)  # whatever was there before must be gone
    mine, _ = optimizer_state(nova, optimizers)
    assert set(mine) == set(shared)
    live = dict(nova.named_parameters()) | mine
    for key, tensor in (now | shared).items():
        local(live[key]).copy_(local(cut_like(tensor, live[key])))
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
    options = dict(adamw="8bit", embed_rows=embed_rows)
    results = run(saved, 2, **options)
    now, shared, _, later = results[0]
    own = [r[2] for r in results]  # of the embedding: it alone has 4,096 entries on a rank
    assert set(own[0]) == {f"adamw.embed.weight.{k}" for k in ("state1", "state2", "absmax1", "absmax2")}
    if world == 2:
        for result in run(resumed, 2, now=now, shared=shared, own=own, **options):
            assert worst(result, later, now) == 0
    for result in run(resumed, world, now=now, shared=shared, own=None, **options):
        assert worst(result, later, now) < (1e-5 if embed_rows == 320 or world == 2 else 0.02)
        for n in later:
            assert n == "embed.weight" or torch.equal(result[n], later[n]), n


def steps_of_a_head(rank, world, adamw):
    """The step counts of all parameters on a rank whose share of the one head's gate is empty, live and restored."""
    nova, optimizers = built(world, adamw=adamw, n_heads=1, n_kv_heads=1)

    def counts(shared):
        return {float(v) for k, v in shared.items() if k.endswith(".step")}

    steps(nova, optimizers, 0, 3)
    shared, _ = optimizer_state(nova, optimizers)
    live = counts(shared)
    changed = {k: torch.tensor(7.0) if k.endswith(".step") else v for k, v in shared.items()}
    load_optimizer_state(nova, optimizers, changed, None)
    empty = not local(nova.layers[0].attn.head_gate).numel()
    return empty, live, counts(optimizer_state(nova, optimizers)[0])


@pytest.mark.parametrize("adamw", ["8bit", "fp32"])
def test_a_rank_without_rows_counts_steps_too(adamw):
    """A checkpoint may take the count from any rank. From 0 a resume would correct its moments for a first step: tenfold."""
    assert run(steps_of_a_head, 2, adamw=adamw) == [(False, {3.0}, {7.0}), (True, {3.0}, {7.0})]


def test_small_second_moments_do_not_round_to_zero():
    """exp_avg / (sqrt(0) + eps) would be a leap of the weight at the next step without a gradient."""
    code = trained_vector(count=1)[2].inner.name2qmap["udynamic"]
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
    nova, optimizers = built()
    shared, _ = optimizer_state(nova, optimizers)
    missing = {k: v for k, v in shared.items() if k != "muon.layers.1.ffn.up.weight.momentum"}
    with pytest.raises(MuonError, match=r"layers\.1\.ffn\.up\.weight\.momentum"):
        load_optimizer_state(nova, optimizers, missing, None)
    with pytest.raises(MuonError, match="1 in all"):
        load_optimizer_state(nova, optimizers, shared | {"adamw.norm.scale.exp_avg": torch.zeros(3)}, None)


def test_state_is_complete_before_the_first_step():
    """Every parameter has its state from the start, so that a checkpoint's keys never depend on the step or the rank."""
    nova, optimizers = built()
    shared, own = optimizer_state(nova, optimizers)
    muons = {n for n, p in nova.named_parameters() if "layers" in n and p.ndim == 2}
    others = {n for n, _ in nova.named_parameters()} - muons
    expected = {f"adamw.{n}.{k}" for n in others for k in ("exp_avg", "exp_avg_sq", "step")}
    assert (
        set(shared) == expected | {f"muon.{n}.momentum" for n in muons}
        and own == {}
        and isinstance(optimizers[0], Muon)
    )


def test_state_that_a_fork_adds_to_muon_is_saved_and_loaded_too():
    """Row moments, say. Left out of a checkpoint they would start at zero after a resume, without a word."""
    nova, optimizers = built()
    p = optimizers[0].param_groups[0]["params"][0]
    rows = optimizers[0].state[p]["rows"] = torch.full((p.shape[0], 1), 3.0)
    shared, own = optimizer_state(nova, optimizers)
    saved = {k: v.clone() for k, v in shared.items()}
    (key,) = (k for k in shared if k.endswith(".rows"))
    rows.zero_()
    load_optimizer_state(nova, optimizers, saved, own)
    assert key.startswith("muon.layers.0") and (rows == 3.0).all()
