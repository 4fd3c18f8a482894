"""What is damaged is refused, whatever the damage; and names that are not ours are left alone."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_tools import all_bits, damage, digest_of, names_in, open_folder, save, saved_once, state_for
from workers import run

from store import CheckpointError, sealed

pytestmark = pytest.mark.usefixtures("one_rank_group")


@pytest.mark.parametrize(
    "count", [60, pytest.param(250, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.drill)]
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
    manifest = tmp_path / names_in(tmp_path)[0] / "manifest.json"
    good = manifest.read_bytes()
    for at in range(len(good)):
        for bit in {at % 8, 7 - at % 8, 0} if at % 3 == 0 else {at % 8}:
            manifest.write_bytes(good[:at] + bytes([good[at] ^ (1 << bit)]) + good[at + 1 :])
            with pytest.raises(CheckpointError):
                sealed.verify(str(manifest.parent))


def damaged_scenario(rank, world, folder):
    """Saves steps 1 to 3, then flips one bit in each file of the newest in turn: what each fallback gave."""
    c, _ = open_folder(folder, rank, world, keep=3)
    save(c, 1, 2, 3)
    c.close()
    newest, results = Path(folder, names_in(folder)[-1]), []
    aside = newest.with_name("damaged-" + newest.name)
    for path in sorted(newest / file for file in digest_of(newest)):
        good = path.read_bytes()
        dist.barrier()
        if rank == 0:
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        dist.barrier()
        c, lines = open_folder(folder, rank, world, keep=3)
        shared, own = state_for(rank, world, seed=77)
        state, own_loaded = c.load(c.newest(), shared, own)
        same = all_bits(shared) == all_bits(state_for(rank, world, seed=2)[0])
        results.append((state["step"], own_loaded, same, sum("DAMAGED" in line for line in lines)))
        c.close()
        if rank == 0:
            if aside.exists():
                aside.rename(newest)
            path.write_bytes(good)
        dist.barrier()
    return results


def test_a_damaged_newest_falls_back_to_the_one_before_loudly(tmp_path):
    """One bit in any file. Each rank hashes only its share, so whichever rank sees it, all go back together."""
    for results in run(damaged_scenario, world=2, folder=str(tmp_path)):
        assert results == [(2, True, True, 1)] * 6


def test_when_all_are_damaged_the_run_stops_and_starts_nothing_over(tmp_path):
    saved_once(tmp_path, 1, 2)
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


def without_seal(manifest):
    other = {**json.loads(manifest.read_text()), "step": 10}
    manifest.write_text(json.dumps(other, indent=1, sort_keys=True))


def link_to_the_same_bytes(shard, elsewhere):
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)


BAD = {  # what makes of the checkpoint b, with its manifest m and shard s, something that has its name and is none
    "empty": lambda b, m, s: (shutil.rmtree(b), b.mkdir()),
    "a file": lambda b, m, s: (shutil.rmtree(b), b.write_text("not a folder")),
    "no manifest": lambda b, m, s: m.unlink(),
    "manifest is a list": lambda b, m, s: m.write_text("[]"),
    "manifest is empty": lambda b, m, s: m.write_text(""),
    "manifest is deep": lambda b, m, s: m.write_text("[" * 100_000),
    "manifest without seal": lambda b, m, s: without_seal(m),
    "file missing": lambda b, m, s: s.unlink(),
    "file added": lambda b, m, s: shutil.copy(s, s.with_name("rank-00002.safetensors")),
    "files exchanged": lambda b, m, s: shutil.copy(b / "state.json", s),
    "dangling link": lambda b, m, s: (s.unlink(), s.symlink_to("/nowhere")),
    "link to the same bytes": lambda b, m, s: link_to_the_same_bytes(s, b.with_name("elsewhere")),
    "another's copy": lambda b, m, s: (shutil.rmtree(b), shutil.copytree(min(b.parent.glob("step-*")), b)),
}


@pytest.mark.parametrize("how", BAD)
def test_a_folder_without_a_fitting_manifest_is_not_a_checkpoint(tmp_path, how):
    """It is skipped with a loud line for the good one before it, never loaded, never deleted."""
    saved_once(tmp_path, 1, 9)
    good, bad = (tmp_path / name for name in names_in(tmp_path))
    aside = bad.with_name("damaged-" + bad.name)
    BAD[how](bad, bad / "manifest.json", next((bad / "tensors").iterdir()))
    c, lines = open_folder(tmp_path)
    assert c.newest() == str(good)
    assert any("DAMAGED" in line and bad.name in line for line in lines)
    if how != "another's copy":  # which is intact, and not the one that it is called
        with pytest.raises((CheckpointError, OSError)):
            sealed.verify(str(aside if aside.exists() else bad))
    save(c, 10, 11)
    assert os.path.lexists(bad) or os.path.lexists(aside)
    assert not c.failures


FOREIGN = (
    "step-1-latest-0001|step-00000001-newest-0001|step-00000001-latest|xstep-00000001-latest-0001|"
    "step-00000001-latest-0001.bak|.tmp-x+step-00000001-latest-0001|step_00000001|ckpt_s0000001.model.pt"
)


@pytest.mark.parametrize("name", FOREIGN.split("|"))
def test_foreign_names_are_neither_loaded_nor_deleted(tmp_path, name):
    saved_once(tmp_path)
    good = str(tmp_path / names_in(tmp_path)[0])
    shutil.copytree(good, tmp_path / name)
    before = digest_of(tmp_path / name)
    c, _ = open_folder(tmp_path)
    assert c.newest() == good
    save(c, *range(2, 6))
    assert digest_of(tmp_path / name) == before


def test_a_tensor_of_which_a_piece_is_missing_or_there_twice_is_refused():
    """Files that are whole, of a save that was not: memory that nothing fills would be loaded as weights."""
    top, bottom = (sealed.Chunk("file", (row, 0), (2, 3)) for row in (0, 2))
    live = {"w": torch.zeros(4, 3)}
    sealed.compare({"w": ("F32", (4, 3), [top, bottom])}, live, "folder")
    for pieces, covered in (([bottom], 6), ([top, bottom, bottom], 18)):
        with pytest.raises(CheckpointError, match=f"w is saved in part: {covered} of 12"):
            sealed.compare({"w": ("F32", (4, 3), pieces)}, live, "folder")
