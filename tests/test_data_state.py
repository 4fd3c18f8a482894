"""The stream's state: what is refused, what may change, files and memory in the long run; real processes."""

import functools
import json
import operator
import os
import threading
from types import SimpleNamespace

import corpora
import pytest
import workers
from checkpoint_tools import Ranks
from conftest import quiet
from corpora import Crew, dataset, rows, settings, write
from workers import Rank

import data
from text.source import FolderSource


@pytest.fixture
def root(tmp_path):
    return dataset(tmp_path)


def test_a_failing_batch_draws_nothing(root):
    """After the shard is repaired the same call gives the samples it would have given."""
    expected, crew = Crew(settings(root)).run(range(6), n=20), Crew(settings(root))
    path = f"{root}/data/code/{crew.streams[0].cursors[0].order(0)[1][-7:]}"
    os.rename(path, path + ".gone")
    samples = []
    with pytest.raises(data.DataError, match="no such file"):
        for _step in range(6):
            samples += crew.step(20)
    with pytest.raises(data.DataError, match="no such file"):
        crew.step(20)
    os.rename(path + ".gone", path)
    while len(samples) < len(expected):
        samples += crew.step(20)
    assert samples == expected


def test_every_mutated_field_of_the_state_is_refused(root):
    crew = Crew(settings(root))
    crew.run(range(3))
    state, changed = crew.state(), 0

    def places(value, path=()):
        if isinstance(value, (dict, list)):
            for k in value if isinstance(value, dict) else range(len(value)):
                yield from places(value[k], (*path, k))
        else:
            yield path, value

    for path, value in places(state):
        other = json.loads(json.dumps(state))
        spot = functools.reduce(operator.getitem, path[:-1], other)
        spot[path[-1]] = value + 1 if isinstance(value, int) else "data/code/../../x.npy" if value else 1
        with pytest.raises(data.DataError):
            Crew(settings(root), state=other)
        changed += 1
    assert changed > 30
    for wrong in ({}, {"digest": 1}, [], {**state, "extra": 1}):
        with pytest.raises(data.DataError):
            Crew(settings(root), state=wrong)


def test_state_of_another_run_is_refused_with_the_setting_to_put_back(root):
    state = Crew(settings(root)).state()
    for change, name in (
        (dict(seed=8), "seed=7"),
        (dict(max_len=4), "max_len=8"),
        (dict(domains=["code", "math"]), "--allow_change=domains"),
        (dict(domain_weights=[2, 1, 1, 1]), "--allow_change=domain_weights"),
    ):
        with pytest.raises(data.DataError, match=name):
            Crew(settings(root, **change), state=state)


def test_allowed_changes_go_on_where_each_domain_was(root):
    """A domain that stays goes on, one that is new begins, one that left is forgotten."""
    crew = Crew(settings(root, domains=["code", "general"]))
    crew.run(range(1), n=20)
    state = crew.state()
    new = settings(root, domains=["math", "code"], domain_weights=[1, 2], allow_change=["domains"])
    samples = Crew(new, 2, state).run(range(1, 3), n=24)
    seen = [tuple(s[2]) for s in crew.run(range(1, 20), n=2) if s[1] == 0]
    assert [tuple(s[2]) for s in samples if s[1] == 1][: len(seen)] == seen[:32]


def seal(state):
    state["digest"] = data.state_digest({k: v for k, v in state.items() if k != "digest"})


def test_paths_in_a_state_stay_inside_the_dataset(root):
    """A state that is whole, but was made to read another file."""
    state = Crew(settings(root)).state()
    state["domains"]["code"]["admitted"][0][2][0][0] = "data/code/../../../etc/passwd.npy"
    seal(state)
    with pytest.raises(data.DataError, match="not of the form data/code/NAME.npy"):
        Crew(settings(root), state=state)


class Lending(FolderSource):
    """A source whose files are held from fetch to release, as HubSource's are."""

    def __init__(self, root):
        super().__init__(root)
        self.held = set()

    def fetch(self, name, revision=None, id=None):
        self.held.add(name)
        return super().fetch(name, revision, id)

    def release(self, name):
        self.held.discard(name)


