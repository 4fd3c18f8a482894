"""Checkpoints under kills and failing disks: the previous checkpoint stays, training goes on, the failure is counted."""

import errno
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys

import pytest
import torch.distributed as dist
from checkpoint_tools import all_bits, digest_of, names_in, open_folder, save, state_for
from conftest import ROOT
from workers import run

from store import CheckpointError, saver, sealed

pytestmark = pytest.mark.usefixtures("one_rank_group")

TESTS = os.path.join(ROOT, "tests")


def python(*arguments, prefix=(), timeout=600) -> str:
    """Output of a program of this folder."""
    command = [*prefix, sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0, 0), (2, 0, 6), (2, 1, 3))]
DRILL = [pytest.param(*case, marks=pytest.mark.drill) for case in ((2, 0, 0), (2, 1, 0))]


@pytest.mark.parametrize("world, victim, count", [(1, 0, 8), *SLOW, *DRILL])
def test_a_kill_at_any_point_of_a_save_costs_nothing_older(world, victim, count):
    """Also in the middle of a write, between the manifest and the rename, and while an old checkpoint is deleted."""
    result = json.loads(python("kill_points.py", str(world), str(victim), str(count)).splitlines()[-1])
    print(result)
    assert not result["bad"] and result["tried"] >= min(count or 8, result["points"])
    assert result["resumed_old"] and (count or victim or result["resumed_new"])


def failing_scenario(rank, world, folder, fault, victim):
    """A good save, three saves under a fault on one rank, a good one again; what was noticed and what is left."""
    c, lines = open_folder(folder, rank, world)
    save(c, 1)
    write, limits = saver.write_tensors, resource.getrlimit(resource.RLIMIT_FSIZE)
    number = {"mkdir": errno.EROFS, "fsync": errno.EIO}.get(fault, errno.ENOSPC)

    def refuse(*a, **k):
        raise OSError(number, os.strerror(number))

    for step in (2, 3, 4):
        with pytest.MonkeyPatch.context() as patch:
            if rank == victim:
                if fault == "file size limit":  # the kernel cuts the file short, as a full disk does
                    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
                elif fault == "own file":
                    own = lambda path, *a: refuse() if "/own/" in path else write(path, *a)  # noqa: E731
                    patch.setattr(saver, "write_tensors", own)
                else:
                    patch.setattr(os, fault, refuse)
            try:
                save(c, step)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    failed = list(c.failures)
    dist.barrier()
    names = sorted(n for n in os.listdir(folder) if not n.startswith((".lock", "run.json")))
    loaded, own = state_for(rank, world, seed=9)
    state, _ = c.load(c.newest(), loaded, own)
    right = all_bits(loaded) == all_bits(state_for(rank, world, seed=1)[0])
    save(c, 5)
    receipts = [r["step"] for r in c.poll()]
    c.close()
    return failed, names, state["step"], right, receipts, sum("CHECKPOINT FAILED" in line for line in lines)


FAULTS = [("file size limit", 1, 0), ("file size limit", 2, 1), ("mkdir", 2, 0), ("fsync", 2, 1)]
FAULTS += [("fsync", 1, 0), ("rename", 2, 0), ("own file", 2, 1)]


@pytest.mark.parametrize("fault, world, victim", FAULTS)
def test_a_failing_disk_is_counted_and_the_last_checkpoint_stays(tmp_path, fault, world, victim):
    """On whichever rank: all ranks count it, say it at every attempt, leave no litter, and save again when it is over."""
    answers = run(failing_scenario, world=world, folder=str(tmp_path), fault=fault, victim=victim)
    for failed, names, step, right, receipts, loud in answers:
        assert len(failed) == loud == 3 and all(f"rank {victim}" in f for f in failed), failed
        assert names == ["step-00000001-latest-0001"] and (step, right) == (1, True)
        assert receipts == [1, 5]


