"""What a newcomer meets in the first minutes: each odd machine works, or is told in one line what to do."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from workers import ROOT

import settings
from kernels import devices

SMALL = """--total_steps=4 --warmup_steps=1 --eval_every=2 --ckpt_every=2 --log_every=1 --d_model=32 --n_heads=2
--n_kv_heads=1 --n_layers=1 --ffn_hidden=64 --max_len=64 --sequences_per_step=4 --micro_batch=4 --domains=code
--val_rows=4 --eval_rows=4 --final_eval_rows=4 --sample_tokens=8""".split()
TRAIN = ["train_nova.py", "config/quickstart.py", *SMALL]
ASCII = dict(LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")


def run(*command, code: int, python=(sys.executable,), **options) -> str:
    """Everything that the command said, after its exit code and the absence of a traceback are checked."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) | options
    done = subprocess.run([*python, *command], env=environ, timeout=100, **options)
    text = ((done.stdout or b"") + (done.stderr or b"")).decode(errors="replace")
    assert done.returncode == code and "Traceback" not in text, text
    return text


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> str:
    """A small dataset, in a folder with a space and a character outside ASCII."""
    folder = tmp_path_factory.mktemp("my tökens")
    (folder / "notes.txt").write_text("The naïve reader counts: one, two, three. " * 400, encoding="utf-8")
    run("data.py", "pack", f"{folder}/packed", f"code={folder}/notes.txt", "--val=0.1", code=0)
    return f"{folder}/packed"


def status(out) -> dict:
    return json.loads(Path(out, "status.json").read_text(encoding="utf-8"))


def test_a_python_without_torch_and_an_old_one_are_told_what_to_do(tmp_path):
    bare = (sys.executable, "-S")  # no site-packages
    for script in (["train_nova.py"], ["plan.py"], ["data.py"], ["sample.py"], ["-m", "bench"]):
        text = run(*script, code=71, python=bare)
        assert "torch" in text and ".venv" in text and text.count("\n") == 1, text
    old = "import sys; sys.version_info = (3, 8); from launch import entry; entry.prepare()"
    assert "needs Python 3.11 or newer" in run("-c", old, code=71)


def test_a_console_that_cannot_take_a_character_or_is_gone_does_not_end_the_work(tmp_path):
    said = "from launch import entry; entry.prepare(lost='going on'); [print('loss 5.5 \\xb1 0.2', flush=True) for _ in range(9)]"
    text = run("-c", said, code=0, env=ASCII)
    assert text == "loss 5.5 ? 0.2\n" * 9
    with open("/dev/full", "wb") as full:
        text = run("-c", said, code=0, stdout=full)
    assert "No space left" in text and "going on" in text and text.count("\n") == 1, text
    read, write = os.pipe()
    os.close(read)
    assert "Broken pipe; going on" in run("-c", said, code=0, stdout=write)
    os.close(write)
    said += f"; open({str(tmp_path / 'mine')!r}, 'w').write('1')"
    run("-c", shlex.join([sys.executable, "-c", said]) + " >&- 2>&-", code=0, python=("bash",))
    assert (tmp_path / "mine").read_text() == "1", "a file got the number of a closed stream"


@pytest.mark.slow
def test_a_run_works_in_an_ascii_locale_in_a_folder_with_spaces_and_without_a_console(tmp_path, tokens):
    text = run(*TRAIN, f"--data={tokens}", f"--out_dir={tmp_path / 'a b'}", code=0, env=ASCII)
    assert "a fresh model starts at" in text and status(tmp_path / "a b")["status"] == "done"
    run("sample.py", f"{tmp_path}/a b", "--prompt=né", "--tokens=5", code=0, env=ASCII)
    with open("/dev/full", "wb") as full:
        text = run(*TRAIN, f"--data={tokens}", f"--out_dir={tmp_path / 'full'}", code=0, stdout=full)
    assert "going on without it" in text and text.count("\n") == 1
    assert status(tmp_path / "full")["status"] == "done"


def test_an_output_folder_that_cannot_be_made_is_named_with_its_setting(tmp_path):
    (tmp_path / "file").touch()
    assert "set --out_dir=FOLDER" in run(*TRAIN, f"--out_dir={tmp_path}/file/out", code=74)