def open_shards(root) -> list[str]:
    """The files below `root` that this process has open."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    paths = (os.readlink(fd) for fd in links if os.path.islink(fd))
    return [path for path in paths if path.startswith(str(root))]


def test_at_most_two_files_of_a_domain_are_held(root):
    """The current and the next: a bounded cache can delete the rest. Also when shards last less than a fetch."""
    source = Lending(root)
    crew = Crew(settings(root), source=source)
    for step in range(40):
        crew.step(24, step)
        for thread in threading.enumerate():
            if thread.name.startswith("prefetch"):
                thread.join(60)
        assert len(source.held) <= 8
        assert len(open_shards(root)) <= 5, "open files pile up"
    list(crew.streams[0].val_batches(3, 3))
    assert len(source.held) <= 8


def test_resume_deep_in_a_large_manifest_opens_only_the_current_shards(tmp_path):
    """All 20,000 shards are one file. Only held-out rows, the current and the next shard are fetched."""
    path, fetched = write(tmp_path, "a.npy", rows(0, 40, 9)), []
    source = SimpleNamespace(
        revision="0" * 40,
        metadata=lambda: {"vocab_size": 1 << 30},
        list=lambda domain: {f"data/{domain}/fineweb_edu_{i:06d}.npy": "f" * 64 for i in range(5000)},
        fetch=lambda name, revision=None, id=None: (fetched.append(name), path)[1],
        release=lambda name: None,
    )
    state = Crew(settings(tmp_path), source=source).state()
    for place in state["domains"].values():  # 100,000 steps of 24 samples: 600,000 a domain, 40 a shard
        place["epoch"], place["shard"], place["pos"] = 3, 0, 12
    state["samples"] = 2_400_000
    seal(state)
    assert len(json.dumps(state)) < 150 * 20_000
    fetched.clear()
    crew = Crew(settings(tmp_path), source=source, state=state)
    crew.step(24)
    assert len(fetched) <= 12, "held-out, current and next shard of four domains"


def test_open_files_and_memory_stay_flat(tmp_path):
    """10,000 batches over 800 shard changes: no descriptor and no memory is kept (after a warm-up of the allocator)."""
    write(tmp_path, "data/code/a.npy", rows(0, 40, 257))
    write(tmp_path, "data/code/b.npy", rows(40, 40, 257))
    corpora.describe(tmp_path)
    crew = Crew(settings(tmp_path, max_len=256, domains=["code"], val_rows=1, eval_rows=1, final_eval_rows=1))
    stream = crew.streams[0]

    def use():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))

    for _ in range(1000):
        stream.next_batch(6)
    before = use()
    for _ in range(10_000):
        stream.next_batch(6)
    after = use()
    assert stream.epochs()["code"] > 800
    assert after[0] - before[0] < 4 << 20, "10,000 batches of 24 kB each would be 245 MB if they were kept"
    assert after[1] <= before[1] + 2


def six_steps(stream, start):
    """What a stream gives in steps start … start + 5, and its state then."""
    out = []
    for step in range(start, start + 6):
        if stream.news.listing:
            stream.news.listing.join(60)
        stream.refresh(step)
        b = stream.next_batch(24)
        out.append((b.ids, b.x.tolist(), b.y.tolist()))
    return out, stream.state()


def train_on(rank, world, folder, start, state=None):
    agree = Ranks(rank, world) if world > 1 else Rank()
    return six_steps(data.open_stream(settings(folder), agree, quiet, state), start)


def fail_on(rank, world, folder):
    try:
        data.open_stream(settings(folder), Ranks(rank, world), quiet)
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def joined(results):
    """Global batches of the steps from the ranks' slices."""
    steps = zip(*[r[0] for r in results], strict=True)
    return [tuple(sum((part[i] for part in step), []) for i in range(3)) for step in steps]


def test_real_processes_agree(root):
    """Two gloo processes for six steps, then three from their state: one process's sequence. A new shard arrives."""
    write(root, "data/code/late.npy", rows(7000, 5, 9))
    late, first = f"{root}/data/code/late.npy", f"{root}-late.npy"
    os.rename(late, first)
    two = workers.run(train_on, 2, folder=root, start=0)
    os.rename(first, late)
    three = workers.run(train_on, 3, folder=root, start=6, state=two[0][1])
    assert len({json.dumps(r[1]) for r in three}) == 1
    os.rename(late, first)
    alone = train_on(0, 1, root, 0)
    os.rename(first, late)
    rest = train_on(0, 1, root, 6, alone[1])
    assert joined(two) + joined(three) == joined([alone]) + joined([rest])


def test_a_bad_dataset_stops_all_ranks(tmp_path):
    """Rank 0 finds it, both end."""
    dataset(tmp_path, domains=["code", "general", "math"])
    told = workers.run(fail_on, 2, folder=str(tmp_path))
    assert "DataError" in told[0] and "reasoning" in told[0]
    assert "RuntimeError" in told[1] and "reasoning" in told[1]
