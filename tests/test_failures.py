"""Real processes are killed, stopped, hung and signalled: everyone ends within a bound, and the right rank is blamed.

Bounds are the design's, for an idle machine; `SLACK` covers a loaded one. Each case prints one row of the failure table
(`pytest -m "slow or drill" -s`).
"""

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from launches import TORCHRUN, TOY, Launch, alive
from workers import ROOT

SLACK = 5.0  # seconds
# seconds: a rank that exits; one killed or silent; beyond a stage's deadline
EXIT, LOST, DEADLINE = 5.0, 15.0, 15.0


def last_line(run) -> str:
    return ([line for line in run.text().splitlines() if line.startswith("[nova] rank")] or ["-"])[-1]


BUT1 = dict(ranks=2, but=[1])  # the culprit itself does not end
RING = dict(ranks=3, but=[1])
NODES = dict(ranks=2, nodes=2)
# (mark, fault, options, seconds, culprit, status, words, how it is started)
CASES = {
    "bad data while the others sit in a collective": ("", "1:loop:data", "", EXIT, 1, "data", "shard 7", {}),
    "hang in a stage names the line": (
        "", "1:load:hang", "--stage=4 --lost=4", 4 + DEADLINE, 1, "system", "time.sleep(1000)", {}),
    "killed inside init": ("", "1:init:kill", "", LOST, 1, "system", "is gone", {}),
    "silent inside a ring of three": ("", "1:loop:stop", "--lost=3", 3 + 5, 1, "system", "heartbeat", RING),
    "raise in a stage": ("slow", "1:stage:raise", "", EXIT, 1, "failed", "injected", {}),
    "raise in a stage, rank 0": ("drill", "0:load:raise", "", EXIT, 0, "failed", "injected", {}),
    "exit in a stage": ("drill", "1:stage:exit", "", EXIT, 1, "system", "is gone", {}),
    "hang in a stage": ("drill", "0:load:hang", "--stage=6", 6 + DEADLINE, 0, "system", "sleep", {}),
    "hang that never gives the interpreter back": (
        "drill", "1:load:mute", "--stage=60", LOST, 1, "system", "heartbeat", BUT1),
    "killed in the loop": ("drill", "1:loop:kill", "", EXIT, 1, "system", "is gone", {}),
    "rank 0 killed in the loop": ("drill", "0:loop:kill", "", EXIT, 0, "system", "is gone", {}),
    "exit in the loop": ("drill", "1:loop:exit", "", EXIT, 1, "system", "is gone", {}),
    "stopped in the loop": ("drill", "1:loop:stop", "", LOST, 1, "system", "heartbeat", RING),
    "out of memory in the loop": ("drill", "1:loop:oom", "", LOST, 1, "failed", "out of memory", {}),
    "raise before the control word": ("drill", "1:step:raise", "", LOST, 1, "failed", "injected", {}),
    "hang in the loop": ("drill", "1:loop:hang", "--step=6", 6 + DEADLINE, 1, "system", "sleep", {}),
    "different collectives": ("slow", "1:wait:-", "--step=6", 6 + DEADLINE, -1, "system", "dist.", {}),
    "stopped inside init": ("drill", "1:init:stop", "", LOST, 1, "system", "heartbeat", BUT1),
    "two nodes: killed inside init": ("slow", "1:init:kill", "", LOST, 1, "system", "heartbeat", NODES),
    "two nodes: killed in the loop": ("drill", "1:loop:kill", "", LOST, 1, "system", "heartbeat", NODES),
    "two nodes: raise in the loop": ("drill", "1:loop:data", "", EXIT, 1, "data", "shard 7", NODES),
    "two nodes of two: killed in the loop": (
        "drill", "3:loop:kill", "", EXIT, 3, "system", "is gone", dict(ranks=4, nodes=2)),
    "never arrives": ("slow", "1:import:hang", "--stage=8", 8 + DEADLINE, 1, "system", "[1]", BUT1),
    "by hand: never arrives": (
        "drill", "1:import:hang", "--stage=8", 8 + DEADLINE, 1, "system", "[1]", BUT1 | dict(by_hand=True)),
    "by hand: store host killed": ("drill", "0:loop:kill", "", EXIT, 0, "system", "store lost", dict(by_hand=True)),
}  # fmt: skip
NAMES = [pytest.param(n, marks=getattr(pytest.mark, case[0]) if case[0] else ()) for n, case in CASES.items()]


