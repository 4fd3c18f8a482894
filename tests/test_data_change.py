"""Shards that were repaired, removed or moved under a run: refused with the way past it, and what --allow_change=data does.

The reference is the run on the same data that nothing happened to.
"""

import json
import os

import numpy as np
import pytest
import workers
from checkpoint_tools import Ranks
from conftest import quiet
from corpora import ROW, Crew, dataset, rows, settings, write
from fake_hub import files_below

import data
import hub

REPO = "datasets/me/tokens"
CURE = "repair or remove it, then resume with --allow_change=data"
BAD = "data/code/001.npy"  # rows 13 … 19, the last one held out


class Place:
    """The dataset in a folder, or as a Hub repo that the folder is pushed to, with a cold cache at every start."""

    def __init__(self, kind, tmp_path, server):
        self.kind, self.server, self.starts, self.path = kind, server, 0, tmp_path
        self.root = dataset(tmp_path / "files")
        self.push()

    def push(self):
        """What the folder holds is all that the repo holds, its history included: what is gone is gone."""
        self.server.repos.pop(REPO, None)
        self.server.commit(REPO, files_below(self.root))

    def put(self, name, array):
        if array is None:
            os.remove(f"{self.root}/{name}")
        else:
            write(self.root, name, array)
        self.push()

    def settings(self, **changes):
        self.starts += 1
        where = "me/tokens" if self.kind == "hub" else self.root
        cache = str(self.path / f"cache{self.starts}")
        return settings(where, **dict(cache_dir=cache, hub_patience=5.0, shard_refresh_steps=0) | changes)

    def crew(self, world=1, state=None, log=quiet, **changes):
        return Crew(self.settings(**changes), world, state, log)


@pytest.fixture(params=["folder", "hub"])
def place(request, tmp_path, server):
    return Place(request.param, tmp_path, server)


