"""model.py is what its docstring says: against float64 numpy, at every width. Sharded: test_model_sharded.py."""

import math
import re

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import quiet, tiny_settings, weights
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import model
from kernels import BLOCK
from muon import build_optimizers
from settings import Settings

FORMS = ["diff", "diff_v2", "standard"]
VARIANTS = {  # every switch of the model is on in one of them and off in another
    "diff": dict(attention="diff"),
    "diff, untied": dict(attention="diff", tie_embeddings=False, layer_scale=0.0, diff_lambda_init=0.8),
    "diff_v2": dict(attention="diff_v2"),
    "diff_v2, gated": dict(attention="diff_v2", attn_gate=True, head_gate=False, z_loss=1e-3),
    "standard": dict(attention="standard"),
    "standard, gated": dict(attention="standard", attn_gate=True, logit_softcap=0.0, layer_scale=0.0),
}


def make(dtype=torch.float32, noise=True, **changes):
    """An initialised model on the CPU; with noise, no parameter is left at the value that makes it do nothing."""
    s = tiny_settings(**changes)
    nova = model.Nova(s)
    model.init_weights(nova, s)
    if noise:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in nova.parameters():
                scale = 0.3 if p.ndim == 1 else 4 / p.shape[1] ** 0.5 / 10
                p += scale * torch.randn(p.shape, generator=generator)
    return nova.to(dtype), s


def tokens(s, B=2, T=None, seed=0):
    """ids and next-token targets, (B, T) each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, s.vocab_size, (B, (T or s.max_len) + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:].contiguous()


def one_step(nova, ids, targets) -> list:
    """[loss, *gradients of all parameters]"""
    nova.zero_grad()
    loss, _ = nova(ids, targets)
    loss.backward()
    return [loss.detach(), *(p.grad for p in nova.parameters())]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_loss_equal_the_numpy_model(name):
    """1e-6 in float64: what is left is the fp32 of the RoPE tables and of 1 - lambda_0."""
    nova, s = make(torch.float64, **VARIANTS[name])
    ids, targets = tokens(s, T=24)
    targets[0, 3:9] = -1
    want = reference.logits(reference.to_numpy(nova.state_dict()), ids.numpy(), s)
    got = nova(ids).detach()[..., : s.vocab_size].numpy()
    assert np.abs(got - want).max() < 1e-6 * max(1, np.abs(want).max())
    loss, token_loss = nova(ids, targets)
    want_loss, want_tokens = reference.cross_entropy(want, targets.numpy(), s.z_loss)
    assert abs(loss.item() - want_loss) < 1e-6 * want_loss
    assert np.abs(token_loss.numpy() - want_tokens).max() < 1e-5


def seed_layer(s):
    torch.manual_seed(0)
    oracle = reference.SeedAttention(s).double()
    with torch.no_grad():
        for p in oracle.parameters():
            p += 0.2 * torch.randn_like(p)
    return oracle


def test_the_seeds_form_is_the_oracle_in_torch_and_in_numpy():
    """Two transcriptions of the first script's attention agree, and differ from ours."""
    s = tiny_settings(attention="diff", diff_lambda_init=0.8)
    oracle = seed_layer(s)
    x = torch.randn(1, 20, s.d_model, dtype=torch.float64)
    got = oracle(x, 1 - 0.8)[0].detach().numpy()
    weights = reference.to_numpy(oracle.state_dict())
    want = reference.attention(weights, "", x[0].numpy(), s, 0, form="seed")
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()  # the script's RoPE angles are fp32
    ours = reference.attention(weights, "", x[0].numpy(), s, 0)
    assert np.abs(ours - want).max() > 0.1 * np.abs(want).max()