@pytest.mark.slow
def test_a_cache_that_cannot_be_made_is_named_with_its_setting(tmp_path):
    assert "--cache_dir=FOLDER" in run(*TRAIN, f"--out_dir={tmp_path}", "--cache_dir=/proc/no", code=65)


def test_a_full_disk_reads_as_one_whatever_numpy_calls_it():
    from text import shards

    with pytest.raises(OSError) as raised, open("/dev/full", "wb", buffering=0) as f:
        f.write(b"x")
    texts = "528439 requested and 42944 written", "Not enough free space to write 9 bytes after offset 128"
    for error in (raised.value, *map(OSError, texts)):
        assert "disk is full" in shards.os_reason(error)


def test_a_config_that_is_not_there_names_the_nearest(monkeypatch):
    monkeypatch.chdir(ROOT)
    for arguments, cure in {
        "config/quickstrat.py": "did you mean config/quickstart.py?",
        "quickstart": "did you mean config/quickstart.py?",
        "total_steps=6": "a setting is written --total_steps=6",
        "--total_steps 6": "write --total_steps=VALUE",  # not taken for a file
    }.items():
        with pytest.raises(settings.SettingsError) as error:
            settings.load_settings(arguments.split(), {})
        assert cure in str(error.value)


def test_a_container_has_its_limit_of_memory_and_not_the_machines(tmp_path, monkeypatch):
    (tmp_path / "v2").write_text("4294967296\n")
    (tmp_path / "none").write_text("max\n")
    machine = devices.host_memory()
    for file, expected in (("v2", 4 * 2**30), ("none", machine), ("absent", machine)):
        monkeypatch.setattr(devices, "LIMITS", [str(tmp_path / file)])
        assert devices.host_memory() == expected


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
@pytest.mark.slow
@pytest.mark.parametrize("limit", ["taskset -c 0", "env -u HOME", "prlimit --fsize=200000000"])
def test_a_small_machine_works(limit, tmp_path, tokens):
    train = [f"{ROOT}/train_nova.py", f"{ROOT}/config/quickstart.py", *SMALL, f"--data={tokens}"]
    run(sys.executable, *train, f"--out_dir={tmp_path}", code=0, python=limit.split(), cwd="/")
    assert status(tmp_path)["status"] == "done"


def interrupt(out, data, marker: str | None, times: int = 1) -> tuple[int, str]:
    """(exit code, stderr) of a run that gets Ctrl-C when it has printed `marker`, or is importing torch."""
    command = [sys.executable, *TRAIN, f"--out_dir={out}", f"--data={data}", "--total_steps=100000"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, env=environ, **pipes) as p:
        guard = threading.Timer(100, p.kill)
        guard.start()
        while not marker and "libtorch" not in Path(f"/proc/{p.pid}/maps").read_text():
            time.sleep(0.01)
        for line in p.stdout if marker else ():
            if marker in line:
                break
        for _ in range(times):
            p.send_signal(signal.SIGINT)
            time.sleep(0.3)
        p.stdout.read()
        text = p.stderr.read()
    guard.cancel()
    return p.returncode, text


def test_ctrl_c_while_python_imports_is_one_line(tmp_path):
    assert interrupt(tmp_path / "imports", "python", None) == (130, "[nova] interrupted\n")


@pytest.mark.slow
def test_ctrl_c_in_any_stage_ends_the_run_resumable(tmp_path, tokens):
    for stage in ("device", "checkpoints", "data", "resume"):
        code, text = interrupt(tmp_path / stage, tokens, f"stage {stage} ...")
        assert code == 3 and status(tmp_path / stage)["resumable"], f"{stage}: {text}"
    code, text = interrupt(tmp_path / "loop", tokens, "step 000002/")
    assert code == 3 and "a second Ctrl-C ends it at once" in text and text.count("\n") == 1, text
    assert status(tmp_path / "loop")["saved"] >= 2
    code, text = interrupt(tmp_path / "twice", tokens, "step 000002/", times=2)
    assert code in (3, 130) and "Traceback" not in text, text
