"""What a run shows of itself: true numbers, a file that survives kills and resumes, and warnings about a sick run."""

import json
import math
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import ROOT, tiny_settings

from kernels import device_peak
from schedule import Event, Horizon
from track import LossMeter, Metrics, MetricsError, Step, StepTimer, console, draw, health, read_rows, rows
from track.rows import time_used


class Clock:
    """Monotonic seconds that only move when told to."""

    now = 1000.0

    def __call__(self):
        return self.now


def make(folder, clock=None, world=2, run_id=None, main=True, **changes):
    """Metrics with the lines that they log in `lines`."""
    s, lines = tiny_settings(**{"log_every": 5, "out_dir": str(folder), **changes}), []
    clock = clock or Clock()
    m = Metrics(s, world, "cpu", lambda ctx: 1e6, lines.append, main, clock(), run_id, clock)
    m.machine.peak, m.lines = 1e9, lines  # FLOP/s of one device, so that MFU can be computed by hand
    return m


def launched(*args, last=0, **changes):
    """Metrics of a run that has done `last` steps."""
    m = make(*args, **changes)
    m.launch(0)
    take_steps(m, 1, last)
    return m


def take_steps(m, first, last, loss=2.0, seconds=0.5, seconds_left=None):
    """Steps of 100 tokens."""
    shares = {"data": 0.1, "forward_backward": 0.6, "optimizer": 0.2, "other": 0.1, "total": 1}
    for step in range(first, last + 1):
        m.journal.clock.now += seconds
        by_domain, epochs = {"code": loss, "math": loss}, {"code": 0.5, "math": 0.1}
        done = Step(step, loss, by_domain, 1.0, (4e-4, 2e-4, 0.95), 64, 100, epochs)
        done.seconds = {part: share * seconds for part, share in shares.items()}
        m.step(done, seconds_left)


def found(m, kind):
    """Rows of metrics.jsonl, each strict JSON."""
    with open(m.rows.path) as f:
        return [row for row in map(strict, f) if row["kind"] == kind]


def strict(text):
    return json.loads(text, parse_constant=pytest.fail)


def saved(m):
    """The state of m as a checkpoint brings it back: strict JSON."""
    return json.loads(json.dumps(m.state(), allow_nan=False))


def test_speed_is_per_training_second_and_pauses_count_in_the_total(tmp_path):
    """100 tokens in 0.5 s on 2 GPUs of 1 GFLOP/s at 1 MFLOP a token: 200 tok/s, 100 per GPU, 10 % MFU."""
    m = make(tmp_path)
    clock = m.journal.clock
    clock.now += 30  # start-up
    m.launch(0)
    take_steps(m, 1, 10)
    clock.now += 60
    m.evaluation(10, 1.5, {"code": 1.0, "math": 2.0}, None, seconds=60.0)
    clock.now += 20
    m.save(10, "latest", {"bytes": 5, "seconds": 40.0, "pause": 20.0})
    take_steps(m, 11, 20)
    report = m.report()
    speeds = [report[name] for name in ("tokens_per_second", "tokens_per_second_per_gpu", "mfu")]
    assert speeds == pytest.approx([200, 100, 0.1])
    assert all(r["mfu"] == pytest.approx(0.1) for r in found(m, "step"))
    parts = report["seconds_by_part"]
    assert parts.items() >= {"evaluation": 60, "save": 20, "start-up": 30}.items()
    assert parts == pytest.approx(parts | {"forward_backward": 6, "data": 1})
    assert report["elapsed_h"] * 3600 == pytest.approx(30 + 10 + 80) == pytest.approx(sum(parts.values()))
    speeds = [line for line in m.lines if "tok/s" in line]
    assert len(speeds) == 5 and all("200 tok/s" in line and "MFU 10.0 %" in line for line in speeds)


FIGURES = """step 000005/20, ctx 64, 1.25h left, ETA 8s, loss 2.0000, avg50 2.0000, ppl 7.4, mlr 4.00e-04, alr 2.00e-04,
grad 1.000, 200 tok/s, 100/GPU, 0.50s/step, fwd+bwd 60, optimizer 20, mem , code 2.0000 (epoch 0.50)"""


def test_console_lines_have_the_seeds_figures_and_ours(tmp_path):
    m = launched(tmp_path)
    take_steps(m, 1, 5, seconds_left=4500.0)
    text = "\n".join(m.lines[-4:])
    assert not [figure for figure in re.split(r",\s", FIGURES) if figure not in text], text


