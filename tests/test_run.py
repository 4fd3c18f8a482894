"""The whole product, as its users run it: real processes, real files, the real loop.

A tiny model on a small folder of token shards, on one thread, so that losses can be compared to the bit.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_settings

import plan
from launch import drill
from launch.failures import StartupError
from store import Store
from store.store import UPLOAD_SECONDS
from track import health as watch
from track import metrics

TINY = """
import os
data = os.environ["NOVA_TEST_DATA"]
d_model, n_layers, n_heads, n_kv_heads, ffn_hidden, max_len = 32, 2, 4, 2, 64, 32
use_compile, use_fp8, adamw, threads, device = False, "off", "fp32", 1, "cpu"
sequences_per_step, micro_batch = 8, 4
total_steps, warmup_steps, schedule, decay_frac = 12, 2, "wsd", 0.25
muon_lr, lr = 6e-3, 3e-3
log_every, eval_every, ckpt_every = 4, 4, 3
eval_rows, final_eval_rows, val_rows = 2, 4, 4
sample_prompt, sample_tokens = "a", 8
domains = ["code", "math"]
"""


@pytest.fixture(name="world", scope="module")
def fixture_world(tmp_path_factory):
    """(folder for outputs, environment) with data of two domains that a model can learn: noisy repeating bytes."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    for d, domain in enumerate(("code", "math")):
        os.makedirs(folder / "data" / domain)
        pattern = rng.integers(97 + 8 * d, 105 + 8 * d, 23)
        rows = np.tile(pattern, 9000)[: 40 * 33].reshape(40, 33)
        noise = rng.random(rows.shape) < 0.1
        np.save(folder / "data" / domain / "s.npy", np.where(noise, 32, rows).astype(np.uint16))
    meta = {"vocab_size": 257, "tokenizer": "bytes", "eot": 256}
    (folder / "metadata.json").write_text(json.dumps(meta))
    (folder / "tiny.py").write_text(TINY)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "NOVA_", "OMP_"))}
    environ |= {"NOVA_TEST_DATA": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return folder, environ


def command(folder, out, *arguments, ranks=0):
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = os.path.join(ROOT, "train_nova.py")
    return [*launcher, script, str(folder / "tiny.py"), f"--out_dir={folder / out}", *arguments]


def to_the_end(words, environ, folder, deadline) -> tuple[str, int]:
    """(output, exit code). The child has its own process group, which is ended with it: a launcher's ranks as well."""
    child = subprocess.Popen(
        words, env=environ, text=True, cwd=folder, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return child.communicate(timeout=deadline)[0], child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        pytest.fail(f"no end within {deadline} s:\n{child.communicate()[0][-3000:]}")


def train(world, out, *arguments, ranks=0, expect=0, deadline=150, inject=""):
    """Run to the end; the output. `inject`: code that each process runs before the script."""
    folder, environ = world
    words, script = command(folder, out, *arguments, ranks=ranks), os.path.join(ROOT, "train_nova.py")
    if inject:
        (folder / f"{out}.py").write_text(
            f"import os, runpy, sys\nsys.path.insert(0, {ROOT!r})\n{inject}\nsys.argv[0] = {script!r}\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        words[words.index(script)] = str(folder / f"{out}.py")
    output, code = to_the_end(words, environ, folder, deadline)
    assert code == expect, output[-4000:]
    return output


def losses(world, out, kind="step"):
    """{step: loss} of a run's metrics.jsonl, every step once."""
    rows = [r for r in metrics.read_rows(str(world[0] / out / "metrics.jsonl")) if r["kind"] == kind]
    steps = [r["step"] for r in rows]
    assert steps == sorted(set(steps)) or kind != "step", f"a step was written twice: {steps}"
    return {r["step"]: (r["loss"], r.get("grad_norm")) for r in rows}


def status(world, out):
    return json.loads((world[0] / out / "status.json").read_text())


@pytest.fixture(scope="module")
def uninterrupted(world):
    """The run that all others are compared with, and its console."""
    return train(world, "whole")


def test_a_run_trains_reports_exports_and_samples(world, uninterrupted):
    folder = world[0] / "whole"
    report = json.loads((folder / "report.json").read_text())
    assert status(world, "whole")["status"] == "done"
    assert report["step"] == 12 and list(losses(world, "whole")) == list(range(1, 13))
    rows = [r for r in metrics.read_rows(str(folder / "metrics.jsonl")) if r["kind"] == "step"]
    assert rows[7]["epochs"]["code"] < 1 < rows[-1]["epochs"]["code"], (
        "the kills and stops below cross an epoch's end"
    )
    assert report["val_loss"] < np.log(257) - 1 and set(report["val_loss_by_domain"]) == {"code", "math"}
    assert 0 < report["bigram_baseline"] < np.log(257)
    for words in (
        "plan:",
        "first step: Muon orthogonalised 14 blocks, 14 expected",
        "tok/s",
        "ETA",
        "sample:",
        ">> val",
    ):
        assert words in uninterrupted, words
    assert (folder / "export" / "model.safetensors").exists()
    script = os.path.join(ROOT, "sample.py")
    arguments = [str(folder), "--prompt", "ab", "--tokens", "12", "--seed", "3"]
    texts = [
        subprocess.run(
            [sys.executable, script, *arguments, *more],
            env=world[1],
            text=True,
            capture_output=True,
            check=True,
        ).stdout
        for more in ((), (), ("--seed", "4"))
    ]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("ab")


def test_finished_run_given_again_says_so_and_changes_nothing(world, uninterrupted):
    before = {p: p.stat().st_mtime_ns for p in (world[0] / "whole" / "checkpoints").rglob("*.safetensors")}
    output = train(world, "whole")
    assert "is complete" in output
    assert before == {
        p: p.stat().st_mtime_ns for p in (world[0] / "whole" / "checkpoints").rglob("*.safetensors")
    }


def test_two_processes_give_the_loss_curve_of_one(world, uninterrupted):
    train(world, "two", ranks=2)
    one, two = losses(world, "whole"), losses(world, "two")
    assert one.keys() == two.keys()
    for step in one:
        assert two[step] == pytest.approx(one[step], rel=2e-2), step
    assert two[1] == pytest.approx(one[1], rel=1e-3)


def test_ignored_targets_change_neither_loss_nor_gradient(world):
    """Rows of 20 tokens fill 19 of 19 targets, or 19 of 32: the mean is over the valid ones, in the gradient as well."""
    short = world[0] / "short"
    for domain in ("code", "math"):
        os.makedirs(short / "data" / domain)
        rows = np.load(world[0] / "data" / domain / "s.npy")[:, :20]
        np.save(short / "data" / domain / "s.npy", rows)
    (short / "metadata.json").write_text((world[0] / "metadata.json").read_text())
    for name, length in (("full", 19), ("padded", 32)):
        train(world, name, f"--data={short}", f"--max_len={length}", "--total_steps=3", "--sample_tokens=0")
    full, padded = losses(world, "full"), losses(world, "padded")
    for step in full:
        assert padded[step] == pytest.approx(full[step], rel=5e-2), step  # bf16; unscaled it would be 19/32


def kill_at(world, out, step, number, ranks=0, target=None):
    """Start a run, send it a signal when `step` is in its metrics, wait for its end; the output."""
    folder, environ = world
    child = subprocess.Popen(
        command(folder, out, "--log_every=1", ranks=ranks), env=environ, text=True, cwd=folder, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    path, end = folder / out / "metrics.jsonl", time.monotonic() + 120
    try:
        while time.monotonic() < end and child.poll() is None:
            if any(r["kind"] == "step" and r["step"] >= step for r in metrics.read_rows(str(path))):
                break
            time.sleep(0.02)
        (os.killpg if number == signal.SIGKILL else os.kill)(child.pid, number)
        return child.communicate(timeout=90)[0], child.returncode
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


def test_killed_run_given_again_ends_with_the_same_losses(world, uninterrupted):
    kill_at(world, "killed", 7, signal.SIGKILL)
    if status(world, "killed")["status"] != "done":  # on a fast machine it may have ended first
        output = train(world, "killed")
        assert "[resume] step" in output and "bit-exact" in output
    assert losses(world, "killed") == losses(world, "whole")
    assert losses(world, "killed", "evaluation")[12] == losses(world, "whole", "evaluation")[12]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_first_and_the_same_command_goes_on(world, uninterrupted, number):
    out = f"stopped{int(number)}"
    output, code = kill_at(world, out, 4, number)
    if status(world, out)["status"] != "done":
        assert code == 3, output[-2000:]
        state = status(world, out)
        assert (state["status"], state["resumable"]) == ("stopped", True)
        assert state["saved"] == state["step"] >= 4
        train(world, out)
    assert losses(world, out) == losses(world, "whole")


def test_stop_at_and_job_hours_stop_resumable_without_changing_the_curve(world, uninterrupted):
    """Nor do saves by the clock, nor what "auto" became in the first launch."""
    auto = ["--use_fp8=auto", "--use_compile=auto"]
    train(world, "parts", *auto, "--stop_at=5", expect=3)
    assert status(world, "parts")["reason"] == "stop_at"
    train(world, "parts", *auto, "--job_hours=0.0003", expect=3)
    assert status(world, "parts")["reason"] == "job_hours" and status(world, "parts")["saved"] == 6
    output = train(world, "parts", *auto, "--save_minutes=0.00001", "--ckpt_every=100", "--eval_every=100")
    assert "saved step-00000008-latest-" in output
    assert losses(world, "parts") == losses(world, "whole")


def test_a_stopped_launch_waits_for_uploads_no_longer_than_torchrun_waits_for_it(monkeypatch):
    """Else it is killed with a saved checkpoint and a status that says running."""
    agree, hub = SimpleNamespace(signals=SimpleNamespace(when=1000.0)), SimpleNamespace(patience=240.0)

    def seconds(now, left, ended=False, grace=60.0):
        monkeypatch.setattr(time, "monotonic", lambda: now)
        return Store.patience(SimpleNamespace(agree=agree, hub=hub, grace=grace), ended, left)

    assert seconds(1020.0, 500.0) == 30.0
    assert seconds(1070.0, 500.0) == 0.0
    assert seconds(1020.0, 500.0, ended=True) == 500.0, "job_hours: they were reserved for it"
    for left, patience in ((None, UPLOAD_SECONDS), (300.0, 300.0), (-5.0, 240.0)):
        assert seconds(1020.0, left, ended=True) == patience, "the end of the run keeps its budget"
    assert seconds(1020.0, 500.0, grace=None) == 240.0, "plain python: nobody kills"


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")])
def test_out_of_memory_in_any_stage_names_the_settings_and_is_not_retried(error):
    settings, lines = tiny_settings(), []
    planned = plan.of_device(settings, 1, torch.device("cpu"), lines.append)
    assert lines == planned.lines()
    with pytest.raises(watch.OutOfMemory, match="(?s)at step 4.*memory/GPU.*micro_batch=4.*selective") as e:
        with watch.explained_memory(settings, planned, lambda: 3):
            raise error
    assert e.value.exit_code == 70


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["--learning_rte=1"], 64, "learning_rte (command line) is not a setting"),
        (["--device=cuda"], 64, "this machine has no GPU"),
        (["--data=/no/such/folder"], 65, "/no/such/folder"),
        (["--domains=cod,math"], 65, "cod"),
        (["--resume=must"], 74, "--resume=must"),
        (["--schedule_from=out"], 64, "is not the folder of a checkpoint"),
        (["--tracker=wandb"], 64, "wandb cannot be imported"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_its_own_exit_code(world, arguments, code, words):
    output = train(world, "wrong", *arguments, expect=code)
    assert words in output and "Traceback" not in output
    assert not any(line.startswith("step") for line in output.splitlines())


def test_a_second_launch_is_refused_and_leaves_the_firsts_status_alone(world, uninterrupted):
    (world[0] / "taken" / "checkpoints").mkdir(parents=True)
    (world[0] / "taken" / "status.json").write_text('{"status": "running"}')
    with open(world[0] / "taken" / "checkpoints" / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        output = train(world, "taken", expect=74)
    assert "is in use by another run" in output and status(world, "taken") == {"status": "running"}


def test_changed_settings_are_refused_or_accepted_by_name(world, uninterrupted):
    output = train(world, "whole", "--lr=1e-3", expect=64)
    assert "lr: 0.003 -> 0.001" in output and "--allow_change=lr" in output
    output = train(world, "whole", "--d_model=64", expect=64)
    assert "d_model" in output and "another out_dir" in output
    train(world, "other rate", "--stop_at=2", expect=3)
    output = train(world, "other rate", "--lr=1e-3", "--allow_change=lr", "--stop_at=3", expect=3)
    assert "goes on with changed settings" in output and "bit-exact" not in output
    output = train(world, "other rate", "--lr=1e-3", "--micro_batch=1", "--stop_at=4", expect=3)
    assert "goes on to rounding" in output, "sums in another order"
    output = train(world, "other rate", "--lr=1e-3", "--allow_change=data", "--stop_at=5", expect=3)
    assert "goes on with the data that there is now" in output


BAD_ROW = """
import data
real = data.Stream.draw
def draw(self, n, begin, end):
    batch = real(self, n, begin, end)
    if self.g == 56 and n == 8 and os.environ.get("RANK", "0") == "{rank}":
        raise data.DataError("a bad row (injected)")
    return batch
data.Stream.draw = draw
"""


@pytest.mark.parametrize("ranks, bad", [(0, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_data_error_in_a_step_loses_none_of_the_steps_before(world, uninterrupted, ranks, bad):
    """All ranks are healthy and agree: the state is saved, without the batch that the other rank has drawn already."""
    out = f"bad-row-{ranks}"
    output = train(world, out, ranks=ranks, inject=BAD_ROW.format(rank=bad), expect=1 if ranks else 65)
    assert "a bad row (injected)" in output
    assert (status(world, out)["status"], status(world, out)["saved"]) == ("data", 6)
    (state,) = (world[0] / out / "checkpoints").glob("step-00000006-latest-*/state.json")
    assert json.loads(state.read_text())["data"]["samples"] == 6 * 8, (
        "the batch that one rank had drawn is not in it"
    )
    train(world, out, ranks=ranks)
    for step, (loss, _) in losses(world, out).items():
        assert loss == pytest.approx(losses(world, "whole")[step][0], rel=2e-2 if ranks else 0), step


FULL_DISK = """
from store.saver import Saver
def full(self, flight, *arguments):
    raise OSError(28, "No space left on device (injected)")
Saver._write = full
"""


def test_a_stop_whose_save_failed_says_so(world):
    output = train(world, "disk-full", "--stop_at=5", inject=FULL_DISK, expect=3)
    assert "NOT SAVED (step 5 (latest): OSError" in output and "after step 5, saved" not in output
    assert (status(world, "disk-full")["saved"], status(world, "disk-full")["failed_saves"]) == (None, 3)


def test_a_longer_schedule_goes_on_from_a_complete_run(world, uninterrupted):
    """And what a kill left out of the export is put there first."""
    shutil.copytree(world[0] / "whole", world[0] / "longer")
    os.unlink(world[0] / "longer" / "export" / "report.json")
    output = train(world, "longer")
    assert "To train on, raise total_steps" in output and (world[0] / "longer/export/report.json").exists()
    output = train(world, "longer", "--total_steps=16", "--allow_change=total_steps")
    assert (
        "a new horizon: decay from step 12, end at 16" in output and "100% of the decay were done" in output
    )
    assert list(losses(world, "longer")) == list(range(1, 17))


def test_seed_8x_config_names_everything_this_machine_lacks(world):
    folder, environ = world
    script = os.path.join(ROOT, "train_nova.py")
    config = os.path.join(ROOT, "config", "h200_8x.py")
    child = subprocess.run(
        [sys.executable, script, config], env=environ, text=True, capture_output=True, cwd=folder
    )
    assert child.returncode == 64
    assert "no GPU" in child.stderr and "HF_DATASET_REPO" in child.stderr and "Traceback" not in child.stderr
    assert not os.path.exists(folder / "out")


@pytest.mark.slow
def test_a_broken_compiler_is_one_line_that_names_the_setting(world):
    folder, environ = world
    output = train(
        (folder, environ | {"CXX": "/bin/false"}), "broken-compiler", "--use_compile=true", expect=64
    )
    assert "use_compile" in output and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["h200_8x", "h200_8x_10b", "h200_4x", "h200_multinode", "one_gpu_day", "quickstart"]
)
def test_each_config_file_runs_when_shrunk(world, name):
    """The file itself, with its sizes reduced and the GPU parts replaced: every other line of it is used."""
    folder, environ = world
    arguments = [
        "--device=cpu", f"--data={folder}", "--domains=code,math", "--d_model=32", "--n_layers=2", "--n_heads=4",
        "--n_kv_heads=2", "--ffn_hidden=64", "--max_len=32", "--sequences_per_step=8", "--micro_batch=2", "--total_steps=4",
        "--target_tokens=None", "--warmup_steps=1", "--ctx_warmup_steps=0", "--eval_every=2", "--ckpt_every=2",
        "--val_rows=4", "--eval_rows=2", "--final_eval_rows=2", "--threads=1", "--use_compile=false", "--sample_tokens=4",
    ]  # fmt: skip
    ranks = []
    if name == "h200_multinode":
        arguments.append("--shard_size=2")
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    script, config = os.path.join(ROOT, "train_nova.py"), os.path.join(ROOT, "config", f"{name}.py")
    words = [sys.executable, *ranks, script, config, f"--out_dir={folder / name}", *arguments]
    output, code = to_the_end(words, environ, folder, 200)
    assert code == 0, output[-4000:]
    assert json.loads((folder / name / "report.json").read_text())["step"] == 4


@pytest.mark.slow
def test_drill_proves_the_cycle_in_a_folder_of_its_own(world, uninterrupted):
    before = sorted(p.name for p in (world[0] / "whole" / "checkpoints").iterdir())
    output = train(world, "whole", "--drill")
    assert "drill passed" in output and "to the bit" in output
    assert sorted(p.name for p in (world[0] / "whole" / "checkpoints").iterdir()) == before
    assert json.loads((world[0] / "whole" / "drill" / "status.json").read_text())["drill"]["save"] > 0
    assert "deleted its checkpoints and export" in output
    left = {p.name for p in (world[0] / "whole" / "drill").iterdir()}
    assert "metrics.jsonl" in left and not left & {"checkpoints", "export"}, "100 GB of the real run's disk"
    assert drill.drilled(str(world[0] / "whole"))["whole save"] > 0


def test_a_drill_whose_save_fails_says_why():
    store = SimpleNamespace(failures=["step 4 (latest): rank 0: No space left on device"])
    journal, totals = SimpleNamespace(used=lambda: 0.0), SimpleNamespace(losses=[2.0, 1.0])
    metrics = SimpleNamespace(journal=journal, totals=totals)
    done = lambda *_: None  # noqa: E731 (what is handed in, up to the save)
    with pytest.raises(StartupError, match="drill: the save failed: step 4 .*No space left"):
        drill.drill(done, done, done, None, None, store, metrics, exact=True, log=print)


def test_a_drill_whose_losses_differ_after_the_reload_fails():
    """To the bit where that can be, else within a hundredth."""
    done, store = (lambda *_: None), SimpleNamespace(failures=[])
    totals = SimpleNamespace(losses=[2.0, 1.0])
    metrics = SimpleNamespace(journal=SimpleNamespace(used=lambda: 0.0), totals=totals)
    change = lambda: totals.losses.append(1.001)  # noqa: E731
    with pytest.raises(StartupError, match="after the reload .*1.001.* are not those before"):
        drill.drill(done, done, done, change, done, store, metrics, exact=True, log=print)


@pytest.mark.slow
def test_stable_phase_branches_into_a_decay(world, uninterrupted):
    folder = world[0]
    milestone = next(
        p
        for p in (folder / "whole" / "checkpoints").iterdir()
        if p.name.startswith("step-00000006-milestone")
    )
    output = train(world, "branch", f"--schedule_from={milestone}", "--total_steps=9")
    assert "decay from step" in output
    rows = [r for r in metrics.read_rows(str(folder / "branch" / "metrics.jsonl")) if r["kind"] == "step"]
    assert [r["step"] for r in rows] == [7, 8, 9] and rows[-1]["muon_lr"] == pytest.approx(6e-4)
    assert rows[0]["loss"] == losses(world, "whole")[7][0]


@pytest.mark.slow
def test_repeated_non_finite_steps_end_the_run_with_a_black_box(world):
    output = train(
        world, "diverged", "--muon_lr=1e30", "--lr=1e30", "--weight_decay=0", "--grad_clip=0", expect=70
    )
    assert "update skipped" in output and "non-finite steps in a row" in output
    box = json.loads((world[0] / "diverged" / "blackbox.json").read_text())
    assert box["steps"][-1]["samples"][1] % 8 == 0 and status(world, "diverged")["status"] == "failed"


OUT_OF_MEMORY = """
import model, torch
real, calls = model.SoftcapCrossEntropy.forward, []
def forward(*args):
    calls.append(1)
    if len(calls) > 8 and os.environ.get("RANK", "0") == "{culprit}":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.50 GiB (injected)")
    return real(*args)
model.SoftcapCrossEntropy.forward = staticmethod(forward)
"""


@pytest.mark.parametrize(
    "ranks, culprit",
    [(0, 0), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(2, 0, marks=pytest.mark.drill)],
)
def test_out_of_memory_names_the_rank_and_the_setting(world, ranks, culprit):
    """In the middle of a step, while the other rank waits for it: both end, and one line says what to change."""
    code = OUT_OF_MEMORY.format(culprit=culprit)
    said = train(world, f"oom{ranks}{culprit}", ranks=ranks, inject=code, expect=1 if ranks else 70)
    ended = status(world, f"oom{ranks}{culprit}")
    assert (ended["status"], ended["rank"], ended["resumable"]) == ("failed", culprit, False)
    assert "Tried to allocate 3.50 GiB" in ended["why"] and "lower micro_batch=4" in ended["why"]
    assert "activation_checkpointing=selective" in said and "memory" in said


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_gpus_go_through_the_whole_cycle(world, deterministic):
    """On all GPUs of this machine, with what the big configs choose: compiled, float8 where there is any, 8-bit AdamW."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip(
            "no CUDA device: NCCL, streams, pinned copies and the kernels of a real run were not tested"
        )
    ranks = 1 << min(3, torch.cuda.device_count().bit_length() - 1)  # 1, 2, 4 or 8
    arguments = (
        "--device=cuda --use_compile=true --use_fp8=auto --adamw=8bit --drill --micro_batch=1 --d_model=256"
    )
    arguments = [*arguments.split(), "--ffn_hidden=512", "--reduce_every_micro_step=true"]
    words = command(
        world[0], f"gpu{deterministic}", *arguments, f"--deterministic={deterministic}", ranks=ranks
    )
    environ = {k: v for k, v in world[1].items() if k != "CUDA_VISIBLE_DEVICES"}
    output, code = to_the_end(words, environ, world[0], 900)
    assert code == 0 and "drill passed" in output, output[-5000:]


@pytest.mark.slow
def test_a_save_longer_than_the_launchers_grace_is_pointed_out(world):
    words = command(world[0], "grace", "--total_steps=6", ranks=1)
    words.insert(4, "--shutdown-timeout=0")
    output, code = to_the_end(words, world[1], world[0], 100)
    assert code == 0 and output.count("--shutdown-timeout=60") == 1, output


@pytest.mark.slow
def test_budget_ends_decayed_and_in_time(world):
    began = time.monotonic()
    train(
        world,
        "budget",
        "--max_hours=0.01",
        "--total_steps=100000",
        "--log_every=100",
        "--eval_every=100000",
        "--ckpt_every=100000",
    )
    seconds = json.loads((world[0] / "budget" / "report.json").read_text())["elapsed_h"] * 3600
    rows = [r for r in metrics.read_rows(str(world[0] / "budget" / "metrics.jsonl")) if r["kind"] == "step"]
    assert seconds <= 36 and time.monotonic() - began < 120
    assert rows[-1]["muon_lr"] == pytest.approx(6e-4) and rows[-1]["step"] < 100_000


def kill_at_random(world, seed, ranks):
    """Start runs and kill them after random times (all ranks, or one of them) until one gets to the end."""
    folder, environ = world
    rng, out = np.random.default_rng(seed), f"random-{seed}-{ranks}"
    kills = 0
    for _ in range(12):
        child = subprocess.Popen(
            command(folder, out, "--ckpt_every=2", ranks=ranks), env=environ, text=True, cwd=folder, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = child.communicate(timeout=rng.uniform(2.0, 9.0) if kills < 4 else 150)
            assert child.returncode == 0, output[-3000:]
            break
        except subprocess.TimeoutExpired:
            victims = subprocess.run(
                ["pgrep", "-P", str(child.pid)], text=True, capture_output=True
            ).stdout.split()
            # one rank: its peers and the launcher must end by themselves
            one = ranks and victims and rng.random() < 0.5
            (os.kill if one else os.killpg)(int(victims[0]) if one else child.pid, signal.SIGKILL)
            kills += 1
            try:
                child.communicate(timeout=90)
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.communicate()
    assert not [p for p in (folder / out / "checkpoints").iterdir() if p.name.startswith(".tmp-")]
    assert not list((folder / out / "checkpoints").glob("damaged-*"))
    return losses(world, out), kills


@pytest.mark.parametrize(
    "seed", [*(pytest.param(i, marks=pytest.mark.slow) for i in range(2)), *(pytest.param(i, marks=pytest.mark.drill) for i in range(2, 20))]
)  # fmt: skip
def test_killed_at_random_times_the_losses_are_the_uninterrupted_runs(world, uninterrupted, seed):
    curve, kills = kill_at_random(world, seed, ranks=0)
    print(f"seed {seed}: {kills} kills")
    assert curve == losses(world, "whole")


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(i, marks=pytest.mark.drill) for i in range(1, 6)),
    ],
)
def test_one_rank_or_all_killed_at_random_times_on_two_processes(world, two_ranks, seed):
    curve, kills = kill_at_random(world, seed, ranks=2)
    print(f"seed {seed}: {kills} kills")
    assert curve == two_ranks


@pytest.fixture(scope="module")
def two_ranks(world):
    train(world, "two-whole", "--ckpt_every=2", ranks=2)
    return losses(world, "two-whole")
