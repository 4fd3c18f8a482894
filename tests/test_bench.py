"""bench.py: peers are what they claim to be, comparisons are fair, rows say no more than they know, the guard guards.

Nothing here is timed: clocks are replaced, or figures of toy shapes are only looked at for their form.
"""

import functools
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
import reference
import torch
import workers

import model
from bench import __main__ as bench
from bench import gpu, peers, tools


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_peers_have_their_published_parameters():
    """GPT-2 small holds 124,439,808 (its checkpoint); nanoGPT's recipe for a CPU prints 0.80M, positions left out; the
    seed's dimensions give 8,171,097,408, or 7,902,661,952 with one matrix for embedding and head."""
    with torch.device("meta"):
        assert count(peers.GPT(50257, 768, 12, 12, 1024, bias=True)) == 124_439_808
        small = peers.GPT(65, 128, 4, 4, 64)
        assert f"{(count(small) - small.positions.weight.numel()) / 1e6:.2f}M" == "0.80M"
        seeds = (65536, 4096, 35, 32, 8, 14336, 2048)
        assert count(peers.Seed(*seeds, tied=False)) == 8_171_097_408
        assert count(peers.Seed(*seeds, tied=True)) == 7_902_661_952


@pytest.mark.parametrize("name", ["0.8M", "12M"])
def test_contenders_have_equal_parameters(name):
    """Within 3 % of nanoGPT's."""
    s = tools.SIZES[name]
    sizes = (s["vocab"], s["d"], s["layers"], s["heads"])
    with torch.device("meta"):
        gpt = count(peers.GPT(*sizes, s["context"]))
        seed = peers.Seed(*sizes, s["heads"] // 2, 3 * s["d"], s["context"])
        others = [count(seed), count(peers.Encoder(*sizes, s["context"]))]
    others.append(model.count_params(tools.nova_settings(s))["total"])
    assert all(abs(n / gpt - 1) < 0.03 for n in others), (gpt, others)


@pytest.mark.parametrize("name, sizes", [("nanogpt", [16]), ("encoder", [16]), ("seed", [1, 96, 16])])
def test_peers_are_causal_and_learn(name, sizes):
    """A later token changes no earlier logit; the loss starts at ln V and falls."""
    torch.manual_seed(0)
    trainer = getattr(peers, name)(65, 32, 2, 2, *sizes)
    x, y = tools.batch_of(tools.SIZES["tiny"])
    before = trainer.model(x).detach()
    assert torch.equal(before[:, :9], trainer.model(torch.cat([x[:, :9], x[:, 9:].flip(0)], 1))[:, :9])
    first = trainer.micro(x, y).item()
    for _ in range(10):
        trainer.update()
        last = trainer.micro(x, y).item()
    assert abs(first - math.log(65)) < 0.2 and last < first - 0.1


def test_seed_port_equals_the_seed():
    """The port's attention is the one that tests/reference.py writes out in float64 numpy from the seed's source."""
    torch.manual_seed(0)
    s = tools.nova_settings(tools.SIZES["tiny"], diff_lambda_init=0.8)
    port = peers.Seed(65, 32, 2, 2, 1, 96, 16).double()
    for p in port.parameters():
        torch.nn.init.normal_(p, std=0.3)
    block = port.layers[0]
    x = torch.randn(1, 16, 32, dtype=torch.float64)
    names = ("qkv", "o_proj", "q_norm", "k_norm", "h_norm", "diff_lambda", "head_gate")
    weights = {n: p.detach().numpy() for n, p in block.named_parameters() if n.startswith(names)}
    want = reference.attention(weights, "", x[0].numpy(), s, 0, form="seed")
    got = block.attend(x, port.cos.double(), port.sin.double()).detach().numpy()[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # the port rotates in fp32, as the seed does


def test_contenders_take_turns(monkeypatch):
    """Every round runs every contender, equally often, in an order that reverses from round to round."""
    clock, calls = [0.0], []
    monkeypatch.setattr(tools.time, "perf_counter", lambda: clock[0])

    def call(name, seconds):
        calls.append(name)
        clock[0] += seconds

    names = {n: functools.partial(call, n, seconds) for n, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    times = tools.measure(names, rounds=4, seconds=0.5)
    assert calls[:6] == ["a", "a", "b", "b", "c", "c"]  # warm-up and calibration
    assert calls[6:] == ["a", "b", "c", "c", "b", "a"] * 2
    assert times == {"a": [1.0] * 4, "b": [2.0] * 4, "c": [4.0] * 4}
    calls.clear()
    assert tools.measure({"a": names["a"]}, 2, seconds=3.0)["a"] == [1.0, 1.0]
    assert len(calls) == 2 + 2 * 3  # short contenders are repeated to fill the time


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    """Both contenders slow down threefold half-way: the ratio of each round, and so the row, stays 2."""
    slow = [1, 1, 3, 3, 3]
    row = tools.compare("x", {"ours": slow, "peer": [2 * t for t in slow]}, "ours", "peer", 6, "tok/s")
    assert row.ratio == 2 and row.spread == 0 and row.verdict == "ahead"
    assert (row.ours_value, row.peer_value) == (2.0, 1.0)  # 6 tokens in the median 3 s, and in 6 s


VERDICTS = [
    ([2.0, 2.1, 1.9, 2.0, 2.0], "ahead"),
    ([0.5, 0.52, 0.5, 0.5, 0.49], "behind"),
    ([1.1, 0.9, 1.3, 1.05, 0.8], "inconclusive"),
    ([1.1, 1.1, 1.0, 1.3, 1.1], "inconclusive"),  # ahead in the median, but its spread reaches 1
    ([3.0], "inconclusive"),  # one repetition has no known spread
    ([math.inf] * 3, "not reached"),
    ([0.0] * 3, "not reached"),
]


@pytest.mark.parametrize("peer, verdict", VERDICTS)
def test_verdicts(peer, verdict):
    row = tools.compare("x", {"ours": [1.0] * len(peer), "peer": peer}, "ours", "peer", 0, "s")
    assert row.verdict == verdict


def test_peak_bytes_are_counted():
    """2 MiB alive beside a passing 4 MiB peak at 6; what was there before does not count."""
    there = torch.zeros(1 << 20)

    def work():
        kept = torch.zeros(1 << 19)
        torch.zeros(1 << 20)
        return kept + there[: 1 << 19]

    assert tools.peak_bytes(work) == 6 << 20


def rows_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.fixture
def rows(capsys):
    """The rows that `python -m bench WORDS --tiny --json` prints, when it has ended well."""

    def rows(words: str) -> list[dict]:
        assert bench.main([*words.split(), "--tiny", "--json"]) == 0
        return rows_of(capsys.readouterr().out)

    return rows


@pytest.fixture
def pooled(monkeypatch):
    """Ranks come from the tests' pool of processes: starting new ones takes seconds."""

    def ranks(function, world, deadline, **arguments):
        if world == 1:
            return [function(0, 1, **arguments)]
        return workers.run(function, world, deadline, **arguments)

    monkeypatch.setattr(tools, "on_ranks", ranks)


CASES = [
    ("train", {"train/tiny/1t", "train/tiny/1t/64"}),
    ("loss", {"loss/chunk16", "loss/chunk32"}),
    ("muon", {"muon/4x16x32", "muon/2ranks/4x16x32"}),
    ("data", {"data/loader", "data/memory"}),
    ("checkpoint", {"checkpoint/pause", "checkpoint/write"}),
    ("scale", {"scale/layers", "scale/ranks"}),
]


@pytest.mark.parametrize("case, prefixes", CASES)
def test_cases_run(case, prefixes, rows, pooled):
    """On toy shapes every case prints its rows, each with both values, ratio, spread and number of repetitions."""
    printed = rows(f"{case} --rounds=2 --threads 1 --no-compile")
    assert {r["case"] for r in printed} == prefixes
    for row in (r for r in printed if "ratio" in r):
        assert row["n"] == 2 and row["ratio"] > 0 and row["ours_value"] > 0 and row["peer_value"] > 0
        assert row["verdict"] in ("ahead", "behind", "inconclusive")


@pytest.mark.parametrize("seeds", [False, True])
def test_the_peers_first_steps_print_what_startup_waits_for(seeds, capsys):
    peers.first_step(seeds)
    assert re.search("^step 1 ", capsys.readouterr().out, re.M)


@pytest.mark.slow
def test_startup_runs(rows):
    """Real processes: Nova's quickstart, nanoGPT's and the seed's, up to their first step; then every import."""
    cases = [r["case"] for r in rows("startup --rounds=1")]
    assert cases == ["startup/first-step"] * 2 + ["startup/imports"]


@pytest.mark.slow
def test_cases_of_two_ranks_run_as_a_user_starts_them():
    """New processes import what they run by name, which works from `python -m bench` too; a rank's error is told."""
    command = [sys.executable, "-m", "bench", "muon", "scale", "--tiny", "--json", "--rounds=2"]
    done = subprocess.run(command, cwd=bench.HERE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {"muon/2ranks/4x16x32", "scale/ranks"} <= {r["case"] for r in rows_of(done.stdout)}
    with pytest.raises(Exception, match="no_such_argument"):
        tools.on_ranks(tools.ranks_step, 1, 60, no_such_argument=1)


def test_quality_runs_on_a_text(tmp_path, rows):
    """A character vocabulary of the text; both curves fall; rows for the final loss and the time to reach the peer's."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    train, validation, vocabulary = tools.characters(str(path))
    assert vocabulary == 28 and len(train) == 8100 and len(validation) == 900
    printed = rows(f"quality --text {path} --steps=20")
    first, *_, last = [r for r in printed if r["case"] == "quality/curve"]
    assert all(last[name] < first[name] for name in ("nova_loss", "nanogpt_loss"))
    assert last["tokens"] == 20 * 64
    assert [r["case"] for r in printed[-2:]] == ["quality/final", "quality/time-to-loss"]


def test_rows_are_parsable_text(capsys, pooled):
    """Without --json a row is `bench CASE name=value …`: blanks separate, and the last word is the verdict."""
    bench.main(["data", "--tiny", "--rounds=2"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("bench ")]
    for line in lines:
        assert all(re.fullmatch(r"[^=\s]+=\S+", word) for word in line[2:-1])
    assert all(line[-1] in ("ahead", "behind", "inconclusive") for line in lines if line[1] == "data/loader")


def test_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["trian"])
    assert "train" in capsys.readouterr().err


ALL = pytest.param([*gpu.CONFIGURATIONS], id="all", marks=pytest.mark.slow)


@pytest.mark.parametrize("configurations", [pytest.param(["bf16", "fp8-tensorwise"], id="two"), ALL])
def test_gpu_script_runs_dry(configurations, rows, monkeypatch):
    """The whole script for the GPU on toy shapes: every case prints, none fails, the extrapolation says what it is."""
    chosen = {name: gpu.CONFIGURATIONS[name] for name in configurations}
    monkeypatch.setattr(gpu, "CONFIGURATIONS", chosen)
    printed = rows("gpu --rounds=1")
    assert not [r for r in printed if r.get("failed") or r.get("skipped")]
    cases = "env attention sdpa block 2layers depth micro_batch muon-layer loss EXTRAPOLATED-8xH200 done"
    assert {r["case"] for r in printed} == {f"gpu/{case}" for case in cases.split()}
    assert [r["configuration"] for r in printed if r["case"] == "gpu/block"] == configurations
    assert all("no_NCCL_ran" in r["note"] for r in printed if r["case"] == "gpu/EXTRAPOLATED-8xH200")


def test_gpu_script_survives_a_failing_configuration(rows, monkeypatch):
    """One that cannot run is a line of the report; the others still count."""
    broken = {"broken": dict(use_fp8="on", use_compile="never"), "bf16": {}}
    monkeypatch.setattr(gpu, "CONFIGURATIONS", broken)
    monkeypatch.setattr(gpu, "CASES", (gpu.case_blocks, gpu.case_extrapolate))
    broken, good, *_ = rows("gpu --rounds=1")
    assert "use_compile" in broken["failed"] and good["configuration"] == "bf16"


def test_gpu_script_begins_no_case_out_of_time(rows):
    """With the minutes used up, every case is a line that says so, and the script ends well."""
    *cases, last = rows("gpu --minutes=0")
    assert all(r["skipped"] == "out_of_time" for r in cases) and last["case"] == "gpu/done"


def test_guard_fails_beyond_its_tolerance_only():
    """A ratio may fall and a count may grow by a quarter; a fact without a baseline is told apart."""
    baseline = {"facts": {"bytes": 100}, "ratios": {"muon": 4.0}}
    larger, slower = ["bytes: 126, baseline 100"], ["muon: 2.9, baseline 4"]
    for size, ratio, said in ((124, 3.1, []), (1, 9.0, []), (126, 3.1, larger), (100, 2.9, slower)):
        assert bench.worse({"facts": {"bytes": size}, "ratios": {"muon": ratio}}, baseline) == said
    assert "no baseline" in bench.worse({"facts": {"new": 1}, "ratios": {}}, baseline)[0]


def test_guard_gives_a_busy_machine_three_tries(monkeypatch, tmp_path, capsys):
    """A ratio that recovers on the second look passes; one that stays low fails with its name."""
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"facts": {}, "ratios": {"muon": 4.0}}))
    monkeypatch.setattr(bench, "BASELINE", str(path))
    monkeypatch.setattr(bench, "facts_now", dict)
    seen = iter([2.0, 4.1])
    monkeypatch.setattr(bench, "ratios_now", lambda: {"muon": next(seen)})
    assert bench.main(["--check"]) == 0
    seen = iter([2.0, 2.5, 2.1])
    assert bench.main(["--check"]) == 1
    assert "muon: 2.5, baseline 4" in capsys.readouterr().out


def test_stored_baseline_fits_the_code():
    """The counts that need no run equal the stored ones; what is stored is what is checked."""
    with open(bench.BASELINE) as f:
        stored = json.load(f)
    settings = tools.nova_settings(tools.SIZES["12M"])
    assert stored["facts"]["parameters 12M"] == model.count_params(settings)["total"]
    assert stored["facts"]["FLOPs per token 12M"] == model.flops_per_token(settings, 256)
    assert all(v > 0 for v in stored["ratios"].values())