def moved(attention, x, shift: int) -> float:
    """Largest change of an attention layer's output when all positions move by `shift`, relative to its size."""
    T = x.shape[1]
    if isinstance(attention, reference.SeedAttention):
        a, b = (attention(x, 0.2, first) for first in (0, shift))
    else:
        cos, sin = model.rope_tables(attention.D // attention.streams, T + shift, 500_000.0)
        a, b = (attention(x, cos[f : f + T], sin[f : f + T], torch.tensor(0.2)) for f in (0, shift))
    return ((a - b).abs().max() / a.abs().max()).item()


@pytest.mark.parametrize("shift", [1, 17, 1000])
@pytest.mark.parametrize("form", [*FORMS, "seed"])
def test_scores_depend_on_relative_positions_only(form, shift):
    """And the test has teeth: the first script's attention fails it by a wide margin."""
    s = tiny_settings(attention="diff" if form == "seed" else form)
    layer = seed_layer(s) if form == "seed" else make(torch.float64, attention=form)[0].layers[0].attn
    with torch.no_grad():
        layer.qkv.weight *= 3  # sharp attention
        change = moved(layer, torch.randn(2, 40, s.d_model, dtype=torch.float64), shift)
    assert change > 0.05 if form == "seed" else change < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_no_position_sees_the_future_bit_for_bit(form, dtype):
    nova, s = make(dtype, attention=form, attn_gate=True)
    ids, _ = tokens(s)
    with torch.no_grad():
        before = nova(ids)
        for t in (1, 31, 32, 63):
            changed = ids.clone()
            changed[:, t:] = (changed[:, t:] + 1) % s.vocab_size
            after = nova(changed)
            assert torch.equal(before[:, :t], after[:, :t])
            assert not torch.equal(before[:, t], after[:, t])


@pytest.mark.parametrize("form", FORMS)
def test_grouped_heads_equal_repeated_heads(form):
    """2 kv heads for 4 query heads compute what 4 kv heads with repeated rows do."""
    few, s = make(torch.float64, attention=form)
    many, _ = make(torch.float64, attention=form, n_kv_heads=4)
    state = {n: t.clone() for n, t in few.state_dict().items()}
    for i in range(s.n_layers):
        name = f"layers.{i}.attn.qkv.weight"
        q, k, v = state[name].split(few.roles[name].rows)
        k, v = (t.unflatten(0, (2, s.head_dim)).repeat_interleave(2, 0).flatten(0, 1) for t in (k, v))
        state[name] = torch.cat([q, k, v])
    many.load_state_dict(state)
    ids, _ = tokens(s)
    assert (few(ids) - many(ids)).nan_to_num().abs().max() < 1e-9


@pytest.mark.parametrize("form", FORMS)
def test_attention_kernels_agree(form):
    """Padded keys, one call with a wide value, blocks of queries: forward and backward, in a length that the block does
    not divide, with two query heads a kv head."""
    nova, s = make(torch.float64, attention=form, max_len=2 * BLOCK + 7)
    ids, targets = tokens(s)
    results = []
    for kernel in ("padded", "wide", "blocks"):
        for block in nova.layers:
            block.attn.kernel = kernel
        results.append(one_step(nova, ids, targets))
    for a, *others in zip(*results, strict=True):
        assert all((a - b).abs().max() <= 1e-9 * (1 + a.abs().max()) for b in others)


def test_rope_tables_are_precise_at_position_32767():
    """fp32 rounding of the exact value (6e-8); fp32 angles would err by 1e-3 there."""
    cos, sin = model.rope_tables(128, 32768, 500_000.0)
    angle = 32767 * np.longdouble(500_000.0) ** (-np.arange(0, 128, 2) / np.longdouble(128))
    for table, exact in ((cos[-1, :64], np.cos(angle)), (sin[-1, 64:], np.sin(angle))):
        assert np.abs(table.double().numpy() - exact.astype(np.float64)).max() < 1e-7
    assert cos.dtype == sin.dtype == torch.float32


@pytest.mark.parametrize("chunk", [7, 32, 1000])
@pytest.mark.parametrize(("cap", "z_loss"), [(0.0, 0.0), (5.0, 0.0), (5.0, 1e-2)])
def test_chunked_loss_equals_whole_loss(chunk, cap, z_loss):
    """Value and gradients in fp32, with ignored targets, padded ids, a cap that bites and chunks that do not divide."""
    torch.manual_seed(0)
    N, d, vocab, padded = 50, 24, 100, 128
    x = torch.randn(N, d, requires_grad=True)
    weight = torch.randn(padded, d, requires_grad=True)
    targets = torch.randint(0, vocab, (N,))
    targets[::5] = -1
    targets[1], targets[2] = 0, vocab - 1
    z = F.linear(x, weight[:vocab])
    z = cap * torch.tanh(z / cap) if cap else z
    whole = F.cross_entropy(z, targets, ignore_index=-1, reduction="none")
    total = whole.sum() + z_loss * (z.logsumexp(1).square() * (targets >= 0)).sum()
    want = torch.autograd.grad(total / 40, (x, weight))
    loss, token_loss = model.SoftcapCrossEntropy.apply(x, weight, targets, vocab, cap, z_loss, chunk)
    got = torch.autograd.grad(loss / 40, (x, weight))
    assert torch.allclose(loss, total, rtol=1e-6)
    assert torch.allclose(token_loss, whole, atol=1e-5) and not token_loss.requires_grad
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 1e-6 * b.norm()
    assert got[1][vocab:].abs().max() == 0  # padded rows


def test_the_gradient_of_a_bf16_stream_is_scaled_without_bias():
    """1/3001 in bf16 is 0.13 % off; rounding each element instead leaves the mean where it was."""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 64).bfloat16().requires_grad_() for n in (96, 128))
    loss, _ = model.SoftcapCrossEntropy.apply(x, weight, torch.randint(0, 128, (96,)), 128, 50.0, 0.0, 32)
    once = torch.autograd.grad(loss, x, retain_graph=True)[0].double()
    scaled = torch.autograd.grad(loss / 3001, x)[0].double()
    assert abs((scaled * once).sum() * 3001 / (once * once).sum() - 1) < 3e-4


