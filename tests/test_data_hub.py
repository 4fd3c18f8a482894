"""The stream of batches over a Hub dataset: the real client, a Hub on loopback that changes and fails under the run.

The reference is the same dataset in a folder, which no network can disturb.
"""

import time

import pytest
import workers
from checkpoint_tools import Ranks
from conftest import quiet
from corpora import Crew, dataset, rows, settings, write
from fake_hub import files_below, in_time, outcome

import data
from hub import HubError

REPO = "datasets/me/tokens"


@pytest.fixture
def root(tmp_path, server):
    """The dataset in a folder, and as the repo me/tokens of the Hub that HF_ENDPOINT names."""
    root = dataset(tmp_path / "files")
    server.commit(REPO, files_below(root))
    return root


def remote(tmp_path, cache="cache", **changes):
    return settings("me/tokens", cache_dir=str(tmp_path / cache), hub_patience=20.0, **changes)


def shard_bytes(tmp_path, *args) -> bytes:
    with open(write(str(tmp_path / "new"), "x.npy", rows(*args)), "rb") as f:
        return f.read()


@pytest.mark.parametrize("cache_gb", [64, 0])
def test_the_hub_gives_the_sequence_of_the_folder(root, tmp_path, server, cache_gb):
    """Three ranks, over several epochs; with no room in the cache, shards are fetched again and again, not wrongly."""
    expected = Crew(settings(root)).run(range(12))
    s = remote(tmp_path, cache_gb=cache_gb)
    assert Crew(s, 3).run(range(12)) == expected
    gets = server.requests("GET .*/resolve/.*npy")
    if cache_gb:
        assert len(gets) == len(set(gets)) == 12, "a shard was fetched twice"
    assert len(server.requests("/tree/")) == 1 and len(server.requests("/revision/")) <= 4
    assert not server.requests("/tree/.*/data/"), "a listing per domain"


@pytest.mark.parametrize("seed", range(3))
def test_faults_change_nothing(root, tmp_path, server, seed):
    """A third of all requests fail in one of nine ways: the sequence is the folder's."""
    kinds = (429, 500, 503, "reset", "cut", "truncated", "corrupt", "html", "slow")
    met = server.unreliable(seed, 1 / 3, kinds)
    expected = Crew(settings(root)).run(range(8))
    assert in_time(lambda: Crew(remote(tmp_path), 2).run(range(8)), 60) == expected
    assert len(met) > 5


def test_new_shards_join_at_the_fixed_step_with_their_commit(root, tmp_path, server):
    """Pushed between steps 1 and 4 and admitted at 4, whatever the world size; pushed again later, at 8."""
    first = server.repos[REPO][-1][0]

    def run(world, cache):
        del server.repos[REPO][2:]
        server.log.clear()
        pushed = {}

        def push(step):
            if step in (2, 6):
                new = shard_bytes(tmp_path, 5000 + step * 100, 6, 9)
                pushed[step] = server.commit(REPO, {f"data/{d}/new{step}.npy": new for d in ("code", "math")})

        crew = Crew(remote(tmp_path, cache), world)
        return crew.run(range(14), between=push), crew, pushed

    one, crew, pushed = run(1, "a")
    admitted = crew.state()["domains"]["code"]["admitted"]
    assert [a[1] for a in admitted] == [first, pushed[2], pushed[6]]
    assert [name for name, _ in admitted[1][2]] == ["data/code/new2.npy"]
    assert len(crew.state()["domains"]["general"]["admitted"]) == 1
    assert len(server.requests("/tree/")) <= 3, "a commit was listed twice"
    unchanged = Crew(settings(root)).run(range(14))
    assert one[: 4 * 24] == unchanged[: 4 * 24] and one != unchanged
    assert run(2, "b")[0] == one
    assert run(3, "c")[0] == one


