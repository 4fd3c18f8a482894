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
from checkpoint_tools import all_bits, digest_of, open_folder, state_for
from conftest import ROOT
from workers import run

from store import CheckpointError, saver, sealed

TESTS = os.path.join(ROOT, "tests")


def python(*arguments, prefix=(), timeout=600) -> str:
    """Output of a program of this folder."""
    command = [*prefix, sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "world, victim, count",
    [
        (1, 0, 8),
        pytest.param(1, 0, 0, marks=pytest.mark.slow),
        pytest.param(2, 0, 6, marks=pytest.mark.slow),
        pytest.param(2, 1, 3, marks=pytest.mark.slow),
        pytest.param(2, 0, 0, marks=pytest.mark.drill),
        pytest.param(2, 1, 0, marks=pytest.mark.drill),
    ],
)
def test_a_kill_at_any_point_of_a_save_costs_nothing_older(world, victim, count):
    """Also in the middle of a write, between the manifest and the rename, and while an old checkpoint is deleted."""
    result = json.loads(python("kill_points.py", str(world), str(victim), str(count)).splitlines()[-1])
    print(result)
    assert not result["bad"] and result["tried"] >= min(count or 8, result["points"])
    assert result["resumed_old"] and (count or victim or result["resumed_new"])


def failing_scenario(rank, world, folder, fault, victim):
    """A good save, three saves under a fault on one rank, a good one again; what was noticed and what is left."""
    c, lines = open_folder(folder, rank, world)
    c.save(1, "latest", *state_for(rank, world, seed=1), {"step": 1}, wait=True)
    plain = {k: getattr(os, k) for k in ("mkdir", "fsync", "rename")}
    write = saver.write_tensors

    def refuse(number):
        def raising(*a, **k):
            raise OSError(number, os.strerror(number))

        return raising

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (2, 3, 4):
        if rank == victim:
            if fault == "file size limit":  # the kernel cuts the file short, as a full disk does
                resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
            elif fault == "own file":
                saver.write_tensors = lambda path, *a: (
                    refuse(errno.ENOSPC)() if "/own/" in path else write(path, *a)
                )
            else:
                setattr(
                    os,
                    fault,
                    refuse({"mkdir": errno.EROFS, "fsync": errno.EIO, "rename": errno.ENOSPC}[fault]),
                )
        try:
            c.save(step, "latest", *state_for(rank, world, seed=step), {"step": step}, wait=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            saver.write_tensors = write
            for name in ("mkdir", "fsync", "rename"):
                setattr(os, name, plain[name])
    failed = list(c.failures)
    dist.barrier()
    names = sorted(n for n in os.listdir(folder) if not n.startswith((".lock", "run.json")))
    loaded, own = state_for(rank, world, seed=9)
    state, _ = c.load(c.newest(), loaded, own)
    right = all_bits(loaded) == all_bits(state_for(rank, world, seed=1)[0])
    c.save(5, "latest", *state_for(rank, world, seed=5), {"step": 5}, wait=True)
    receipts = [r["step"] for r in c.poll()]
    c.close()
    return failed, names, state["step"], right, receipts, sum("CHECKPOINT FAILED" in line for line in lines)


@pytest.mark.parametrize(
    "fault, world, victim",
    [
        ("file size limit", 1, 0),
        ("file size limit", 2, 1),
        ("mkdir", 2, 0),
        ("fsync", 2, 1),
        ("fsync", 1, 0),
        ("rename", 2, 0),
        ("own file", 2, 1),
    ],
)
def test_a_failing_disk_is_counted_and_the_last_checkpoint_stays(tmp_path, fault, world, victim):
    """On whichever rank: all ranks count it, say it at every attempt, leave no litter, and save again when it is over."""
    for failed, names, step, right, receipts, loud in run(
        failing_scenario, world=world, folder=str(tmp_path), fault=fault, victim=victim
    ):
        assert len(failed) == loud == 3 and all(f"rank {victim}" in f for f in failed), failed
        assert names == ["step-00000001-latest-0001"] and (step, right) == (1, True)
        assert receipts == [1, 5]


FULL = """
import sys; sys.path[:0] = [{tests!r}, {root!r}]
import os, json, torch.distributed as dist
from checkpoint_tools import open_folder, state_for
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
folder = sys.argv[1]
c, lines = open_folder(folder, keep=1)
for step in range(1, 4):
    c.save(step, "latest", *state_for(0, 1, seed=step), {{"step": step}}, wait=True)
saved = len(c.poll())
print(json.dumps([saved, len(c.failures), c.failures[-1:], [n for n in os.listdir(folder) if n.startswith((".tmp", "step"))]]))
c.close()
"""


def in_small_file_system(script, options) -> list:
    """Run a program whose folder is a tmpfs of its own mount namespace."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount: ENOSPC of a real file system was not tested")
    shell = f"mount -t tmpfs -o {options} none /mnt && {script}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", shell], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_keeps_the_checkpoint_that_fits(tmp_path):
    """A real ENOSPC: one checkpoint fits beside the ballast, a second does not until the first is gone, which must not
    happen."""
    program = tmp_path / "program.py"
    program.write_text(FULL.format(tests=TESTS, root=ROOT))
    shell = f"head -c 60000 /dev/zero > /mnt/ballast && {shlex.quote(sys.executable)} {shlex.quote(str(program))} /mnt"
    saved, failures, last, names = in_small_file_system(shell, "size=92k")
    assert saved == 1 and failures == 2 and "No space left" in last[0], (saved, failures, last)
    assert names == ["step-00000001-latest-0001"]


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FULL.format(tests=TESTS, root=ROOT))
    with pytest.raises(AssertionError, match="CheckpointError: out_dir .*Read-only"):
        in_small_file_system(
            f"mount -o remount,ro /mnt && {shlex.quote(sys.executable)} {shlex.quote(str(program))} /mnt/out",
            "size=1m",
        )


def test_an_unreadable_disk_does_not_rename_a_good_checkpoint(tmp_path):
    """EIO may pass: the checkpoint is skipped loudly but stays under its name."""
    result = run(unreadable_scenario, world=1, folder=str(tmp_path))[0]
    assert result[0] and result[1] == ["step-00000001-latest-0001"]


def unreadable_scenario(rank, world, folder):
    c, lines = open_folder(folder, rank, world)
    c.save(1, "latest", *state_for(rank, world), {}, wait=True)
    plain = sealed.file_sha256

    def broken(path):
        raise OSError(errno.EIO, "Input/output error", path)

    sealed.file_sha256 = broken
    try:
        c.newest()
        error = ""
    except CheckpointError as e:
        error = str(e)
    finally:
        sealed.file_sha256 = plain
    names = sorted(n for n in os.listdir(folder) if "step" in n)
    assert c.newest().endswith(names[0])
    c.close()
    return "none is usable" in error and any("Input/output" in line for line in lines), names


def test_leftovers_of_a_killed_save_go_and_others_stay(tmp_path):
    """At the next start: this run's temporary folders are removed; another run's, unknown files and half a download of
    this run, which goes on, are not."""
    run(leftovers_scenario, world=1, folder=str(tmp_path))
    assert sorted(n for n in os.listdir(tmp_path) if n.startswith((".tmp", "keep"))) == [
        ".tmp-other+step-00000009-latest-0009",
        "keep.txt",
    ]


def leftovers_scenario(rank, world, folder):
    c, _ = open_folder(folder)
    c.close()
    for name in (f".tmp-{c.run_id}+step-00000009-latest-0009", ".tmp-other+step-00000009-latest-0009"):
        os.makedirs(os.path.join(folder, name, "tensors"))
    with open(os.path.join(folder, "keep.txt"), "w") as f:
        f.write("mine")
    before = digest_of(folder)
    download = os.path.join(folder, f".tmp-{c.run_id}+step-00000008-latest-0008.part")
    os.mkdir(download)
    c, lines = open_folder(folder)
    os.rmdir(download)
    assert sum("left by a save that was killed" in line for line in lines) == 1
    assert digest_of(folder)["keep.txt"] == before["keep.txt"]
    c.close()


def order_scenario(rank, world, folder):
    """What a save syncs and renames, in order; the files it made."""
    events, fsync, rename = [], os.fsync, os.rename
    os.fsync = lambda fd: (events.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))[1]
    os.rename = lambda a, b: (events.append(("rename", b)), rename(a, b))[1]
    try:
        c, _ = open_folder(folder)
        c.save(1, "latest", *state_for(0, 1), {}, wait=True)
    finally:
        os.fsync, os.rename = fsync, rename
    c.close()
    return events, f"{folder}/.tmp-{c.run_id}+step-00000001-latest-0001"


def test_everything_is_on_the_disk_before_the_name_is(tmp_path):
    """A power cut keeps what was synced only: all files and folders, the manifest after the rest, then the rename, then
    the folder that holds the new name."""
    events, temporary = run(order_scenario, world=1, folder=str(tmp_path))[0]
    final = str(tmp_path / "step-00000001-latest-0001")
    at = events.index(["rename", final] if isinstance(events[0], list) else ("rename", final))
    before = [path.removeprefix(temporary + "/").removesuffix(".tmp") for _, path in events[:at]]
    after = [path for _, path in events[at + 1 :]]
    files = set(digest_of(final)) | {"tensors", "own"}
    assert files <= set(before) and temporary in before and after == [str(tmp_path)]
    assert before.index("manifest.json") > max(before.index(f) for f in files - {"manifest.json"})
