"""What is damaged is refused, whatever the damage; and names that are not ours are left alone."""

import json
import os
import random
import shutil

import pytest
import torch
import torch.distributed as dist
from checkpoint_tools import (
    all_bits,
    damage,
    digest_of,
    names_in,
    one_rank_group,  # noqa: F401 (a fixture)
    open_folder,
    saved_once,
    state_for,
)
from workers import run

from store import CheckpointError, sealed


@pytest.mark.parametrize(
    "count",
    [60, pytest.param(250, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.drill)],
)
def test_flips_and_truncations_are_refused(tmp_path, count):
    """Any file, the manifest and state.json included; then the intact one is still accepted."""
    saved_once(tmp_path / "run")
    source, rng = str(tmp_path / "run" / names_in(tmp_path / "run")[0]), random.Random(count)
    accepted = []
    for _ in range(count):
        copy = str(tmp_path / "copy")
        shutil.copytree(source, copy)
        what = damage(copy, rng)
        try:
            sealed.verify(copy)
            accepted.append(what)
        except CheckpointError:
            pass
        shutil.rmtree(copy)
    assert not accepted
    sealed.verify(source)
    print(f"refused {count} of {count} damaged checkpoints")


def test_every_bit_of_a_manifest_counts(tmp_path):
    """All single-bit flips of the manifest: it proves itself too."""
    saved_once(tmp_path)
    folder = str(tmp_path / names_in(tmp_path)[0])
    path = os.path.join(folder, "manifest.json")
    with open(path, "rb") as f:
        good = f.read()
    for at in range(len(good)):
        for bit in {at % 8, 7 - at % 8, 0} if at % 3 == 0 else {at % 8}:
            with open(path, "wb") as f:
                f.write(good[:at] + bytes([good[at] ^ (1 << bit)]) + good[at + 1 :])
            with pytest.raises(CheckpointError):
                sealed.verify(folder)


def damaged_scenario(rank, world, folder):
    """Saves steps 1 to 3, then flips one bit in each file of the newest in turn: what each fallback gave."""
    c, _ = open_folder(folder, rank, world, keep=3)
    for step in (1, 2, 3):
        c.save(step, "latest", *state_for(rank, world, seed=step), {"step": step}, wait=True)
    c.close()
    newest, results = names_in(folder)[-1], []
    for file in sorted(digest_of(os.path.join(folder, newest))):
        path = os.path.join(folder, newest, file)
        with open(path, "rb") as f:
            good = f.read()
        dist.barrier()
        if rank == 0:
            with open(path, "wb") as f:
                f.write(good[:-1] + bytes([good[-1] ^ 1]))
        dist.barrier()
        c, lines = open_folder(folder, rank, world, keep=3)
        shared, own = state_for(rank, world, seed=77)
        state, own_loaded = c.load(c.newest(), shared, own)
        same = all_bits(shared) == all_bits(state_for(rank, world, seed=2)[0])
        results.append((state["step"], own_loaded, same, sum("DAMAGED" in line for line in lines)))
        c.close()
        if rank == 0:
            aside = os.path.join(folder, "damaged-" + newest)
            if os.path.exists(aside):
                os.rename(aside, os.path.join(folder, newest))
            with open(path, "wb") as f:
                f.write(good)
        dist.barrier()
    return results


def test_a_damaged_newest_falls_back_to_the_one_before_loudly(tmp_path):
    """One bit in any file. Each rank hashes only its share, so whichever rank sees it, all go back together."""
    for results in run(damaged_scenario, world=2, folder=str(tmp_path)):
        assert results == [(2, True, True, 1)] * 6


def test_when_all_are_damaged_the_run_stops_and_starts_nothing_over(tmp_path):
    saved_once(tmp_path, steps=(1, 2))
    for name in names_in(tmp_path):
        damage(str(tmp_path / name), random.Random(name))
    before = sorted(digest_of(tmp_path).values())
    for launch in (1, 2):  # the second start meets what the first set aside: still no fresh start
        c, lines = open_folder(tmp_path)
        with pytest.raises(CheckpointError, match="none is usable"):
            c.newest()
        assert sum("DAMAGED" in line for line in lines) == (2 if launch == 1 else 0)
        c.close()
    after = digest_of(tmp_path)
    # nothing was deleted (lock, run.json)
    assert len([v for v in after.values() if v in before]) >= len(before) - 2