FULL = """
import sys; sys.path[:0] = [{tests!r}, {root!r}]
import os, json, torch.distributed as dist
from checkpoint_tools import open_folder, save
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
folder = sys.argv[1]
c, lines = open_folder(folder, keep=1)
save(c, 1, 2, 3)
saved = len(c.poll())
print(json.dumps([saved, len(c.failures), c.failures[-1:], [n for n in os.listdir(folder) if n.startswith((".tmp", "step"))]]))
c.close()
"""


def fill(tmp_path, first, folder, options) -> list:
    """Run FULL on a folder of a tmpfs of its own mount namespace, after the shell command `first`."""
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount: ENOSPC of a real file system was not tested")
    (tmp_path / "program.py").write_text(FULL.format(tests=TESTS, root=ROOT))
    program = shlex.join([sys.executable, str(tmp_path / "program.py"), folder])
    shell = f"mount -t tmpfs -o {options} none /mnt && {first} && {program}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", shell], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_keeps_the_checkpoint_that_fits(tmp_path):
    """A real ENOSPC: a second checkpoint would fit only if the first were gone, which must not happen."""
    ballast = "head -c 60000 /dev/zero > /mnt/ballast"
    saved, failures, last, names = fill(tmp_path, ballast, "/mnt", "size=92k")
    assert saved == 1 and failures == 2 and "No space left" in last[0], (saved, failures, last)
    assert names == ["step-00000001-latest-0001"]


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(AssertionError, match="CheckpointError: out_dir .*Read-only"):
        fill(tmp_path, "mount -o remount,ro /mnt", "/mnt/out", "size=1m")


def test_an_unreadable_disk_does_not_rename_a_good_checkpoint(tmp_path, monkeypatch):
    """EIO may pass: the checkpoint is skipped loudly but stays under its name."""
    c, lines = open_folder(tmp_path)
    save(c, 1)

    def broken(path):
        raise OSError(errno.EIO, "Input/output error", path)

    with monkeypatch.context() as patch:
        patch.setattr(sealed, "file_sha256", broken)
        with pytest.raises(CheckpointError, match="none is usable"):
            c.newest()
    assert any("Input/output" in line for line in lines)
    assert names_in(tmp_path) == ["step-00000001-latest-0001"] == [os.path.basename(c.newest())]


def test_leftovers_of_a_killed_save_go_and_others_stay(tmp_path):
    """Another run's folder, unknown files and half a download of this run, which goes on, stay."""
    c, _ = open_folder(tmp_path)
    c.close()
    killed, other = (f".tmp-{run_id}+step-00000009-latest-0009" for run_id in (c.run_id, "other"))
    download = f".tmp-{c.run_id}+step-00000008-latest-0008.part"
    for name in (killed, other, download):
        (tmp_path / name / "tensors").mkdir(parents=True)
    (tmp_path / "keep.txt").write_text("mine")
    _, lines = open_folder(tmp_path)
    assert sum("left by a save that was killed" in line for line in lines) == 1
    left = {n for n in os.listdir(tmp_path) if n.startswith((".tmp", "keep"))}
    assert left == {other, download, "keep.txt"}
    assert (tmp_path / "keep.txt").read_text() == "mine"


def test_everything_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    """All files and folders, the manifest after the rest, then the rename, then the folder that holds the new name."""
    events, fsync, rename = [], os.fsync, os.rename
    synced = lambda fd: (events.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))[1]  # noqa: E731
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", b)), rename(a, b))[1])
    c, _ = open_folder(tmp_path)
    save(c, 1)
    final = f"{tmp_path}/{names_in(tmp_path)[0]}"
    temporary = f"{tmp_path}/.tmp-{c.run_id}+{names_in(tmp_path)[0]}"
    at = events.index(("rename", final))
    before = [path.removeprefix(temporary + "/").removesuffix(".tmp") for _, path in events[:at]]
    after = [path for _, path in events[at + 1 :]]
    files = set(digest_of(final)) | {"tensors", "own"}
    assert files <= set(before) and temporary in before and after == [str(tmp_path)]
    assert before.index("manifest.json") > max(before.index(f) for f in files - {"manifest.json"})
