"""Every start-up check can fail: one element, one bit, one version, one setting, one parameter is wrong, and it shows."""

import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoint_tools import Ranks
from conftest import tiny_settings
from workers import ROOT, Rank, run

from launch import agreement, board, failures, proof, startup
from launch.__main__ import again
from store import Store


def exchange(rank, world):
    """The real exchange on the tests' gloo group."""
    agree = agreement.Exchange(rank, world)
    agree.device = torch.device("cpu")
    return agree


def outcome(body):
    """(class name, text, blamed rank) of the error, or ("ok", the value, None)."""
    try:
        return "ok", body(), None
    except Exception as e:
        return type(e).__name__, str(e), getattr(e, "rank", None)


def talk(rank, world):
    agree = exchange(rank, world)
    values = {"text": "ä" * rank, "list": [rank, None, 0.1 + rank]}
    long = agree.broadcast(list(range(50_000)) if rank == 0 else None)
    word, flags = agree.broadcast(f"from {rank}"), agree.control([rank, 0, int(rank == 1)])
    return agree.gather(values), len(long), word, flags, agree.control([rank == 2], [0.1 * (rank + 1), 1.0])


def test_gather_broadcast_and_control_give_every_rank_the_same():
    results = run(talk, world=3)
    assert results[0] == results[1] == results[2]
    gathered, length, word, flags, (stop, sums) = results[0]
    assert gathered == [{"text": "ä" * r, "list": [r, None, 0.1 + r]} for r in range(3)]
    assert (length, word, flags, stop) == (50_000, "from 0", [2, 0, 1], [1])
    assert sums == [0.1 + 0.2 + 0.1 * 3, 3.0]


def judge(rank, world, bad):
    problem = startup.StartupError(f"trouble on {rank}", exit_code=74) if rank in bad else None
    try:
        exchange(rank, world).verdict(problem, "storage")
    except Exception as e:
        return type(e).__name__, str(e), e.exit_code, getattr(e, "rank", None)


def test_verdict_raises_everywhere_and_names_the_rank():
    assert run(judge, world=3, bad=[]) == [None] * 3
    text = "storage failed on rank 1: StartupError: trouble on 1"
    own, others = ("StartupError", "trouble on 1", 74, None), ("RankFailed", text, 74, 1)
    assert run(judge, world=3, bad=[1]) == [others, own, others]
    assert run(judge, world=3, bad=[1, 2])[0] == ("RankFailed", f"{text} (and 1 more ranks)", 74, 1)


def differing(rank, world, odd, what):
    """One rank has another setting, another torchao, one byte more in one file, or one bit of one weight."""
    agree, mine, metadata = exchange(rank, world), what if rank == odd else "", proof.importlib.metadata
    read = metadata.version

    def longer(path, *args, **kwargs):
        file = open(path, *args, **kwargs)
        return io.BytesIO(file.read() + b"#") if str(path).endswith("muon.py") else file

    torch.manual_seed(0)
    layer, settings = torch.nn.Linear(40, 30), tiny_settings(lr=1e-3 if mine == "settings" else 2e-3)
    proof.code.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if mine == "version":
            patch.setattr(metadata, "version", lambda p: "0.0.1" if p == "torchao" else read(p))
        elif mine == "code":
            patch.setattr(proof, "open", longer, raising=False)
        elif mine == "weights":
            layer.weight.data.view(torch.int32)[17, 5] ^= 1  # the last bit
        if what == "weights":
            prints = proof.fingerprint(layer.named_parameters())
            result = outcome(lambda: proof.check_equal(agree, what, prints))
        else:
            result = outcome(lambda: proof.check_versions(agree, settings, print))
    proof.code.cache_clear()
    return result


DIFFERENCES = [
    ("settings", ["the settings differ", "rank 1 has", '"lr": 0.001', "0.002"], "d_model"),
    ("version", ["the environment differs", '"torchao": "0.0.1"'], "numpy"),
    ("code", ["muon.py"], "numpy"),
    ("weights", ['"weight"'], '"bias"'),
]


@pytest.mark.parametrize("what, words, same", DIFFERENCES)
def test_the_one_rank_that_differs_is_named_with_what_differs(what, words, same):
    assert [r[0] for r in run(differing, world=3, odd=None, what=what)] == ["ok"] * 3
    for kind, text, blamed in run(differing, world=3, odd=1, what=what):
        assert kind == "StartupError" and blamed == 1 and all(w in text for w in words) and same not in text