@pytest.mark.parametrize("name", NAMES)
def test_failure_table(tmp_path, name):
    """One rank is hurt: all others end within `bound` seconds, and blame the culprit."""
    _, fault, options, bound, culprit, status, words, how = CASES[name]
    how = dict(ranks=2) | how
    but = how.pop("but", [])
    with Launch(tmp_path / "out", f"--fault={fault}", *options.split(), **how) as run:
        run.wait_for(lambda: len(run.pids()) == run.ranks)
        seconds = run.survivors_gone(but)
        print(f"\n| {name} | {seconds:.1f} s of {bound:.0f} | {last_line(run)}")
        ended = run.status()
        assert (ended["status"], ended["rank"]) == (status, culprit) and words in ended["why"], run.text()
        assert seconds < bound + SLACK, run.text()
        said = [w for w in run.text().splitlines() if w.startswith("[nova]") and "first failure" in w]
        for rank in set(range(run.ranks)) - {*but, int(fault.split(":")[0])}:
            mine = [line for line in said if line.startswith(f"[nova] rank {rank} stops")]
            assert mine and (culprit < 0 or f"first failure: rank {culprit} " in mine[-1]), run.text()


@pytest.mark.drill
@pytest.mark.parametrize(
    "node, name, words", [(0, "KILL", "store"), (1, "KILL", ""), (0, "STOP", "store silent")]
)
def test_a_whole_node_dies_or_falls_silent(tmp_path, node, name, words):
    """Launcher and rank of one node are gone at once. With node 0 goes the store: its host is named instead. A stopped
    one sends no reset: the watchdog itself would wait for ever."""
    with Launch(tmp_path / "out", "--steps=2000", ranks=2, nodes=2) as run:
        run.wait_for(lambda: run.step_reached(3, 1))
        (tmp_path / "out" / "fault").touch()
        for pid in (run.processes[node].pid, run.pids()[node]):
            os.kill(pid, getattr(signal, f"SIG{name}"))
        seconds = run.survivors_gone(but=[node])
        print(f"\n| node {node}, {name} | {seconds:.1f} s | {last_line(run)}")
        ended = run.status()
        assert ended["status"] == "system" and ended["resumable"] and seconds < LOST + SLACK
        assert ended["rank"] == node if node else words in ended["why"] and "launcher" in ended["host"]


@pytest.mark.slow
def test_launcher_killed_leaves_no_orphans(tmp_path):
    with Launch(tmp_path / "out", "--steps=2000", ranks=2) as run:
        run.wait_for(lambda: run.step_reached(3))
        (tmp_path / "out" / "fault").touch()
        run.processes[0].kill()
        assert run.survivors_gone() < EXIT + SLACK
        assert run.status()["status"] == "system"


HANDLED = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def stop_by(tmp_path, number, target, at="loop", options=(), **how):
    """Send one signal; -> (status.json, step that was saved, launcher's exit codes, output). In the loop all ranks have
    begun the same step, and saved the one before it: the step in hand is not taken."""
    with Launch(tmp_path / "out", "--steps=2000", "--saves=9999", *options, **how) as run:
        run.wait_for(lambda: run.step_reached(3) if at == "loop" else "stage load ..." in run.text())
        os.kill(run.processes[0].pid if target == "launcher" else run.pids()[target], number)
        codes, saved = run.codes(), run.read("checkpoint")
        steps = {run.read(f"step.{r}") for r in range(run.ranks)}
        if saved:
            assert len(steps) == 1 and int(saved) == int(steps.pop()) - 1 == run.status()["saved"], run.text()
        return run.status(), saved, codes, run.text()


def test_sigterm_to_the_launcher_saves_once_and_is_resumable(tmp_path):
    ended, saved, _, text = stop_by(tmp_path, signal.SIGTERM, "launcher", ranks=2)
    assert (ended["status"], ended["exit_code"], ended["resumable"]) == ("stopped", 3, True), text
    assert saved and ended["reason"] == "SIGTERM" and "Traceback" not in text.split("[nova]")[0]


def test_sigint_to_plain_python_saves_and_exits_3(tmp_path):
    ended, saved, codes, text = stop_by(tmp_path, signal.SIGINT, "launcher")
    assert codes == [3] and ended["status"] == "stopped" and ended["saved"] > 0 and saved, text


@pytest.mark.drill
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("target", ["launcher", 0, 1])
@pytest.mark.parametrize("at", ["loop", "start"])
def test_every_signal_to_everyone(tmp_path, number, target, at):
    """Under torchrun all ranks exit 0 after an agreed stop; the launcher itself says 1 when it was the one signalled."""
    ended, saved, codes, text = stop_by(tmp_path, number, target, at, ranks=2, extra=[HANDLED])
    assert ended["status"] == "stopped" and ended["resumable"] and (saved or at == "start"), text
    assert codes == ([1] if target == "launcher" else [0]), text