def test_the_heads_gradient_is_summed_in_fp32():
    """256 chunks of one sign: each bf16 sum would lose what is below 1/256 of it."""
    torch.manual_seed(0)
    x, weight = torch.rand(1024, 16).bfloat16(), torch.randn(32, 16).bfloat16().requires_grad_()
    targets = torch.full((1024,), 3)
    loss, _ = model.SoftcapCrossEntropy.apply(x, weight, targets, 32, 0.0, 0.0, 4)
    got = torch.autograd.grad(loss, weight)[0].double()
    exact = weight.detach().double().requires_grad_()
    want = torch.autograd.grad(F.cross_entropy(x.double() @ exact.T, targets, reduction="sum"), exact)[0]
    assert (got - want).norm() < 5e-3 * want.norm()


@pytest.mark.parametrize("tie", [True, False])
def test_an_evaluation_makes_no_gradients(tie):
    """The loss without gradients takes the FLOPs of the logits alone."""
    nova, s = make(tie_embeddings=tie)
    counts = []
    for inputs in (tokens(s)[:1], tokens(s)):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            nova(*inputs)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_ignored_targets_change_nothing():
    nova, s = make(z_loss=1e-3)
    ids, targets = tokens(s)
    half = targets.clone()
    half[1] = -1  # the second row contributes nothing
    loss, *grads = one_step(nova, ids, half)
    alone, *want = one_step(nova, ids[:1], targets[:1])
    assert torch.allclose(loss, alone, rtol=1e-6) and nova(ids, half)[1][1].abs().max() == 0
    for a, b in zip(grads, want, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    nothing = torch.full_like(targets, -1)
    assert nova(ids, nothing)[1].abs().max() == 0
    assert all(t.abs().max() == 0 for t in one_step(nova, ids, nothing))  # false for NaN too


def test_padded_ids_get_no_probability():
    nova, s = make()
    ids, targets = tokens(s)
    assert s.padded_vocab_size == 320
    with torch.no_grad():
        before = nova(ids, targets)[0]
        assert nova(ids)[..., s.vocab_size :].softmax(-1).isnan().all()  # all -inf
        assert torch.equal(nova(ids).softmax(-1)[..., s.vocab_size :], torch.zeros(2, 64, 63))
        nova.embed.weight[s.vocab_size :] = 1e3
        assert torch.equal(nova(ids, targets)[0], before)


def test_rotation_and_soft_cap_stay_fp32_in_a_bf16_model():
    """bf16 knows 39 values between 40 and 50; the capped logits must be finer than that."""
    nova, s = make(torch.bfloat16)
    with torch.no_grad():
        z = nova(tokens(s)[0] * 0)[..., : s.vocab_size]
        loss, token_loss = nova(*tokens(s))
        attention, x = nova.layers[0].attn, torch.randn(1, 64, 64).bfloat16()
        turned = attention.position(x, attention.q_norm.scale, *nova.tables[:2])
    assert {t.dtype for t in (z, loss, token_loss, turned, *nova.tables[:2])} == {torch.float32}
    assert not torch.equal(z, z.bfloat16().float())


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("d, heads, layers, vocab", [(64, 4, 4, 257), (512, 8, 4, 4096), (4096, 32, 2, 8192)])
def test_the_first_loss_is_ln_v(d, heads, layers, vocab, tie):
    """Within 0.1 at every width. (A tied embedding of std 0.02 would start at 46 at d 4096.)"""
    sizes = dict(d_model=d, n_heads=heads, n_kv_heads=heads // 4, n_layers=layers, vocab_size=vocab)
    ffn = 2 * d if d < 4096 else 1024
    nova, s = make(**sizes, ffn_hidden=ffn, tie_embeddings=tie, noise=False)
    with torch.no_grad():
        loss = nova(*tokens(s))[1].mean().item()
    assert abs(loss - math.log(vocab)) < 0.1


@pytest.mark.parametrize("tie", [True, False])
def test_weights_start_at_their_spread(tie):
    """Every parameter, in the second of eight layers and the last: output projections shrink with the depth, lambda
    grows with the layer, what is multiplied starts at one, gates at a half, the branches at LayerScale."""
    s = dict(n_layers=8, tie_embeddings=tie, d_model=128, ffn_hidden=256)
    tables = 1 / 128 if tie else 0.02, 0.2 / math.sqrt(128)
    start = dict(zip(("embed.weight", "lm_head.weight", "norm.scale"), (*tables, 1.0), strict=True))
    scales = [f"{n}.scale" for n in ("attn_norm", "ffn_norm", "attn.q_norm", "attn.k_norm", "attn.h_norm")]
    for layer in (1, 7):
        names = dict.fromkeys(reference.block_matrices(tiny_settings(**s)), 0.02)
        names |= dict.fromkeys(("attn.o_proj.weight", "ffn.down.weight"), 0.02 / 4)
        names |= dict.fromkeys(("attn.lambda_proj.weight", "attn.gate_proj.weight"), 0.0)
        names |= dict.fromkeys(scales, 1.0) | {"attn.head_gate": 1.0, "ls_a": 0.1, "ls_f": 0.1}
        names |= {"attn.diff_lambda": 0.8 - 0.6 * math.exp(-0.3 * layer)}
        start |= {f"layers.{layer}.{n}": value for n, value in names.items()}
    for form in ("diff", "diff_v2"):
        nova, _ = make(noise=False, attention=form, attn_gate=True, layer_scale=0.1, **s)
        found = {n: p for n, p in nova.state_dict().items() if not re.match(r"layers\.[^17]\.", n)}
        assert len(found) > 20 and found.keys() <= start.keys()
        for n, p in found.items():
            if p.ndim == 2 and start[n]:
                assert p.std().item() == pytest.approx(start[n], rel=0.05), n
                assert abs(p.mean()) < start[n] / 20, n
            else:
                assert torch.equal(p, torch.full_like(p, start[n])), n


def storages(tree) -> dict:
    tensors = (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor))
    return {storage._cdata: storage for storage in (t.untyped_storage() for t in tensors)}


class Held(TorchDispatchMode):
    """Bytes of the tensors made inside that are still alive: `now`, and the largest value of it at any operation."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given, made = storages((args, kwargs)), storages(out)
        for key in made.keys() - given.keys():  # not a view
            self.storages[key] = StorageWeakRef(made[key]), made[key].nbytes()
        self.peak = max(self.peak, self.now)
        return out

    @property
    def now(self) -> int:
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        return sum(size for _, size in self.storages.values())


@pytest.mark.parametrize("d, vocab", [(64, 4096), pytest.param(256, 65536, marks=pytest.mark.slow)])
def test_the_loss_needs_a_quarter_of_the_whole_losss_memory(d, vocab):
    """Forward and backward in bf16, chunks of 256."""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, d, dtype=torch.bfloat16, requires_grad=True) for n in (2048, vocab))
    targets = torch.randint(0, vocab, (2048,))

    def whole():
        z = F.linear(x, weight).float()
        F.cross_entropy(50 * torch.tanh(z / 50), targets, reduction="sum").backward()

    def chunked():
        model.SoftcapCrossEntropy.apply(x, weight, targets, vocab, 50.0, 0.0, 256)[0].backward()

    peaks = []
    for function in (whole, chunked):
        x.grad = weight.grad = None
        with Held() as held:
            function()
        peaks.append(held.peak)
    assert peaks[1] <= peaks[0] / 4, [p / 2**20 for p in peaks]


NAMES = {  # frozen, with those of reference.block_matrices: checkpoints and exports are read by these names
    "embed.weight": (320, 64), "norm.scale": (64,), "layers.0.attn_norm.scale": (64,), "layers.0.ffn_norm.scale": (64,),
    "layers.0.attn.q_norm.scale": (16,), "layers.0.attn.k_norm.scale": (16,), "layers.0.attn.h_norm.scale": (16,),
    "layers.0.attn.diff_lambda": (4,), "layers.0.attn.head_gate": (4,), "layers.0.ls_a": (64,), "layers.0.ls_f": (64,),
}  # fmt: skip


@pytest.mark.parametrize("changes, less, more", [
    (dict(), "", {}),
    (dict(tie_embeddings=False), "", {"lm_head.weight": (320, 64)}),
    (dict(attention="diff_v2", attn_gate=True), "h_norm|diff_lambda",
     {"layers.0.attn.lambda_proj.weight": (4, 64), "layers.0.attn.gate_proj.weight": (4, 64)}),
    (dict(attention="standard", layer_scale=0.0, head_gate=False), "h_norm|diff_lambda|head_gate|ls_", {}),
], ids=str)  # fmt: skip
def test_state_dict_names_and_shapes_are_frozen(changes, less, more):
    s = tiny_settings(n_layers=1, **changes)
    blocks = {f"layers.0.{n}": shape for n, shape in reference.block_matrices(s).items()}
    assert blocks["layers.0.attn.qkv.weight"] == ((192, 64) if s.attention == "diff_v2" else (128, 64))
    want = {n: shape for n, shape in NAMES.items() if not (less and re.search(less, n))} | blocks | more
    nova = model.on_meta(s)
    assert {n: tuple(t.shape) for n, t in nova.state_dict().items()} == want


def test_a_tied_model_has_one_matrix_and_learns_after_a_first_call_in_inference_mode():
    nova, s = make()
    with torch.inference_mode():
        nova(tokens(s)[0])
    one_step(nova, *tokens(s))
    assert nova.lm_head is None and nova.embed.weight.grad[: s.vocab_size].abs().min(1).values.max() > 0


@pytest.mark.parametrize("changes", [
    *VARIANTS.values(), dict(attention="diff", head_gate=False), dict(attention="diff_v2", tie_embeddings=False),
], ids=str)  # fmt: skip
def test_counts_equal_the_formula_and_the_real_model(changes):
    s = tiny_settings(n_layers=3, **changes)
    counts = model.count_params(s)
    assert counts == reference.counts(s) | {"total": sum(p.numel() for p in model.Nova(s).parameters())}
    assert sum(rows * columns for rows, columns in model.muon_blocks(s)) == counts["block"]


def test_a_parameter_without_a_role_is_an_error(monkeypatch):
    class Scaled(model.SwiGLU):
        def __init__(self, s):
            super().__init__(s)
            self.extra = torch.nn.Parameter(torch.ones(s.ffn_hidden))

    monkeypatch.setattr(model, "SwiGLU", Scaled)
    with pytest.raises(model.ModelError, match=r"layers\.0\.ffn\.extra has no role"):
        model.Nova(tiny_settings())


def test_the_seeds_dimensions():
    """The first script called 7.9 B parameters (8.2 B stored) a 10B model. Our diff form has its parameters exactly."""
    untied = dict(diff=8_171_097_408, diff_v2=8_762_881_888, standard=8_171_091_808)
    for form, total in untied.items():
        s = Settings(vocab_size=65536, attention=form, tie_embeddings=False)
        assert model.count_params(s)["total"] == total
    assert model.count_params(Settings(vocab_size=65536))["total"] == 7_902_661_952


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=str)
def test_flops_equal_torchs_counter(changes):
    """Forward and backward; SDPA as its two (backward: four) matrix products, v of D beside q, k of D/2."""
    nova, s = make(**changes)
    for block in nova.layers:
        block.attn.kernel = "wide"
    ids, targets = tokens(s)
    with sdpa_kernel([SDPBackend.MATH]), FlopCounterMode(display=False) as counter:
        one_step(nova, ids, targets)
    assert counter.get_total_flops() == model.flops_per_token(s, s.max_len) * ids.numel()


@pytest.mark.parametrize("form", FORMS)
def test_row_blocks_cover_the_fused_matrix(form):
    nova, s = make(attention=form)
    name, height = "layers.0.attn.qkv.weight", nova.layers[0].attn.qkv.weight.shape[0]
    q = 128 if form == "diff_v2" else 64
    assert nova.roles[name].rows == (q, 32, 32) and q + 64 == height
    heads = make(attention=form, muon_split_heads=True)[0].roles[name].rows
    assert sum(heads) == height and set(heads) == ({8, 16} if form == "diff" else {16})


@pytest.mark.parametrize("form", FORMS)
def test_every_parameter_gets_a_gradient_and_moves(form):
    """By the run's own optimizers, at the first step: none is dead, none is forgotten, no update is lost to rounding."""
    nova, s = make(attention=form, attn_gate=True, tie_embeddings=False, noise=False)
    optimizers, before = build_optimizers(nova, s, log=quiet), weights(nova)
    one_step(nova, *tokens(s, B=8))
    for n, p in nova.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, n
    for optimizer in optimizers:
        optimizer.step()
    for n, p in nova.named_parameters():
        rows = slice(0, s.vocab_size if n in ("embed.weight", "lm_head.weight") else None)
        used = p.grad[rows] != 0
        share = (p != before[n])[rows][used].float().mean()
        assert used.float().mean() > 0.5 and share > 0.99, (n, share)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_gives_identical_gradients_and_the_same_names(form, mode):
    both = [make(attention=form, activation_checkpointing=which)[0] for which in ("none", mode)]
    assert len({tuple(nova.state_dict()) for nova in both}) == 1
    results = (one_step(nova, *tokens(tiny_settings())) for nova in both)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputation_keeps_what_it_says():
    """Bytes that the blocks hold after forward, in d_model values a token and layer: nothing kept but the block's input
    under "full"; attention and the narrow matmuls besides under "selective"."""
    kept = {}
    for mode in ("none", "selective", "full"):
        per_layers = []
        for layers in (2, 6):
            sizes = dict(n_layers=layers, d_model=128, ffn_hidden=448, max_len=128)
            nova, s = make(torch.bfloat16, activation_checkpointing=mode, **sizes)
            ids, _ = tokens(s)
            x = nova.embed(ids)
            cos, sin, keep = nova.constants(ids.device)
            with Held() as held:
                for block, k in zip(nova.layers, keep, strict=True):
                    x = block(x, cos, sin, k)
            per_layers.append(held.now)
        kept[mode] = (per_layers[1] - per_layers[0]) / 4 / (ids.numel() * 2 * 128)
    assert 0.9 < kept["full"] < 1.3 and 4 < kept["selective"] < 11, kept
    assert kept["none"] > 2.5 * kept["selective"], kept


def test_errors_name_the_setting():
    nova, s = make()
    ids, targets = tokens(s)
    for inputs, problem in (
        ([torch.full_like(ids, 257)], "vocab_size=257.*outside 0..256"),
        ([ids, torch.full_like(ids, -2)], "vocab_size=257.*targets hold"),
        ([torch.cat([ids, ids], 1)], "max_len=64.*128 tokens"),
        ([ids, targets[:, 1:]], r"targets \(2, 63\)"),
        ([ids.int()], "int64"),
    ):
        with pytest.raises(model.ModelError, match=problem):
            nova(*inputs)
    with pytest.raises(model.ModelError, match="vocab_size=None"):
        s.vocab_size = None
        model.Nova(s)
    assert model.ModelError.exit_code == 64