def test_eta_follows_a_moved_horizon_and_includes_pauses(tmp_path):
    m = launched(tmp_path, total_steps=100, last=10)
    assert m.eta() == pytest.approx(45)
    m.evaluation(10, 1.5, {}, None, seconds=5.0)  # as long as the ten steps took
    assert m.eta() == pytest.approx(90)
    m.event(Event("horizon", 10, "max_hours end before", Horizon(10, 20)))
    assert m.eta() == pytest.approx(10)
    assert found(m, "event")[0]["end_step"] == 20
    m = launched(tmp_path / "short", total_steps=10**6, max_hours=0.01, last=10)
    assert m.eta() == pytest.approx(36 - 5), "beyond the budget"


def test_a_line_tells_the_speed_of_the_steps_since_the_last_one(tmp_path):
    m = launched(tmp_path, last=5)
    take_steps(m, 6, 10, seconds=0.1)
    assert [line.split()[0] for line in m.lines if "tok/s" in line] == ["200", "200", "1K"]


def test_the_step_timer_adds_up():
    timer = StepTimer("cpu")
    timer.start()
    for part in ("data", "forward_backward", "data", "forward_backward", "optimizer"):
        torch.ones(50_000).cumsum(0)
        timer.mark(part)
    parts = timer.read()
    assert sum(v for k, v in parts.items() if k != "total") == pytest.approx(parts["total"], rel=1e-6)
    assert parts["data"] > 0 and parts["optimizer"] > 0 and parts["other"] >= 0


def test_loss_meter_weighs_tokens_not_rows_or_micro_steps():
    """Against a plain sum over all valid tokens, in float64."""
    torch.manual_seed(0)
    meter, all_losses, by_domain = LossMeter(["a", "b", "c"], "cpu"), [], {0: [], 2: []}
    for _ in range(3):
        targets = torch.randint(-1, 3, (4, 16))
        loss = torch.rand(4, 16) * (targets >= 0)
        domain = torch.tensor([0, 2, 2, 2])
        meter.add(loss, targets, domain)
        all_losses.append(loss[targets >= 0].double())
        for d in by_domain:
            by_domain[d].append(loss[domain == d][targets[domain == d] >= 0].double())
    mean, means, count = meter.read()
    assert mean == pytest.approx(torch.cat(all_losses).mean().item(), rel=1e-12)
    want = {"abc"[d]: torch.cat(v).mean().item() for d, v in by_domain.items()}
    assert means == pytest.approx(want, rel=1e-6) and count == torch.cat(all_losses).numel()
    assert meter.read()[2] == 0  # emptied


def test_loss_meter_is_global_over_ranks():
    other = torch.tensor([[30.0, 0.0], [10.0, 0.0]], dtype=torch.float64)
    meter = LossMeter(["a", "b"], "cpu")
    meter.add(torch.ones(1, 10), torch.zeros(1, 10, dtype=torch.int64), torch.tensor([0]))
    assert meter.read(lambda t: t.add_(other)) == (2.0, {"a": 2.0}, 20)