def test_one_against_one_blames_nobody():
    for kind, text, blamed in run(differing, world=2, odd=1, what="settings"):
        assert kind == "StartupError" and blamed == failures.NOBODY, "nobody knows who is right"
        assert "rank 1 has" in text and "rank 0 {" in text


def test_fingerprints_see_one_bit_and_an_exchange():
    layer = torch.nn.Linear(40, 30)
    first = before = proof.fingerprint(layer.named_parameters())
    assert first["weight"] != first["bias"]
    pair, bits = layer.weight.data[3, 5:7], layer.bias.data.view(torch.int32)
    exchange = (lambda: pair.copy_(pair.flip(0))), ["weight"]
    for change, differ in (exchange, exchange, (lambda: bits[:1].bitwise_xor_(1), ["bias"])):
        change()
        after = proof.fingerprint(layer.named_parameters())
        assert [n for n in after if after[n] != before[n]] == differ
        before = after
    assert after["weight"] == first["weight"], "exchanged and back"


def device_check(rank, world, odd, what):
    """A device that computes one product element wrong: always, sometimes, or as NaN. -> (outcome, lines)"""
    original, calls, lines = torch.Tensor.__matmul__, [], []

    def wrong(a, b):
        product = original(a, b)
        calls.append(1)
        if what == "nan":
            product[7, 7] = math.nan
        elif what == "wrong" or len(calls) == 2:
            product[7, 7] = product[7, 7] * 1.01
        return product

    with pytest.MonkeyPatch.context() as patch:
        if rank == odd:
            patch.setattr(torch.Tensor, "__matmul__", wrong)
        return outcome(lambda: proof.check_device(exchange(rank, world), lines.append)), lines


@pytest.mark.parametrize("what, word", [("nan", "not finite"), ("wrong", "differs"), ("flaky", "each time")])
def test_device_that_computes_wrong(what, word):
    for odd in (0, 2):
        for rank, ((kind, text, blamed), _) in enumerate(run(device_check, world=3, odd=odd, what=what)):
            assert kind in ("StartupError", "RankFailed") and word in text
            assert blamed == odd or (rank == odd and blamed is None)


def test_healthy_devices_pass_and_report():
    results = run(device_check, world=3, odd=None, what="")
    assert [r[0][0] for r in results] == ["ok"] * 3
    assert "same bits on 3 ranks" in results[0][1][0] and "TFLOP/s" in results[0][1][0] and not results[1][1]


OPS = "all_gather_into_tensor reduce_scatter_tensor all_reduce broadcast all_to_all_single".split()