def test_what_was_admitted_is_read_for_good(root, tmp_path, server):
    """Shards overwritten, deleted, renamed, new: resumed with empty caches at other world sizes."""
    files, s = files_below(root), remote(tmp_path, shard_refresh_steps=3)

    def disturb(step):
        if step == 4:
            gone = {"data/general/001.npy": None, "data/math/000.npy": None}
            moved = {"data/code/000.npy": files["data/code/002.npy"],
                     "data/math/renamed.npy": files["data/math/000.npy"]}  # fmt: skip
            new = {"data/reasoning/new.npy": shard_bytes(tmp_path, 9000, 8, 9)}
            server.commit(REPO, gone | moved | new)
        if step == 8:
            server.commit(REPO, {"data/reasoning/new.npy": None, "metadata.json": files["metadata.json"]})

    whole = Crew(s, 2).run(range(16), between=disturb)
    del server.repos[REPO][2:]
    crew = Crew(s, 2)
    samples = crew.run(range(5), between=disturb)
    for cache, world, end in (("b", 3, 7), ("c", 1, 11), ("d", 4, 16)):
        begin = len(samples) // 24
        crew = Crew(remote(tmp_path, cache, shard_refresh_steps=3), world, crew.state())
        samples += crew.run(range(begin, end), between=lambda step, b=begin: step > b and disturb(step))
        if end == 7:
            disturb(7 + 1)  # the new shard is deleted while nothing runs
    places = crew.state()["domains"]
    assert samples == whole
    assert len(places["math"]["admitted"]) == 1, "a rename is not new data"
    assert len(places["code"]["admitted"]) == 1, "new content under an old name is not new data either"
    assert [n for n, _ in places["reasoning"]["admitted"][1][2]] == ["data/reasoning/new.npy"]
    assert len(places["reasoning"]["admitted"][1][1]) == 40, "the commit that brought it"
    assert samples[: 6 * 24] == Crew(settings(root, shard_refresh_steps=3)).run(range(6))


def test_the_nearest_domain_of_the_repo_is_named(root, tmp_path):
    with pytest.raises(data.DataError, match="me/tokens: domain 'matth' .* did you mean 'math'"):
        Crew(remote(tmp_path, domains=["code", "matth"]))


@pytest.mark.parametrize("kind", [503, "reset", "html", "slow"])
def test_a_listing_failure_is_an_error_at_the_start(root, tmp_path, server, kind):
    """Never "no shards": the Hub's silence is not an empty dataset."""
    server.fault("/tree/", kind, times=10_000, seconds=60)
    s = remote(tmp_path)
    s.hub_patience = 0.2
    error = outcome(lambda: Crew(s))
    assert "listing" in str(error) and error.exit_code == 74


def test_a_listing_failure_is_a_warning_later(root, tmp_path, server):
    """The run goes on with what it knows, and admits what is new when the Hub is back."""
    s, lines = remote(tmp_path), []
    s.hub_patience = 0.2
    crew = Crew(s, 1, log=lines.append)
    samples = crew.run(range(4))
    server.commit(REPO, {"data/code/new.npy": shard_bytes(tmp_path, 5000, 6, 9)})
    server.fault("/revision/|/tree/", 503, times=10_000)
    samples += crew.run(range(4, 9))
    assert any("listing failed, the known shards are kept" in line for line in lines)
    assert len(crew.state()["domains"]["code"]["admitted"]) == 1
    server.faults.clear()
    samples += crew.run(range(9, 13))
    assert len(crew.state()["domains"]["code"]["admitted"]) == 2
    assert samples[: 12 * 24] == Crew(settings(root)).run(range(12))


def test_a_dead_hub_does_not_stop_a_run_whose_shards_are_here(root, tmp_path, server, monkeypatch):
    """For whole epochs, and through a restart, which needs the user's word that the Hub need not be asked."""
    s, lines = remote(tmp_path, shard_refresh_steps=0), []
    crew = Crew(s, 2)
    samples = crew.run(range(10))  # more than an epoch: all shards are in the cache
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{workers.free_port()}")
    samples += crew.run(range(10, 13))
    s.hub_patience = 0.2
    assert "HF_HUB_OFFLINE=1" in str(outcome(lambda: Crew(s, 2, crew.state())))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    samples += Crew(s, 3, crew.state(), log=lines.append).run(range(13, 16))
    assert samples == Crew(settings(root, shard_refresh_steps=0)).run(range(16))
    assert any("HF_HUB_OFFLINE: main as last seen" in line for line in lines)


def test_a_shard_that_stays_damaged_stops_the_run_and_is_never_read(root, tmp_path, server):
    server.fault("GET .*/resolve/.*data/math/001.npy", "corrupt", times=10_000)
    s = remote(tmp_path)
    s.hub_patience = 0.3
    error = outcome(lambda: Crew(s, 1).run(range(12)))
    assert "data/math/001.npy" in str(error) and "not content" in str(error)
    assert not [p for p in (tmp_path / "cache").rglob("001*.npy") if "math" in str(p)]