def test_peaks(monkeypatch, tmp_path):
    """Data sheets by device name, n/a for an unknown one, measured on a CPU."""
    for name, peak in (
        ("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA B200", 2250e12), ("NVIDIA GB200", 2500e12), ("Cerebras", None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert device_peak("cuda:0")[0] == peak
    peak, how = device_peak("cpu")
    assert 1e9 < peak < 1e14 and "measured" in how
    m = launched(tmp_path)
    m.machine.peak = None
    take_steps(m, 1, 5)
    assert any("MFU n/a" in line for line in m.lines) and m.report()["mfu"] is None


def test_rows_are_strict_json_even_when_the_loss_is_not_finite(tmp_path):
    m = launched(tmp_path, last=1)
    take_steps(m, 2, 2, loss=math.nan)
    take_steps(m, 3, 3, loss=math.inf)
    assert [(r["loss"], r["bad"]) for r in found(m, "step")] == [(2.0, False), (None, True), (None, True)]
    report = m.report()
    assert report["bad_steps"] == 2 and report["train_loss"] == 2.0
    assert strict((tmp_path / "report.json").read_text())["bad_steps"] == 2


def test_only_a_smaller_loss_is_the_best(tmp_path):
    """A loss that is no number never is, not even the first."""
    m = launched(tmp_path)
    losses = (math.nan, 3.0, 3.0, math.nan, math.inf, 2.5)
    best = [m.evaluation(i, loss, {"code": loss}) for i, loss in enumerate(losses)]
    assert best == [False, True, False, False, False, True] and m.totals.best == {"step": 5, "loss": 2.5}


def test_a_checkpoint_holds_an_evaluation_that_is_not_finite(tmp_path):
    """Its state is strict JSON: the save after such an evaluation would end the run."""
    m = launched(tmp_path)
    m.evaluation(0, math.nan, {"code": math.nan}, math.inf)
    again = make(tmp_path)
    again.load_state(saved(m))
    again.launch(0)
    assert again.report()["val_loss"] is None and again.report()["best_val"] is None


def test_a_full_disk_costs_rows_and_not_the_run(tmp_path):
    m = launched(tmp_path)
    m.rows.file = open("/dev/full", "a", buffering=1)  # noqa: SIM115
    take_steps(m, 1, 3)
    assert m.totals.tokens == 300
    assert len([line for line in m.lines if "metrics.jsonl" in line and "NOT WRITTEN" in line]) == 1
    m.journal.path = str(tmp_path / "gone" / "time.json")
    m.journal.write()
    assert any("time.json" in line and "NOT WRITTEN" in line for line in m.lines)


def test_a_resume_continues_the_file_without_duplicate_or_lost_steps(tmp_path):
    """Killed at step 9, a torn line at the end, resumed from a checkpoint at step 6."""
    m = launched(tmp_path)
    take_steps(m, 1, 6, loss=4.0)
    m.evaluation(6, 1.5, {"code": 1.5}, None, 2.0)
    state = saved(m)
    take_steps(m, 7, 9)
    m.evaluation(9, 1.0, {"code": 1.0}, None, 2.0)
    with open(m.rows.path, "a") as f:
        f.write('{"kind": "step", "step": 10, "lo')
    m.journal.write()
    again = make(tmp_path, m.journal.clock)
    again.load_state(state)
    assert again.journal.used() == pytest.approx(9 * 0.5), "what a kill threw away was paid for, too"
    again.launch(6)
    take_steps(again, 7, 12)
    assert again.eta() == pytest.approx(8 * 0.5 * (1 + 2 / 6))  # the pace of this launch's steps
    assert [(r["step"], r["tokens"]) for r in found(again, "step")] == [(i, 100 * i) for i in range(1, 13)]
    assert [r["step"] for r in found(again, "evaluation")] == [6]
    report = again.report()
    assert report["restarts"] == 1 and report["best_val"] == 1.5 and report["tokens_seen"] == 1200
    assert report["train_loss"] == 3.0  # of the last 50 steps, whatever the launch


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        own = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, own=own: (calls.append(name), own(*a)))
    rows.write_json(str(tmp_path / "report.json"), {"loss": math.nan})
    assert calls == ["fsync", "replace"]
    assert json.loads((tmp_path / "report.json").read_text()) == {"loss": None}


def test_time_used_survives_a_kill_and_counts_every_launch(tmp_path):
    m = launched(tmp_path, last=40)  # 20 s, then killed: nothing is called any more
    seconds, launches = time_used(str(tmp_path))
    assert launches == 1 and 20 - rows.JOURNAL_SECONDS - 0.5 <= seconds <= 20
    again = launched(tmp_path, m.journal.clock, last=40)
    assert again.journal.used() == pytest.approx(seconds + 20) and again.journal.restarts == 1
    m.journal.clock.now += 100  # the last save and its upload
    again.close()
    assert time_used(str(tmp_path))[0] == pytest.approx(seconds + 120)
    fresh = make(tmp_path, m.journal.clock, resume="never")
    assert fresh.journal.used() == 0 and fresh.journal.restarts == 0


def test_other_ranks_write_nothing(tmp_path):
    m = launched(tmp_path / "out", main=False, last=10)
    m.evaluation(10, 1.0, {"code": 1.0})
    m.save(10, "latest", {"pause": 0.1})
    m.sample(10, "text")
    m.report()
    assert not os.path.exists(tmp_path / "out") and not m.lines
    assert m.totals.best == {"step": 10, "loss": 1.0}


def test_the_report_has_the_seeds_fields_and_ours(tmp_path):
    m = launched(tmp_path, last=5)
    m.evaluation(5, 1.25, {"code": 1.0, "math": 1.5}, 1.8, 1.0)
    m.report(status="done", fp8=False, compile=True, optimizer="both", model="Nova", bigram_baseline=2.4)
    report = strict((tmp_path / "report.json").read_text())
    seed = "step train_loss val_loss val_ppl best_val elapsed_h tokens_seen gpus fp8 compile optimizer model hardware"
    ours = "seconds_by_part mfu memory_peak_gb restarts bad_steps bits_per_byte bigram_baseline val_loss_by_domain status"
    assert not set(f"{seed} {ours}".split()) - set(report)
    assert report["val_ppl"] == pytest.approx(math.exp(1.25)) and report["best_step"] == 5
    table = "\n".join(m.lines)
    assert "val_loss" in table and "1.2500" in table and "bigram_baseline" in table


def test_a_new_run_in_an_old_folder_leaves_the_old_runs_numbers(tmp_path):
    launched(tmp_path, last=3).close()
    launched(tmp_path, resume="never", run_id="out-2")
    assert len(read_rows(str(tmp_path / "metrics.before-out-2.jsonl"))) == 4
    assert [r["kind"] for r in read_rows(str(tmp_path / "metrics.jsonl"))] == ["launch"]


def test_rows_come_with_the_checkpoint_of_another_machine(tmp_path):
    for folder, last in (("here", 3), ("checkpoint", 9)):
        m = launched(tmp_path / folder, last=last)
        m.close()
    here = make(tmp_path / "here")
    here.load_state(m.state(), str(tmp_path / "checkpoint"))
    here.launch(8)
    assert [r["step"] for r in found(here, "step")] == list(range(1, 9)), "a hole, or a step twice"
    here.load_state(m.state(), str(tmp_path / "nowhere"))
    assert rows.last_step(here.rows.path) == 8


def test_a_finished_run_that_only_reports_again_keeps_its_speed(tmp_path):
    """As on a machine that has nothing but the final checkpoint."""
    m = launched(tmp_path, last=3)
    again = make(tmp_path / "elsewhere")
    again.load_state(saved(m))
    again.launch(3)
    assert again.report()["tokens_per_second"] == m.report()["tokens_per_second"] > 0


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_gets_the_numbers_and_goes_on_with_the_same_run(name, tmp_path, monkeypatch):
    """It is imported on use."""
    sent, calls = [], []
    fake = types.SimpleNamespace(init=lambda **kw: calls.append(kw), finish=lambda: calls.append("finish"))
    fake.log = lambda values, step=None: sent.append((step, values))
    monkeypatch.setitem(sys.modules, name, fake)
    m = launched(tmp_path, tracker=name, run_id="out-1", last=3)
    m.evaluation(3, 1.0, {"code": 1.0})
    m.report()
    assert "finish" not in calls
    m.close()
    assert [step for step, _ in sent][:4] == [1, 2, 3, 3] and sent[0][1]["loss"] == 2.0
    assert sent[3][1]["val_loss"] == 1.0 and calls[0]["config"]["d_model"] == 64 and calls[-1] == "finish"
    assert calls[0]["name"] == "out-1" and calls[0]["resume"] == "allow"
    assert calls[0].get("id") == ("out-1" if name == "wandb" else None), "trackio.init has no id"


def test_a_missing_tracker_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MetricsError, match="pip install wandb, or --tracker=none") as error:
        make(tmp_path, tracker="wandb")
    assert error.value.exit_code == 64