def make_bad(target, good, how):
    """Turn the checkpoint `target` into something that has its name and is none."""
    if how in ("empty", "a file", "another's copy"):
        shutil.rmtree(target)
    if how == "empty":
        os.mkdir(target)
    elif how == "another's copy":
        shutil.copytree(good, target)
    elif how == "a file":
        with open(target, "w") as f:
            f.write("not a folder")
    else:
        manifest = os.path.join(target, "manifest.json")
        tensors = os.path.join(target, "tensors")
        shard = os.path.join(tensors, os.listdir(tensors)[0])
        if how == "no manifest":
            os.unlink(manifest)
        elif how == "manifest is a list":
            with open(manifest, "w") as f:
                f.write("[]")
        elif how == "manifest is empty":
            open(manifest, "w").close()
        elif how == "manifest is deep":
            with open(manifest, "w") as f:
                f.write("[" * 100_000)
        elif how == "manifest without seal":
            with open(manifest) as f:
                data = json.load(f)
            data["step"] = 10
            with open(manifest, "w") as f:
                json.dump(data, f, indent=1, sort_keys=True)
        elif how == "file missing":
            os.unlink(shard)
        elif how == "file added":
            shutil.copy(shard, os.path.join(tensors, "rank-00002.safetensors"))
        elif how == "files exchanged":
            shutil.copy(os.path.join(target, "state.json"), shard)
        elif how == "dangling link":
            os.unlink(shard)
            os.symlink("/nowhere", shard)
        elif how == "link to the same bytes":
            os.rename(shard, shard + ".elsewhere")
            shutil.move(shard + ".elsewhere", os.path.join(os.path.dirname(target), "elsewhere"))
            os.symlink(os.path.join(os.path.dirname(target), "elsewhere"), shard)


BAD = "empty|a file|no manifest|manifest is a list|manifest is empty|manifest is deep|manifest without seal|file missing"
BAD = [
    *BAD.split("|"),
    "file added",
    "files exchanged",
    "dangling link",
    "link to the same bytes",
    "another's copy",
]


@pytest.mark.parametrize("how", BAD)
def test_a_folder_without_a_fitting_manifest_is_not_a_checkpoint(tmp_path, how):
    """It is skipped with a loud line for the good one before it, never loaded, never deleted."""
    saved_once(tmp_path, steps=(1, 9))
    good, bad = (str(tmp_path / name) for name in names_in(tmp_path))
    make_bad(bad, good, how)
    c, lines = open_folder(tmp_path)
    assert c.newest() == good
    assert any("DAMAGED" in line and os.path.basename(bad) in line for line in lines)
    if how != "another's copy":  # which is intact, and not the one that it is called
        aside = os.path.join(tmp_path, "damaged-" + os.path.basename(bad))
        with pytest.raises((CheckpointError, OSError)):
            sealed.verify(aside if os.path.exists(aside) else bad)
    c.save(10, "latest", *state_for(0, 1), {}, wait=True)
    c.save(11, "latest", *state_for(0, 1), {}, wait=True)
    assert os.path.lexists(bad) or os.path.lexists(str(tmp_path / ("damaged-" + os.path.basename(bad))))
    assert not c.failures
    c.close()


@pytest.mark.parametrize(
    "name",
    "step-1-latest-0001|step-00000001-newest-0001|step-00000001-latest|xstep-00000001-latest-0001|"
    "step-00000001-latest-0001.bak|.tmp-x+step-00000001-latest-0001|step_00000001|ckpt_s0000001.model.pt".split(
        "|"
    ),
)
def test_foreign_names_are_neither_loaded_nor_deleted(tmp_path, name):
    saved_once(tmp_path)
    good = str(tmp_path / names_in(tmp_path)[0])
    shutil.copytree(good, tmp_path / name)
    before = digest_of(tmp_path / name)
    c, _ = open_folder(tmp_path)
    assert c.newest() == good
    for step in range(2, 6):
        c.save(step, "latest", *state_for(0, 1), {}, wait=True)
    c.close()
    assert digest_of(tmp_path / name) == before


def test_a_tensor_of_which_a_piece_is_missing_or_there_twice_is_refused():
    """Files that are whole, of a save that was not: memory that nothing fills would be loaded as weights."""
    top, bottom = (sealed.Chunk("file", (row, 0), (2, 3)) for row in (0, 2))
    live = {"w": torch.zeros(4, 3)}
    sealed.compare({"w": ("F32", (4, 3), [top, bottom])}, live, "folder")
    for pieces, covered in (([bottom], 6), ([top, bottom, bottom], 18)):
        with pytest.raises(CheckpointError, match=f"w is saved in part: {covered} of 12"):
            sealed.compare({"w": ("F32", (4, 3), pieces)}, live, "folder")