def numbers(samples, domain=0):
    """The rows (their number in the dataset) of one domain's samples."""
    return [s[2][0] // ROW for s in samples if s[1] == domain]


def held_out(crew) -> set[int]:
    """The rows of the first domain that are held out."""
    return {x[0] // ROW for x, _ in crew.streams[0].cursors[0].domain.val_rows()}


def refused(match):
    return pytest.raises((data.DataError, hub.HubError), match=match)


def until_it_fails(crew):
    """(samples, state before the failing step, error) of steps of 6 samples."""
    samples = []
    while len(samples) < 600:
        state = crew.state()
        try:
            samples += crew.step(6)
        except (data.DataError, hub.HubError) as error:
            return samples, state, error
    raise AssertionError("nothing failed")


def spoiled(place):
    """The dataset with one id outside the vocabulary in a training row of BAD; -> (the repaired shard, expected samples)"""
    good, expected = np.load(f"{place.root}/{BAD}"), place.crew().run(range(60), n=6)
    bad = good.copy()
    bad[3, 4] = (1 << 30) + 5
    place.put(BAD, bad)
    return good, expected


def test_a_repaired_shard_goes_on_as_if_it_had_been_good(place):
    """To the row, on any number of ranks, over the epoch's end; without the flag it fails as before, with the cure."""
    good, expected = spoiled(place)
    samples, state, error = until_it_fails(place.crew(2))
    assert CURE in str(error) and "001.npy: row 3 column 4" in str(error)
    assert samples == expected[: len(samples)]
    place.put(BAD, good)
    for _ in range(2):
        with refused(CURE):
            place.crew(1, state).run(range(60), n=6)
    for world in (1, 3):
        lines = []
        crew = place.crew(world, state, lines.append, allow_change=["data"])
        assert samples + crew.run(range(60 - len(samples) // 6), n=6) == expected
        assert any(BAD in line and "content that they have now" in line for line in lines)
        again = place.crew(2, crew.state())  # from here on without the flag
        assert again.run(range(3), n=6) == crew.run(range(3), n=6)


def test_a_removed_shard_leaves_the_rest_of_the_epoch_as_it_was(place):
    """Its rows are missing, all others come in their old order; then epochs of all other rows, each once."""
    _, expected = spoiled(place)
    samples, state, _ = until_it_fails(place.crew(2))
    place.put(BAD, None)
    with refused(CURE):
        place.crew(2, state).run(range(60), n=6)
    lines, seen = [], numbers(samples)
    crews = [place.crew(world, state, lines.append, allow_change=["data"]) for world in (1, 2, 3)]
    one, two, three = (crew.run(range(60), n=6) for crew in crews)
    assert one == two == three
    assert [s[0] for s in one] == list(range(len(samples), len(samples) + 360))
    assert any(BAD in line and "left the source" in line for line in lines)
    trained, gone = {*range(30)} - {12, 19, 29}, {*range(13, 19)}
    rest = [n for n in numbers(expected)[len(seen) : len(trained)] if n not in gone]
    after = numbers(one)
    assert after[: len(rest)] == rest
    left = sorted(trained - gone)
    for first in range(len(rest), len(after) - len(left), len(left)):
        assert sorted(after[first : first + len(left)]) == left


@pytest.mark.parametrize("gone", range(3))
@pytest.mark.parametrize("seed", range(3))
def test_an_exchanged_shard_before_at_or_behind_the_place(tmp_path, seed, gone):
    """The rest of the epoch is the old one without the shard that left; the one that came ends it, on any world size."""
    s = dict(seed=seed, domains=["code"], shard_refresh_steps=0)
    sizes = (13, 7, 10)
    first, lost = sum(sizes[:gone]), f"data/code/{gone:03d}.npy"
    for step in range(1, 28, 5):
        root = dataset(tmp_path / str(step), shards=sizes, domains=["code"])
        crew = Crew(settings(root, **s))
        crew.run(range(step), n=1)
        state, rest = crew.state(), numbers(crew.run(range(27 - step), n=1))
        os.remove(f"{root}/{lost}")
        write(root, "data/code/new.npy", rows(700, 5, 9))
        kept = [n for n in rest if not first <= n < first + sizes[gone]]
        crews = [Crew(settings(root, allow_change=["data"], **s), world, state) for world in (1, 2)]
        one, two = (numbers(c.run(range(15), n=2)) for c in crews)
        assert one == two
        assert one[: len(kept)] == kept
        assert sorted(one[len(kept) : len(kept) + 5]) == [*range(700, 705)]


@pytest.mark.parametrize("step", [0, 1, 7, 13, 14, 30])
def test_where_nothing_changed_the_flag_changes_nothing(place, step):
    """At any place of an epoch, also with a shard that joined in it."""
    changes = dict(shard_refresh_steps=4)

    def arrive(at):
        if at == 7:
            write(place.root, "data/code/late.npy", rows(900, 5, 9))
            place.server.commit(REPO, files_below(place.root))

    crew = place.crew(2, **changes)
    crew.run(range(step), between=arrive)
    state = crew.state()
    rest = crew.run(range(step, 40), between=arrive)
    if step <= 7:
        place.put("data/code/late.npy", None)  # to arrive again
    again = place.crew(3, state, allow_change=["data"], **changes)
    assert again.run(range(step, 40), between=arrive) == rest


def test_shorter_and_renamed_shards(place):
    """Every shard of a domain lost rows or its name: held-out rows stay held out, then each row comes once an epoch."""
    crew = place.crew(1)
    crew.run(range(9), n=6)
    state = crew.state()
    place.put("data/code/000.npy", rows(0, 6, 9))  # was 13
    place.put("data/code/001.npy", rows(13, 4, 9))  # was 7
    os.rename(f"{place.root}/data/code/002.npy", f"{place.root}/data/code/other.npy")
    place.push()
    samples = place.crew(2, state, allow_change=["data"]).run(range(100), n=6)
    assert samples == place.crew(3, state, allow_change=["data"]).run(range(100), n=6)
    held = held_out(place.crew(1, state, allow_change=["data"]))
    assert held == {29}, "12 and 19 are gone, and what was trained on is never held out"
    code, trained = numbers(samples), sorted({*range(6), *range(13, 17), *range(20, 29)})
    assert set(code) == set(trained)
    n = len(trained)
    epochs = [[sorted(code[i : i + n]) for i in range(at, len(code) - n + 1, n)] for at in range(2 * n)]
    assert any(all(epoch == trained for epoch in cut) for cut in epochs), "no cut into whole epochs"


def test_a_domain_whose_shards_were_all_replaced_begins_with_the_new_ones(place):
    place.put("data/code/val.npy", rows(800, 5, 9))
    crew = place.crew(1)
    crew.run(range(9), n=6)
    for k in range(3):
        place.put(f"data/code/{k:03d}.npy", None if k else rows(700, 3, 9))
    os.rename(f"{place.root}/data/code/000.npy", f"{place.root}/data/code/new.npy")
    place.push()
    crew = place.crew(2, crew.state(), allow_change=["data"])
    assert set(numbers(crew.run(range(20), n=6))) == {700, 701, 702}
    assert held_out(crew) <= {*range(800, 805)}


def test_held_out_rows_are_read_at_the_start_and_replaced_by_new_ones(place):
    """Not at the first evaluation, an hour in. What was trained on is never held out: rows are asked for."""
    place.put("data/code/val.npy", rows(800, 5, 9))
    state = place.crew(1).state()
    for array in (np.full((5, 9), 1 << 31, "uint32"), None):
        place.put("data/code/val.npy", array)
        with refused(f"code/val.npy.*{CURE}"):
            place.crew(1, state)
    with pytest.raises(data.DataError, match=r"domain code: .*data/code/000.npy: add one named val\*.npy"):
        place.crew(1, state, allow_change=["data"])
    place.put("data/code/val_new.npy", rows(810, 5, 9))
    crew = place.crew(2, state, allow_change=["data"])
    assert held_out(crew) <= {*range(810, 815)}
    assert not {*range(800, 820)} & {*numbers(crew.run(range(20), n=6))}


def test_a_bad_held_out_row_ends_a_fresh_start(place):
    shard = np.load(f"{place.root}/data/math/000.npy")
    shard[-1, 2] = 1 << 31
    place.put("data/math/000.npy", shard)
    with pytest.raises(data.DataError, match="math/000.npy: row 12 column 2"):
        place.crew(1)


def test_a_move_between_a_folder_and_the_hub_is_named_at_once_and_can_be_accepted(place):
    """Their content ids are of two kinds, so nothing can be recognised: said without a download or a second try."""
    crew = place.crew(2)
    crew.run(range(7), n=6)
    state, expected = crew.state(), crew.run(range(7, 40), n=6)
    was, now = ("a folder", "a Hub repo") if place.kind == "folder" else ("a Hub repo", "a folder")
    place.kind = "hub" if place.kind == "folder" else "folder"
    place.server.log.clear()
    lines = []
    with pytest.raises(data.DataError, match=f"from {was}, data= now names {now} .*--allow_change=data"):
        place.crew(2, json.loads(json.dumps(state)), lines.append)
    assert not place.server.requests("resolve/.*npy") and not lines
    assert place.crew(3, state, allow_change=["data"]).run(range(7, 40), n=6) == expected


def goes_on(rank, world, folder, state):
    s = settings(folder, allow_change=["data"], shard_refresh_steps=0)
    stream = data.open_stream(s, Ranks(rank, world), quiet, state)
    return [stream.next_batch(6).x.tolist() for _ in range(20)], stream.state()


def test_real_processes_agree_on_what_there_is_now(tmp_path):
    """Two gloo processes, of which rank 0 alone looks, against one: a removed shard, a replaced one and a new one."""
    root = dataset(tmp_path)
    crew = Crew(settings(root, shard_refresh_steps=0))
    crew.run(range(5), n=6)
    state = crew.state()
    os.remove(f"{root}/{BAD}")
    write(root, "data/math/000.npy", rows(600, 8, 9))
    write(root, "data/general/new.npy", rows(700, 8, 9))
    two = workers.run(goes_on, 2, folder=root, state=state)
    alone = Crew(settings(root, allow_change=["data"], shard_refresh_steps=0), 1, state)
    batches = [[sample[2] for sample in alone.step(6)] for _ in range(20)]
    assert [a + b for a, b in zip(two[0][0], two[1][0], strict=True)] == batches
    assert two[0][1] == two[1][1] == alone.state()
