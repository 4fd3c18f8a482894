"""The first step of a run is watched: a Muon that does not orthogonalise, a frozen parameter, a detached head stop it."""

import itertools
import math

import pytest
import reference
import torch
from conftest import cpu_mesh, quiet, tiny_settings
from test_startup import exchange, outcome
from workers import Rank, run

import model
import muon
from launch import proof as proofs
from track import Step, health


def build(world, **changes):
    """(settings, a tiny Nova under FSDP2, its optimizers)"""
    settings = tiny_settings(muon_lr=1e-4, lr=1e-4, **changes)
    net = model.build_model(settings, cpu_mesh(world), torch.device("cpu"), log=quiet)
    return settings, net, muon.build_optimizers(net, settings, log=quiet)


def expected_blocks(settings) -> int:
    return (len(reference.block_matrices(settings)) + 2) * settings.n_layers  # q | k | v are three


def backward(net, settings, rank, world):
    """The summed loss of this rank's share of 8 rows. Ids above 99 are never seen."""
    rows = torch.randint(0, 100, (8, settings.max_len + 1), generator=torch.Generator().manual_seed(1))
    mine = rows.chunk(world)[rank]
    loss, _ = net(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
    (loss / (8 * settings.max_len / world)).backward()
    return loss


def first_step(rank, world, broken="", tied=True):
    """One real step with Muon, with one thing broken; -> (outcome, lines printed)."""
    settings, net, optimizers = build(world, tie_embeddings=tied, sequences_per_step=8)
    named, head = list(net.named_parameters()), "embed.weight" if tied else "lm_head.weight"
    lines, agree = [], exchange(rank, world)
    dense, blocks = {head: settings.vocab_size}, expected_blocks(settings)
    proof = proofs.FirstStepProof(agree, named, blocks, dense, lines.append)
    optimizers[0].watch = proof.watch
    kept = muon.orthogonalize, model.SoftcapCrossEntropy.apply
    if broken == "identity":
        muon.orthogonalize = lambda G, *a, **k: G / G.norm() * muon.update_scale(G.shape[-2:])
    elif broken == "half":  # one block of many is not orthogonalised
        calls = itertools.count(1)
        muon.orthogonalize = lambda G, *a, **k: kept[0](G, *a, **k) if next(calls) != 3 else G * 0.1
    elif broken == "wrong side":  # semi-orthogonal, but of another matrix
        muon.orthogonalize = lambda G, *a, **k: kept[0](G.flip(-1), *a, **k)
    elif broken == "frozen":
        dict(named)["layers.1.ffn.up.weight"].requires_grad_(False)
    elif broken == "head":
        model.SoftcapCrossEntropy.apply = lambda x, w, *a: kept[1](x, w.detach(), *a)
    try:
        loss = backward(net, settings, rank, world)
        if broken == "nan" and rank == 1:
            named[3][1].grad.to_local()[0] = math.nan
        norm = muon.clip_grads(net, 1.0)
        proof.before_update()
        for optimizer in optimizers:
            if broken != "lazy" or optimizer is optimizers[0]:
                optimizer.step()
        if broken == "skipped" and rank == 0:
            proof.names.pop(), proof.norms.pop()
        proof.after_update(1e-4)
        (mean,) = agree.control([], [float(loss.detach()) / (8 * settings.max_len)])[1]
        if broken == "loss":
            mean -= 0.3
        done = outcome(lambda: proof.conclude(mean, float(norm), math.log(settings.vocab_size)))
    finally:
        muon.orthogonalize, model.SoftcapCrossEntropy.apply = kept
    return done, lines


@pytest.mark.parametrize("tied", [True, False])
def test_a_healthy_first_step_is_proven(tied):
    results = run(first_step, world=2, tied=tied)
    assert [r[0][0] for r in results] == ["ok", "ok"], results
    text = "\n".join(results[0][1])
    blocks = expected_blocks(tiny_settings())
    assert all(words in text for words in (f"{blocks} blocks, {blocks} expected", "0 of", "band", "± 0.2"))
    assert results[1][1] == []


BROKEN = [
    ("identity", "not orthogonalised", True),
    ("half", "not orthogonalised", True),
    ("wrong side", "distance", True),
    ("frozen", "layers.1.ffn.up.weight", True),
    ("head", "embed.weight", True),
    ("head", "lm_head.weight", False),
    ("nan", "non-finite gradient", True),
    ("lazy", "did not move: embed.weight", True),
    ("skipped", "{} blocks, {} expected", True),
    ("loss", "a fresh model starts at", True),
]


@pytest.mark.parametrize("broken, words, tied", BROKEN)
def test_a_broken_first_step_stops_all_ranks(broken, words, tied):
    blocks = expected_blocks(tiny_settings())
    words = words.format(blocks - 1, blocks)
    results = run(first_step, world=2, broken=broken, tied=tied)
    assert all(kind in ("StartupError", "RankFailed") for (kind, _, _), _ in results), results
    assert all(words in text for (_, text, _), _ in results), results


def resumed_before_a_bad_step(rank, world, folder):
    """Two steps of a resumed run, the first of them with a loss that is not finite; is the proof pending after each?"""
    settings, net, optimizers = build(world, out_dir=folder)
    agree = exchange(rank, world)
    agree.first_step_done = lambda: None
    named, blocks, pending = net.named_parameters(), len(model.muon_blocks(settings)), []
    watcher = health.Watcher(settings, agree, named, blocks, optimizers[0], quiet, fresh=False)
    for loss in (math.nan, 5.0):
        backward(net, settings, rank, world)
        norm = float(muon.clip_grads(net, 1.0))
        done = Step(6, loss, {}, norm, (1e-4, 1e-4, 0.95), settings.max_len, 512, {})
        watcher.before_update(done)
        for optimizer in optimizers:
            if math.isfinite(loss):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        watcher.after_update(done)
        pending.append(watcher.proof is not None)
    return pending


def test_a_skipped_first_step_leaves_the_proof_to_the_next(tmp_path):
    """Else a run that was saved in front of a bad step could never be resumed."""
    assert run(resumed_before_a_bad_step, world=1, folder=str(tmp_path)) == [[True, False]]


def test_equal_moves_up_and_down_are_seen_and_gradients_below_epsilon_excused():
    """AdamW's first step moves equal values by equal amounts: their sum stays. A gradient that AdamW cannot feel is no
    fault of the run; one that it can, is."""
    for gradient, moves, problem in ((1.0, True, False), (1e-14, False, False), (1e-3, False, True)):
        p = torch.nn.Parameter(torch.full((4,), 0.625))  # not a power of two: equally fine steps up and down
        p.grad = gradient * torch.tensor([1.0, -1.0, 1.0, -1.0])
        agree = Rank()
        agree.control = lambda flags, sums: (flags, sums)
        proof = proofs.FirstStepProof(agree, [("p", p)], blocks=0, log=quiet)
        proof.before_update()
        with torch.no_grad():
            p.sub_(2.0**-10 * p.grad.sign() * moves)
        proof.after_update(1e-3)
        kind = outcome(lambda proof=proof: proof.conclude(1.0, 1.0))[0]
        assert (kind != "ok") == problem, (gradient, moves, kind)


def test_oracle_agrees_with_the_exact_factor_whatever_the_shape():
    """U V^T from torch's SVD is the identity in the oracle's frame: distance 0; a random orthogonal matrix is not."""
    for shape in ((20, 50), (50, 20), (30, 30)):
        G = torch.randn(shape, dtype=torch.float64)
        U, _, Vh = torch.linalg.svd(G, full_matrices=False)
        low, high, off = proofs.against_oracle(G, U @ Vh)
        assert abs(low - 1) < 1e-6 and abs(high - 1) < 1e-6 and off < 1e-6
        other = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
        assert proofs.against_oracle(G, other[0] @ other[2])[2] > 0.5