def test_without_matplotlib_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    m = launched(tmp_path, last=5)
    m.evaluation(5, 1.0, {"code": 1.0})
    m.evaluation(5, 1.0, {"code": 1.0})
    m.report()
    assert sum("pip install matplotlib" in line for line in m.lines) == 1


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="loss.png was not drawn: matplotlib is not installed")
    m = launched(tmp_path, last=30)
    m.evaluation(30, 1.0, {"code": 1.0, "math": 1.2})
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = read_rows(m.rows.path)
    draw({"one": rows, "two": rows, "empty": []}, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_peak_memory_is_this_processs_own():
    """getrusage's peak is inherited: a run that a large process starts would report that one's."""
    ask = "import sys, track; print(track.memory('cpu')['peak'])"
    large = f"x = b'x' * 10**9; import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])"
    done = subprocess.run([sys.executable, "-c", large], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert 0.05 < float(done.stdout) < 0.8, done.stderr


def test_smooth_does_not_lag():
    assert console.smooth([1.0, 3.0, 8.0, 7.0], 1) == [1.0, 4.0, 6.0, 7.0]
    line = [float(i) for i in range(50)]
    assert console.smooth(line) == pytest.approx(line)


def toy():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({n: torch.nn.Linear(8, 8, bias=False) for n in ("good", "frozen", "dead")})
    x = torch.randn(4, 8)
    return model, lambda: model["frozen"](model["good"](x)).square().mean()


@torch.no_grad()
def descend(parameters):
    for p in parameters:
        p -= 0.1 * p.grad


def test_frozen_and_dead_parameters_are_named():
    model, loss = toy()
    movement = health.Movement(model.named_parameters())
    for _ in range(3):
        loss().backward()
        model["dead"].weight.grad = torch.zeros(8, 8)  # as good as none
        movement.saw_gradients()
        descend([model["good"].weight])
        model.zero_grad(set_to_none=True)
    frozen, dead = movement.report()
    assert "FROZEN: frozen.weight" in frozen and "DEAD: dead.weight" in dead
    assert "good" not in frozen + dead


def test_healthy_parameters_give_no_warning_and_ranks_are_added_up():
    """A parameter whose gradient is zero on one rank is alive when another rank saw one."""
    model, loss = toy()
    del model["dead"]
    movement = health.Movement(model.named_parameters())
    loss().backward()
    movement.saw_gradients()
    descend(model.parameters())
    assert movement.report() == []
    other = {name: [64, 64, True] for name, _ in model.named_parameters()}
    idle = health.Movement(model.named_parameters())
    assert len(idle.report()) == 1 and idle.report(lambda mine: [mine, other]) == []


def test_masters_too_coarse_for_their_updates_are_noticed():
    """The first Nova script's fault: bf16 weights lose an update below half a unit in the last place."""
    p = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    movement = health.Movement([("norm.scale", p)])
    p.grad = torch.full_like(p, 2e-3)
    movement.saw_gradients()
    descend([p])
    assert movement.report()[0].startswith("FROZEN: norm.scale")


def test_the_slowest_rank_is_named_only_when_it_lags():
    ranks = [{"host": f"node{i // 4}", "data": 0.1, "tflops": 700.0} for i in range(8)]
    assert health.straggler(ranks, 2.0) is None and health.straggler(ranks[:1], 2.0) is None
    ranks[5]["tflops"], ranks[3]["data"] = 620.0, 0.35
    assert health.straggler(ranks, 2.0) is None
    ranks[5]["tflops"] = 500.0
    assert "rank 5 on node1 computes at 500 TFLOP/s, the median is 700" in health.straggler(ranks, 2.0)
    ranks[3]["data"] = 0.5
    assert "rank 3 on node0 waited 0.50 s of a step of 2.00 s" in health.straggler(ranks, 2.0)


def test_the_black_box_holds_the_last_steps_and_the_largest_gradients(tmp_path):
    model, loss = toy()
    loss().backward()
    agree = types.SimpleNamespace(rank=0, gather=lambda mine: [mine, {**mine, "good.weight": math.inf}])
    settings, muon = tiny_settings(out_dir=str(tmp_path), max_bad_steps=2), types.SimpleNamespace()
    named, lines = model.named_parameters(), []
    watcher = health.Watcher(settings, agree, named, 0, muon, lines.append, fresh=False)
    for i in range(1, 41):
        bad = Step(i, math.nan if i > 38 else 1.0, {"code": 1.0}, 1.0, (1e-3, 1e-3, 0.9), 64, 512, {})
        watcher.before_update(bad)
    box = json.loads((tmp_path / "blackbox.json").read_text())
    assert [s["step"] for s in box["steps"]] == list(range(9, 41)) and box["steps"][-1]["loss"] is None
    assert box["steps"][-1]["samples"] == [39 * 8, 40 * 8] and box["reason"] == "non-finite steps"
    assert list(box["largest_gradient_norms"]) == ["good.weight", "frozen.weight"]
    assert box["largest_gradient_norms"]["good.weight"] is None, "it is not finite"
    assert lines == [f"the last 32 steps are in {tmp_path}/blackbox.json"]
    with pytest.raises(health.Diverged, match="2 non-finite steps in a row up to step 40.*samples 312 and"):
        watcher.after_update(bad)