def test_the_next_shard_is_fetched_before_it_is_needed(root, tmp_path, server):
    """Soon after the first batch, though only a later one needs it. (Shard 000 is fetched for validation.)"""
    changes = dict(domains=["code"], sequences_per_step=2, val_rows=1, eval_rows=1, final_eval_rows=1)
    for seed in range(20):
        first, following = Crew(settings(root, seed=seed, **changes)).streams[0].cursors[0].order(0)[:2]
        if not following.endswith("000.npy"):
            break
    Crew(remote(tmp_path, seed=seed, **changes)).step(2)
    end = time.monotonic() + 20
    while not server.requests(f"GET .*/resolve/.*{following}"):
        assert time.monotonic() < end, f"{following} was not fetched ahead"
        time.sleep(0.05)


def test_all_ranks_read_one_commit(root, tmp_path, server):
    """Only rank 0 asks where the branch points: it may move before the others look."""
    metadata = b'{"vocab_size": 1073741824, "tokenizer": "tokenizer.json"}'
    server.commit(REPO, {"metadata.json": metadata, "tokenizer.json": b"{}"})
    Crew(remote(tmp_path), 3)
    assert len(server.requests("/revision/")) == 1 and len(server.requests("GET .*/tokenizer.json")) == 1


METADATA = "metadata.json"
BAD = {
    "no such repo": (None, "no dataset repo of this name"),
    "an empty repo": ({}, "data/ holds no folder"),
    "no such domain": ({"data/code/0.npy": b"x"}, "domain 'general' holds no .npy shard"),
    "metadata is not JSON": ({METADATA: b"vocab_size: 9"}, "metadata.json.*not JSON"),
    "metadata is a list": ({METADATA: b"[1]"}, "list"),
    "metadata lacks the vocabulary": ({METADATA: b"{}"}, "no vocab_size"),
    "a shard is a web page": ({f"data/{d}/000.npy": b"<html>" for d in ("code", "math")}, "000.npy.*npy"),
    "a shard is empty": ({f"data/{d}/000.npy": b"" for d in ("code", "math")}, "000.npy"),
    "a name leads out": ({"data/code/../../../evil.npy": b"x"}, "refused.*could lead out"),
    "a name is absolute": ({"data//etc/evil.npy": b"x"}, "refused.*could lead out"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_hub_dataset_is_named(root, tmp_path, server, what):
    """Exit code 65, the repo and the file in the message, whatever the file of data.py or hub.py that finds it."""
    change, says = BAD[what]
    if change is None:
        del server.repos[REPO]
    elif "repo" in what:
        server.commit(REPO, {path: None for path in server.files(REPO)})
        server.commit(REPO, {METADATA: b'{"vocab_size": 99}'})
    elif "domain" in what:
        server.commit(REPO, {path: None for path in server.files(REPO) if "general" in path})
    else:
        server.commit(REPO, change)
    with pytest.raises((data.DataError, HubError), match=says) as caught:
        in_time(lambda: Crew(remote(tmp_path), 1))
    assert caught.value.exit_code == 65 and "me/tokens" in str(caught.value)
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name]


def one_rank(rank, world, endpoint, cache, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", endpoint)
        s = settings("me/tokens", cache_dir=cache, hub_patience=20.0)
        stream = data.open_stream(s, Ranks(rank, world), log=quiet)
        out = []
        for step in range(steps):
            stream.refresh(step)
            out.append(stream.next_batch(24).x.tolist())
        return out


def test_processes_of_a_node_ask_the_hub_once(root, tmp_path, server):
    """Two real processes with one cache: rank 0 alone lists, each shard comes once."""
    steps = 6
    got = workers.run(one_rank, 2, endpoint=server.url, cache=str(tmp_path / "node"), steps=steps)
    expected = Crew(settings(root)).run(range(steps))
    for step in range(steps):
        x = sum((rank[step] for rank in got), [])
        assert x == [sample[2] for sample in expected[step * 24 : (step + 1) * 24]]
    assert len(server.requests("/tree/")) == 1
    gets = server.requests("GET .*/resolve/.*npy")
    assert len(gets) == len(set(gets)), "a shard was fetched by two processes"