@pytest.mark.drill
def test_second_sigint_leaves_at_once_even_inside_a_collective(tmp_path):
    with Launch(tmp_path / "out", "--fault=1:loop:hang", "--step=100", ranks=2) as run:
        run.wait_for(lambda: os.path.exists(run.path("fault")))
        time.sleep(1)
        for _ in range(2):
            os.kill(run.pids()[0], signal.SIGINT)  # rank 0 waits inside the all-reduce
            time.sleep(0.5)
        run.codes()
        assert run.status()["status"] == "interrupted", run.text()


@pytest.mark.slow
def test_a_save_longer_than_the_grace_period_needs_shutdown_timeout(tmp_path):
    """torchrun kills after 30 s by default, in the middle of a longer save: README gives --shutdown-timeout."""
    for grace, done in ((2, False), (60, True)):
        how = dict(options=["--save=5"], ranks=2, extra=[f"--shutdown-timeout={grace}"])
        _, saved, _, text = stop_by(tmp_path / str(grace), signal.SIGTERM, "launcher", **how)
        assert bool(saved) == done, text


def supervise(tmp_path, *launch: str) -> tuple[str, int]:
    """README's loop around a command. -> (its output, how often the command was started, by its own account)"""
    again = shlex.join([sys.executable, "-m", "launch", "again", f"{tmp_path}/out"])
    command = ["bash", "-c", f"while ! {shlex.join(launch)}; do {again} || break; done"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    return done.stderr + done.stdout, (tmp_path / "starts").read_text().count("x")


# A run in miniature: it ends as the list says, one entry a start. No torch, so that a start is quick.
MINIATURE = """
import os, signal, sys
sys.path.insert(0, {root!r})
from launch import failures
open({folder!r} + "/starts", "a").write("x")
n = len(open({folder!r} + "/starts").read()) - 1
endings = {endings!r}
what, saved = endings[min(n, len(endings) - 1)]
if what == "killed":
    failures.write_status({folder!r} + "/out", "running", None, saved=saved)
    os.kill(os.getpid(), signal.SIGKILL)
code = {{v: k for k, v in failures.CODES.items()}}[what]
failures.write_status({folder!r} + "/out", what, code, saved=saved)
sys.exit(code)
"""


@pytest.mark.parametrize("endings", "killed system done,failed,settings,data,killed killed data".split(","))
def test_supervisor_loop_starts_again_only_where_it_can_help(tmp_path, endings):
    endings = [(what, 10 * i) for i, what in enumerate(endings.split(), 1)]
    (tmp_path / "run.py").write_text(MINIATURE.format(root=ROOT, folder=str(tmp_path), endings=endings))
    text, count = supervise(tmp_path, sys.executable, f"{tmp_path}/run.py")
    assert count == len(endings), text
    assert endings[-1][0] in text or endings[-1][0] == "done", text


@pytest.mark.slow
def test_recovery_from_a_killed_rank(tmp_path):
    """Rank 1 is killed in every start, 8 steps after the resume: each start gets further, and the run is done."""
    launch = shlex.join(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", TOY, f"{tmp_path}/out", "--steps=12"]
    )
    count = f"[ $(wc -l < {tmp_path}/starts) -lt 3 ] && echo --fault=1:loop:kill"
    text, starts = supervise(
        tmp_path, "bash", "-c", f"echo x >> {tmp_path}/starts; exec {launch} --saves=2 $({count})"
    )
    assert json.loads((tmp_path / "out" / "status.json").read_text())["status"] == "done", text
    assert starts == 3 and (tmp_path / "out" / "checkpoint").read_text() == "12"
    assert "1 of 3" not in text  # each start had saved something new


@pytest.mark.slow
def test_max_restarts_is_refused_with_a_sentence(tmp_path):
    with Launch(tmp_path / "out", ranks=2, extra=["--max-restarts=1"]) as run:
        assert run.codes() == [1]
        assert "--max-restarts is not supported" in run.text() and not run.read("step.0")


def test_a_mistake_in_the_settings_is_one_line_and_64():
    """No traceback, no torch loaded, exit code 64."""
    code = "from launch import startup; import settings; startup.load_or_exit(settings.load_settings, ['--d_modle=3'])"
    run = functools.partial(
        subprocess.run, [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    plain, debug = run(), run(env=os.environ | {"NOVA_DEBUG": "1"})
    assert plain.returncode == debug.returncode == 64 and "did you mean d_model" in plain.stderr
    assert len(plain.stderr.strip().splitlines()) == 1 and "Traceback" in debug.stderr


TIMES = [pytest.param(3, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.drill)]


@pytest.mark.parametrize("times", TIMES)
def test_healthy_starts_raise_no_alarm(tmp_path, times):
    for i in range(times):
        with Launch(tmp_path / str(i), "--steps=5", ranks=2) as run:
            assert run.codes(120) == [0], run.text()
            assert run.status()["status"] == "done" and "failure" not in run.text()
            assert not any(alive(p) for p in run.pids().values())