def collectives(rank, world, odd=None, op=OPS[0], how="element", split=False):
    """A fabric that gets one collective wrong on one rank. -> (outcome, lines)"""
    agree, lines, groups, original = exchange(rank, world), [], {"world": None}, getattr(dist, op)
    if split:
        groups["shard"] = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]

    def corrupted(out, *args, **kwargs):
        result = original(out, *args, **kwargs)
        if out.numel() < 100_000:
            return result
        if how == "element":
            out.view(torch.int32)[-5] ^= 1  # the last bit of one element
        elif how == "swap":
            out.copy_(out.roll(len(out) // 2))
        else:
            out.zero_()
        return result

    with pytest.MonkeyPatch.context() as patch:
        if rank == odd:
            patch.setattr(dist, op, corrupted)
        return outcome(lambda: proof.check_collectives(agree, agree.device, groups, lines.append)), lines


@pytest.mark.parametrize("op", OPS)
def test_one_wrong_bit_in_one_collective_on_one_rank(op):
    for rank, ((kind, text, blamed), _) in enumerate(run(collectives, world=2, odd=1, op=op)):
        assert kind == ("StartupError" if rank == 1 else "RankFailed"), text
        assert "rank 1 received wrong data" in text and op in text and "1 of" in text
        assert blamed == (None if rank == 1 else 1)


@pytest.mark.parametrize("how", ["swap", "stale"])
def test_parts_in_the_wrong_order_or_never_written(how):
    """Sums cannot see the first (a permutation), and the second was 'match=True' with a bf16 sum."""
    for op in ("all_gather_into_tensor", "all_to_all_single"):
        (kind, text, _), _ = run(collectives, world=2, odd=0, op=op, how=how)[0]
        assert kind == "StartupError" and op in text


def test_healthy_collectives_report_their_rate_on_every_group():
    results = run(collectives, world=4, split=True)
    assert [r[0][0] for r in results] == ["ok"] * 4, results
    assert [line.split(": ")[1] for line in results[0][1]] == ["world", "shard"]
    assert all(op in line for line in results[0][1] for op in OPS)


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\t{a}\tPIX\t0-47
GPU1\tNV18\t X \tNV18\tSYS\t0-47
GPU2\t{a}\tNV18\t X \tSYS\t48-95
NIC0\tPIX\tSYS\tSYS\t X \t
"""


def test_slow_links_are_found_and_named():
    wrong = ["GPU 0 to GPU 2: SYS, not NVLink", "GPU 2 to GPU 0: SYS, not NVLink"]
    for table, slow in ((TOPOLOGY.format(a="NV18"), []), (None, []), (TOPOLOGY.format(a="SYS"), wrong)):
        assert proof.slow_links(3, lambda i, j: True, table) == slow
    assert proof.slow_links(2, lambda i, j: i > j, None) == ["GPU 0 cannot access GPU 1"]


def test_links_stop_a_run_unless_accepted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    answer = SimpleNamespace(stdout=TOPOLOGY.format(a="PHB"))
    monkeypatch.setattr(proof.subprocess, "run", lambda *a, **k: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    agree = Rank()
    agree.device, agree.local_rank, lines = torch.device("cuda"), 0, []
    with pytest.raises(startup.StartupError, match="PHB, not NVLink.*allow_slow_links"):
        proof.check_links(agree, tiny_settings(), lines.append)
    proof.check_links(agree, tiny_settings(allow_slow_links=True), lines.append)
    assert "2 slow links" in lines[0]


def test_storage_is_tried_before_it_is_needed(tmp_path):
    lines = []
    proof.check_storage(Rank(), str(tmp_path / "new"), 1000, lines.append)
    assert "read back" in lines[0] and os.listdir(tmp_path / "new") == []
    (tmp_path / "file").touch()
    for folder, need, words in ((tmp_path, 10**18, "ckpt_keep"), (tmp_path / "file", 0, "file")):
        with pytest.raises(startup.StartupError, match=words) as e:
            proof.check_storage(Rank(), str(folder), need)
        assert e.value.exit_code == 74


FRAMES = [  # (innermost file, line, does it wait for other ranks: on a CPU, on a GPU)
    ("/site-packages/torch/distributed/distributed_c10d.py", "work.wait()", True, True),
    ("/nova/muon.py", "total.tolist()", True, True),
    ("/site-packages/torch/autograd/graph.py", "Variable._execution_engine.run_backward(", False, True),
    ("/tmp/torchinductor_me/ab/cab.py", "triton_poi_fused_1.run(buf0)", False, True),
    ("/nova/model.py", "return self.down(F.silu(self.gate(x)) * self.up(x))", False, True),
    ("/nova/kernels/precision.py", "return x.to(torch.float8_e4m3fn)", False, True),
    ("/nova/text/shards.py", "os.pread(self.file, n, at)", False, False),
    ("/nova/train_nova.py", "time.sleep(1000)", False, False),
    ("/nova/track/metrics.py", "f.writelines(rows)", False, False),
]


@pytest.mark.parametrize("file, line, cpu, gpu", FRAMES)
def test_on_a_gpu_a_rank_in_a_kernel_launch_is_not_the_culprit(file, line, cpu, gpu):
    """The device's queue is bounded: while a peer is missing, all ranks stand in a launch. Reading data is no launch."""
    below = traceback.FrameSummary("/nova/train_nova.py", 2, "g")
    frames = [traceback.FrameSummary(file, 1, "f", line=line), below]
    assert failures.in_collective(frames) == cpu
    assert failures.in_collective(frames, gpu=True) == gpu


def test_environment_is_set_before_torch_and_the_users_values_win():
    startup.setup_environment(tiny_settings(debug=True, nccl_safe=True), environ := {"NCCL_DEBUG": "WARN"})
    want = dict(NCCL_DEBUG="WARN", CUDA_LAUNCH_BLOCKING="1", NCCL_P2P_DISABLE="1", NCCL_ALGO="Ring")
    want |= dict(CUDA_DEVICE_ORDER="PCI_BUS_ID", TOKENIZERS_PARALLELISM="false")
    assert environ.items() >= want.items()
    startup.setup_environment(tiny_settings(device="cpu"), slurm := {"CUDA_VISIBLE_DEVICES": "0"})
    assert slurm["CUDA_VISIBLE_DEVICES"] == "", "--device=cpu trained on the GPU that SLURM had given"
    assert slurm["OMP_WAIT_POLICY"] == "ACTIVE"
    startup.setup_environment(tiny_settings(), plain := {"WORLD_SIZE": "2"})
    assert set(plain) == {"WORLD_SIZE", "CUDA_DEVICE_ORDER", "TOKENIZERS_PARALLELISM", "PYTORCH_ALLOC_CONF"}
    startup.setup_environment(tiny_settings(), older := {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"})
    assert "PYTORCH_ALLOC_CONF" not in older
    code = "import sys; from launch import agreement, startup; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


ONE, RUN = {"OMP_NUM_THREADS": "1"}, {"TORCHELASTIC_RUN_ID": "x"}
THREE = {"OMP_NUM_THREADS": "3"}
WISHES = [(None, {}, 6), (None, ONE, None), (None, THREE, None), (None, ONE | RUN, 6), (2, THREE, 2)]


@pytest.mark.parametrize("wish, environ, threads", WISHES)
def test_threads_are_the_users_or_a_share_of_the_cores(monkeypatch, wish, environ, threads):
    """torchrun sets one thread where the user said nothing; one that the user set is one. None: left alone."""
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", print)  # else it is that of other tests, too
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(12), raising=False)
    startup.set_arithmetic(tiny_settings(threads=wish), 2, environ)
    assert told == ([threads] if threads else [])


def test_start_is_refused_where_it_cannot_go_well(tmp_path):
    settings = tiny_settings(out_dir=str(tmp_path))
    with pytest.raises(startup.StartupError, match="max-restarts") as e:
        startup.init(settings, {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0"})
    assert e.value.exit_code == 64
    with pytest.raises(startup.StartupError, match="LOCAL_RANK"):
        startup.init(settings, {"RANK": "1", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("words", ["--shutdown-timeout=77 77.0", "--shutdown_timeout 5 5.0", "30.0"])
def test_the_launchers_grace_is_read_from_its_command_line(words):
    *words, seconds = words.split()
    ask = "from launch import startup; print(startup.grace_seconds({'TORCHELASTIC_RUN_ID': 'x'}), startup.grace_seconds({}))"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])"
    done = subprocess.run([sys.executable, "-c", launcher, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [seconds, "None"], done.stderr


def test_restarts_without_progress_end(tmp_path):
    out = str(tmp_path)

    def ends(status, **info):
        failures.write_status(out, status, None, **info)
        return again(out, limit=2, wait=0)[0]

    assert not again(out)[0], "no status: it never started"
    assert ends("running", saved=10)
    assert not again(out, wait=0)[0], "a launch that got nowhere is not judged by the one before it"
    assert ends("system", saved=20)
    assert ends("system", saved=20), "one launch without a new save"
    assert not ends("running"), "and one that was killed before it could resume"
    assert ends("io", saved=20) and ends("running", saved=30), "started by hand: counted from the beginning"
    for status in ("done", "stopped", "failed", "settings", "data", "interrupted"):
        assert not ends(status, saved=50)
        assert json.loads((tmp_path / "status.json").read_text())["status"] == status  # the last word stays


def test_signals_only_set_a_flag_and_the_second_interrupt_is_counted_without_the_main_thread():
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        stop = board.StopSignals(says=False)
        assert stop.name is None and not stop.insisted()
        for number, insisted in ((signal.SIGUSR1, False), (signal.SIGINT, False), (signal.SIGINT, True)):
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            assert stop.name == "SIGUSR1" and stop.insisted() == insisted, "the first name stays"
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in kept.items():
            signal.signal(number, handler)


def bare(rank=0, world=1, environ=None, store=None):
    """One rank's part of the agreement without sockets and threads. -> (stages, watchdog, what it left with)"""
    launcher, ends = board.Launcher({"RANK": str(rank), "WORLD_SIZE": str(world)} | (environ or {}), 60), []
    its = board.Board(launcher, store or dist.HashStore())
    signals = SimpleNamespace(name=None)
    stages = agreement.Stages(its, signals, tiny_settings())
    return stages, board.Watchdog(its, signals, ends.append), ends


def test_an_agreed_stop_is_no_failure_to_torchrun(tmp_path, monkeypatch):
    """It would turn 3 into a failure of the job; everything else is one."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    for environ in ({"TORCHELASTIC_RUN_ID": ""}, {}):
        for code in (0, 3, 64, 71):
            board.Ending(bare(environ=environ)[0].board, str(tmp_path), print).exit(code)
    assert ended == [0, 0, 64, 71] + [0, 3, 64, 71]


def test_errors_are_described_for_a_person():
    assert failures.describe(failures.RankFailed(1, "rank 1: no")) == "rank 1: no"
    try:
        {}["x"]
    except KeyError as e:
        assert "KeyError" in failures.describe(e) and "test_startup.py line" in failures.describe(e)
    errors = OSError(28, "full"), ValueError(), KeyboardInterrupt()
    assert [failures.exit_code_of(e) for e in errors] == [74, 70, 130]


def test_the_first_failure_is_the_failure():
    """Two ranks fail: whoever comes second reports the first, with its exit code, and a stop does not hide it."""
    store = dist.HashStore()
    second, first = (bare(rank, 2, store=store)[0] for rank in (0, 1))
    second.tick("step 0", 60)
    first.tick("step 1", 60)
    failure = first.board.record("out of memory", 70)
    assert second.board.record("SIGTERM", 3) == failure == first.board.record("again", 65)
    assert failure.items() >= dict(rank=1, code=70, stage="step 1", host=socket.gethostname()).items()
    second.tick("step 2", 60)  # it has not looked yet
    assert second.board.known() and "rank 1" in second.board.sentence(failure)
    with pytest.raises(failures.RankFailed, match="out of memory") as e:
        second.tick("step 3", 60)
    assert e.value.exit_code == 70 and e.value.rank == 1


def test_a_deadline_moves_with_a_transfer_that_goes_on(capfd):
    """A download of a large checkpoint, or the last upload, outlasts its stage; one that stands still does not."""
    stages, dog, ends = bare()
    with stages.stage("download", timeout=0.05):
        stages.busy(60)
        time.sleep(0.1)
        dog.check_deadline(time.monotonic())
    assert not ends, "the deadline was moved"
    stages.tick("export", 0.05)
    stages.busy(0.01)
    time.sleep(0.1)
    dog.check_deadline(time.monotonic())
    assert ends[0]["stage"] == "export", "it moved no further than asked"
    assert "deadline passed" in ends[0]["why"] and ends[0]["rank"] == 0


def test_a_rank_that_waits_for_others_speaks_after_the_culprit(monkeypatch, capfd):
    """The main thread is inside a collective: it is heard only when the culprit's own deadline, and its silence, would
    have shown by now; and then it names nobody."""
    stages, dog, ends = bare()
    stages.tick("step 5", 60)
    last = dog.board.task[1] + dog.board.lost + board.NEIGHBOURS
    monkeypatch.setattr(board, "whereabouts", lambda gpu: (True, "muon.py line 5: work.wait()"))
    dog.check_deadline(last - 0.1)
    assert not ends, "the victim spoke before the culprit"
    dog.check_deadline(last)
    assert ends[0]["rank"] == failures.NOBODY and ends[0]["stage"] == "step 5"
    assert "still waiting for other ranks after the deadline, at muon.py line 5" in ends[0]["why"]


def test_a_full_disk_costs_the_status_and_not_the_run(tmp_path):
    (tmp_path / "file").touch()
    lines = []
    ending = board.Ending(bare()[0].board, str(tmp_path / "file" / "out"), lines.append)
    ending.note(saved=5)
    assert ending.info == {"saved": 5} and "status.json is not written" in lines[0]


def limits(rank, world, folder):
    saver, made = Store(folder, Ranks(rank, world)).saver.group, dist.new_group(backend="gloo")
    agree = object.__new__(startup.Agreement)
    agree.device = torch.device("cpu")

    def seconds(group):
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    before = seconds(dist.group.WORLD)
    agree.limit_collectives(50)
    after = seconds(dist.group.WORLD), seconds(made), seconds(saver)
    agree.limit_collectives(before - 30)
    return after


def test_collectives_get_the_steps_limit_and_the_saver_keeps_its_own(tmp_path):
    """A rank that writes to a slow disk for ten minutes must not fail the save."""
    assert run(limits, world=1, folder=str(tmp_path)) == [(80.0, 80.0, 7200.0)]


def somewhere(text: str, folder: str = "torch/distributed"):
    """A RuntimeError whose innermost frame lies in `folder`."""
    with pytest.raises(RuntimeError) as e:
        exec(compile(f"raise RuntimeError({text!r})", f"/site-packages/{folder}/x.py", "exec"))
    return e.value


def test_only_a_lost_peer_makes_a_victim():
    """An error from inside a collective waits for the culprit; a rank's own error there, or elsewhere, does not."""
    closed = somewhere("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    for error in (closed, dist.DistBackendError("NCCL error: unhandled system error")):
        assert failures.is_peer_loss(error)
    own = NotImplementedError("not for gloo").with_traceback(somewhere("gloo").__traceback__)
    refused, wrong = somewhere("connection refused", "nova"), somewhere("expected a contiguous tensor")
    for error in (own, ValueError("gloo"), wrong, refused):
        assert not failures.is_peer_loss(error)
