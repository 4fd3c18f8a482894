"""The stream: every row once, in one order on any number of ranks, through any cut; validation apart from it.

Its state, files and memory in the long run, and real processes are in test_data_state.py.
"""

import math
import os
import random
import shutil
import threading
from collections import Counter

import corpora
import numpy as np
import pytest
import torch
from corpora import Crew, dataset, rows, settings, write

import data
from text import shards
from text.source import FolderSource

WORLDS = (1, 2, 3, 4, 8)


@pytest.fixture
def root(tmp_path):
    return dataset(tmp_path)


def trained_per_epoch(crew) -> list[int]:
    """Samples of one epoch by domain, counted from the files' headers, not by the stream."""
    out = []
    for cursor in crew.streams[0].cursors:
        total = sum(len(np.load(os.path.join(crew.s.data, n), mmap_mode="r")) for n in cursor.domain.where())
        out.append(total - sum(v[4] for v in cursor.domain.val))
    return out


def test_every_row_once_per_epoch_in_another_order_each_time(root):
    """30 rows a domain, 3 held out: each epoch draws the other 27 once; orders of and in the shards differ."""
    crew = Crew(settings(root))
    (per_epoch,) = set(trained_per_epoch(crew))
    samples = crew.run(range(per_epoch * 3 * 4 // 12), n=12)
    for d in range(4):
        mine = [tuple(x) for _, domain, x, _ in samples if domain == d]
        epochs = [mine[i : i + per_epoch] for i in range(0, len(mine), per_epoch)]
        assert len(epochs) == 3
        assert all(len(set(e)) == per_epoch for e in epochs), "a row was repeated"
        assert set(epochs[0]) == set(epochs[1]) == set(epochs[2]), "an epoch lacks rows"
        shards_of = [np.load(f"{root}/data/{corpora.DOMAINS[d]}/{k:03d}.npy").tolist() for k in range(3)]
        file_of = {tuple(row[:8]): k for k, shard in enumerate(shards_of) for row in shard}
        inside = [[[r for r in e if file_of[r] == k] for k in range(3)] for e in epochs]
        for k in range(3):
            assert len({tuple(e[k]) for e in inside}) == 3, "the same order inside a shard in two epochs"
    orders = [tuple(crew.streams[0].cursors[0].order(e)) for e in range(1, 13)]
    assert len(set(orders)) > 1, "the order of the shards never changes"


def test_order_depends_on_seed_and_domain_names_only(root, tmp_path):
    """The same files elsewhere give the same order; another seed gives another."""
    copy = shutil.copytree(root, tmp_path / "copy")
    first = Crew(settings(root)).run(range(4))
    assert Crew(settings(copy)).run(range(4)) == first
    assert Crew(settings(root, seed=8)).run(range(4)) != first
    # a single shard: the order inside it depends on the seed as well
    one = dataset(tmp_path / "one", shards=(40,))
    assert Crew(settings(one)).run(range(2)) != Crew(settings(one, seed=8)).run(range(2))


@pytest.mark.parametrize("world", WORLDS)
def test_world_size_does_not_change_the_sequence(root, world):
    """Ranks take slices of the next n samples, in order."""
    samples = Crew(settings(root), world).run(range(1, 7))
    assert samples == Crew(settings(root)).run(range(1, 7))
    assert [s[0] for s in samples] == list(range(len(samples)))


def test_batch_size_does_not_change_the_sequence(root):
    """Sample g is a function of g: however many are drawn at a time."""
    one, crew = Crew(settings(root)).run(range(10), n=24), Crew(settings(root))
    assert sum((crew.step(n) for n in (1, 7, 24, 100, 108)), []) == one


def test_cut_anywhere_resume_with_any_world_size_as_often_as_you_like(root):
    """Six epochs, shards arrive in between: 20 random schedules of cuts and of world sizes give the uncut sequence."""
    steps = 40

    def arrivals(folder):
        def between(step):
            if step in (5, 17, 18):
                for d, domain in enumerate(corpora.DOMAINS[: 1 + step % 4]):
                    write(folder, f"data/{domain}/new{step:03d}.npy", rows(5000 + 50 * step + 10 * d, 6, 9))

        return between

    uncut_root = shutil.copytree(root, root + "-uncut")
    crew = Crew(settings(uncut_root))
    uncut = crew.run(range(steps), between=arrivals(uncut_root))
    assert max(crew.streams[0].epochs().values()) > 4 and crew.state()["domains"]["code"]["admitted"][1:]
    for trial in range(20):
        r, folder = random.Random(trial), shutil.copytree(root, f"{root}-{trial}")
        cuts = sorted(r.sample(range(1, steps), r.randrange(1, 6)))
        state, samples = None, []
        for start, end in zip([0, *cuts], [*cuts, steps], strict=True):
            crew = Crew(settings(folder), r.choice(WORLDS), state)
            samples += crew.run(range(start, end), between=arrivals(folder))
            state = crew.state()
        assert samples == uncut, f"trial {trial}, cuts {cuts}"
        shutil.rmtree(folder)


def test_state_can_also_be_loaded_into_an_open_stream(root):
    crew = Crew(settings(root))
    crew.run(range(5))
    state, expected = crew.state(), crew.run(range(5, 9))
    other = Crew(settings(root), 2)
    other.run(range(3))
    for stream in other.streams:
        stream.load_state(state)
    assert other.run(range(5, 9)) == expected
    assert other.state() == crew.state()


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [3, 1, 2, 1], [10, 1, 1, 5], [1, 1, 1, 4], [2, 4, 6, 8]])
def test_domain_weights_are_exact(root, weights):
    """Every window of sum(weights) samples, wherever it begins, holds exactly the weights (reduced by their divisor)."""
    crew = Crew(settings(root, domain_weights=weights))
    cycle = [w // math.gcd(*weights) for w in weights]
    drawn = [s[1] for s in crew.run(range(5))]
    for start in range(len(drawn) - sum(cycle)):
        window = drawn[start : start + sum(cycle)]
        assert [window.count(d) for d in range(4)] == cycle


SHAPES = [
    (40, 8), (40, 9), (20, 16), (20, 17), (20, 21), (10, 100), (40, 12), (80, 4), (90, 5), (99, 3), (160, 2), (400,),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["uint32", "int64", ">u4", "uint64"])
def test_any_row_length_reads_every_token_with_its_next_token(tmp_path, shape, dtype):
    """No token twice an epoch or invented, targets follow; less than a sample per shard is left out, and counted."""
    array = rows(0, shape[0], shape[1], dtype) if len(shape) == 2 else np.arange(shape[0]).astype(dtype)
    write(tmp_path, "data/code/a.npy", array)
    corpora.describe(tmp_path)
    crew = Crew(settings(tmp_path, domains=["code"], shard_refresh_steps=0))
    shard = crew.streams[0].shelf.open("data/code/a.npy", None, None)
    held = crew.streams[0].cursors[0].domain.val[0][4]
    samples = crew.run(range(1), n=shard.n - held)
    pairs = [(s[2], s[3]) for s in samples]
    for b in crew.streams[0].val_batches(3, 3):
        pairs += [(x, y) for x, y in zip(b.x.tolist(), b.y.tolist(), strict=True) if max(y) >= 0]
    inputs, targets, none = [], [], 0
    for x, y in pairs:
        inputs += x
        for a, b in zip(x, y, strict=True):
            assert b in (-1, a + 1), "a target is not the next token of its row"
        targets += [t for t in y if t >= 0]
        none += y.count(-1)
    tokens = set(array.ravel().tolist())
    assert len(inputs) == len(set(inputs)) and set(inputs) <= tokens
    assert set(targets) <= tokens and len(targets) == len(set(targets))
    seen = set(inputs) | set(targets)
    # the token between the last trained and the first held-out sample is an input of the latter: never a target
    assert shard.by_row or shard.wasted == len(tokens - seen)
    assert len(tokens - seen) <= 8
    borders = array.size // (shape[-1] if len(shape) == 2 else array.size)
    assert none <= borders + 2, "more targets are missing than rows end"


def test_small_dtypes(tmp_path):
    for dtype in ("uint8", "int8", "uint16", "int16"):
        write(tmp_path, f"data/code/{dtype}.npy", np.arange(126).reshape(14, 9).astype(dtype))
    corpora.describe(tmp_path, vocab_size=126)
    samples = Crew(settings(tmp_path, domains=["code"])).run(range(1), n=50)
    assert all(y == [t + 1 for t in x] for _, _, x, y in samples)
    write(tmp_path / "edge", "data/code/a.npy", np.full((20, 9), 255, "uint8"))
    corpora.describe(tmp_path / "edge", vocab_size=255)
    with pytest.raises(data.DataError, match="token id 255, outside the vocabulary of 255"):
        Crew(settings(tmp_path / "edge", domains=["code"])).run(range(1))


def test_shorter_contexts_keep_every_token_and_target():
    """(B, T) -> (B*T/ctx, ctx) is the same text; a context's last target is the first input of the next."""
    x = torch.arange(48).view(2, 24)
    batch = data.Batch(x, x + 1, torch.tensor([3, 1]), [10, 11]).contexts(8)
    assert batch.x.shape == (6, 8) and torch.equal(batch.x.view(2, 24), x)
    assert torch.equal(batch.y[:, -1], batch.x[:, -1] + 1) and torch.equal(batch.y[0, -1], batch.x[1, 0])
    assert batch.domain.tolist() == [3, 3, 3, 1, 1, 1] and batch.ids == [10, 10, 10, 11, 11, 11]
    with pytest.raises(data.DataError, match="does not divide"):
        data.Batch(x, x, torch.tensor([0, 0]), [0, 1]).contexts(7)


def val_set(crew, wanted=3, batch=2):
    """{domain: sorted held-out rows}, (sum, count) of a made-up loss over all ranks, batches per rank."""
    out, total, count, batches = {}, 0.0, 0, []
    for stream in crew.streams:
        b = list(stream.val_batches(wanted, batch))
        batches.append(len(b))
        for one in b:
            assert one.x.shape == (batch, 8)
            total += float(one.y.double().sqrt()[one.y >= 0].sum())
            count += int((one.y >= 0).sum())
            for d, x, id in zip(one.domain.tolist(), one.x.tolist(), one.ids, strict=True):
                if id >= 0:
                    out.setdefault(d, []).append(tuple(x))
    return {d: sorted(v) for d, v in out.items()}, (total, count), batches


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_validation_is_the_same_set_and_mean_at_any_world_size(root, world, batch):
    """12 rows do not divide by 8 ranks x 5 rows: rows without targets fill the rest, so that no rank waits alone."""
    one, (total, count), _ = val_set(Crew(settings(root)))
    many, (total_w, count_w), batches = val_set(Crew(settings(root), world), batch=batch)
    assert many == one and [len(v) for v in one.values()] == [3, 3, 3, 3]
    assert count_w == count and math.isclose(total_w, total, rel_tol=1e-12)
    assert len(set(batches)) == 1


def test_validation_rows_are_never_trained_and_never_move(root):
    """Not as input, not as target; across a resume, a shard that sorts first, another number of evaluation rows."""
    crew = Crew(settings(root))
    before = val_set(crew)[0]
    trained = crew.run(range(8))
    for d in corpora.DOMAINS:
        write(root, f"data/{d}/000-first.npy", rows(9000, 20, 9))
    trained += crew.run(range(8, 24))
    assert val_set(crew)[0] == before == val_set(Crew(settings(root), 2, crew.state()))[0]
    assert all(set(few) <= set(before[d]) for d, few in val_set(crew, wanted=2)[0].items())
    held = {t for v in before.values() for x in v for t in x}
    assert len(held) == 4 * 3 * 8
    assert not held & {t for _, _, x, y in trained for t in x + y}


def test_the_last_trained_token_does_not_predict_the_first_held_out(tmp_path):
    """In a shard that is one line of tokens, training and held-out text touch."""
    write(tmp_path, "data/code/a.npy", np.arange(800, dtype="uint16"))
    corpora.describe(tmp_path)
    crew = Crew(settings(tmp_path, domains=["code"]))
    held = {t for x in val_set(crew)[0][0] for t in x}
    assert held == set(range(800 - 24, 800))
    assert not held & {t for _, _, x, y in crew.run(range(1), n=97) for t in x + y}


def test_shards_named_val_are_held_out_whole(root):
    """Other people's validation files must not be trained on. Rows are taken evenly from all over the file."""
    write(root, "data/code/val_000.npy", rows(4000, 30, 9))
    crew = Crew(settings(root))
    val = val_set(crew)[0][0]
    assert [x[0] // corpora.ROW for x in val] == [4000, 4010, 4020]
    write(root, "data/code/val_001.npy", rows(4500, 30, 9))  # nor when one arrives later
    trained = crew.run(range(20))
    assert not {s[2][0] // corpora.ROW for s in trained} & {*range(4000, 4030), *range(4500, 4530)}
    assert len({tuple(s[2]) for s in trained if s[1] == 0}) == 30


def test_few_rows_are_held_out_and_said(tmp_path):
    """A tenth of each shard at most: shards of 13, 7 and 10 rows give 1, 1, 1; val_rows=64 is not reached, and logged."""
    lines = []
    crew = Crew(settings(dataset(tmp_path), val_rows=64), log=lines.append)
    assert [v[4] for v in crew.streams[0].cursors[0].domain.val] == [1, 1, 1]
    assert any("only 3 of val_rows=64" in line for line in lines)


def test_new_shards_are_admitted_by_all_ranks_at_the_fixed_step_and_queue_up(root):
    """Written at step 1, admitted at step 4 by every rank, read after the shards of the running epoch."""
    crew = Crew(settings(root), 3)
    crew.run(range(1))
    write(root, "data/math/zz.npy", rows(8000, 5, 9))
    samples = crew.run(range(1, 4))
    assert all(len(s.cursors[2].domain.admitted) == 1 for s in crew.streams)
    samples += crew.run(range(4, 12))
    for domain in (stream.cursors[2].domain for stream in crew.streams):
        name = "data/math/zz.npy"
        assert domain.admitted[1] == [0, None, [[name, domain.where()[name][1]]]]
    maths = [s[2][0] // corpora.ROW for s in samples if s[1] == 2]
    assert {8000, 8001, 8002, 8003, 8004} <= set(maths)
    first = crew.streams[0].cursors[2].order(0)
    assert first[-1] == "data/math/zz.npy" and len(first) == 4


def test_a_listing_is_young_when_it_is_used(root):
    """Begun a tenth of an interval before, not right after the last one; a state taken before does not change with it."""
    crew = Crew(settings(root, domains=["code"]))
    stream, state = crew.streams[0], crew.streams[0].state()
    crew.run(range(1, 6), n=4)
    write(root, "data/code/late.npy", rows(8000, 5, 9))
    crew.run(range(6, 8), n=4)
    assert len(stream.cursors[0].domain.admitted) == 1
    crew.step(4, 8)
    assert len(stream.cursors[0].domain.admitted) == 2
    assert len(state["domains"]["code"]["admitted"]) == 1


def test_a_renamed_shard_is_not_new_data_and_is_still_read(root):
    """The content is known; the admitted name resumes from the file's new place."""
    crew = Crew(settings(root))
    state = crew.state()
    expected = crew.run(range(0, 3))
    os.rename(f"{root}/data/code/001.npy", f"{root}/data/code/renamed.npy")
    other = Crew(settings(root), state=state)
    assert other.run(range(0, 3)) == expected
    other.run(range(3, 9))
    assert len(other.streams[0].cursors[0].domain.admitted) == 1


def test_a_listing_sees_what_was_replaced(root):
    """Content ids are kept between listings, but not for a file that is another one of the same size."""
    source = FolderSource(root)
    before = source.list("code")
    write(root, "data/code/001.npy", np.load(f"{root}/data/code/001.npy")[::-1])
    after = source.list("code")
    assert [n for n in before if before[n] != after[n]] == ["data/code/001.npy"]


def test_a_shard_replaced_in_place_is_noticed(root):
    """Same name, same shape, other tokens, in the run and at a resume: the order would be a lie."""
    crew = Crew(settings(root))
    crew.run(range(1))
    state = crew.state()
    for k in range(3):
        write(root, f"data/code/{k:03d}.npy", np.load(f"{root}/data/code/{k:03d}.npy")[::-1])
    with pytest.raises(data.DataError, match="was replaced since this run admitted it.*restore it"):
        crew.run(range(1, 20))
    with pytest.raises(data.DataError, match="was replaced"):
        Crew(settings(root), state=state).run(range(1, 20))


def test_a_listing_failure_is_an_error_at_the_start_and_a_warning_later(root, monkeypatch):
    lines = []
    crew = Crew(settings(root), 2, log=lines.append)
    expected = Crew(settings(root)).run(range(9))

    def broken(self, domain):
        raise OSError("the disk is gone")

    monkeypatch.setattr(FolderSource, "list", broken)
    assert crew.run(range(9)) == expected
    assert sum("listing failed, the known shards are kept: the disk is gone" in t for t in lines) == 2
    with pytest.raises(OSError, match="the disk is gone"):
        Crew(settings(root))


def test_a_slow_listing_does_not_stop_the_run(root, monkeypatch):
    """While the Hub asks for patience the steps go on; what it finds is admitted at a later fixed step."""
    monkeypatch.setattr(data, "LISTING_WAIT", 0.01)
    gate, calls, plain = threading.Event(), [], FolderSource.list
    crew = Crew(settings(root, domains=["code"]))

    def slow(self, domain):
        calls.append(domain)
        gate.wait(30)
        return plain(self, domain)

    monkeypatch.setattr(FolderSource, "list", slow)
    write(root, "data/code/new.npy", rows(8000, 5, 9))
    stream = crew.streams[0]
    for step in range(1, 12):
        assert not stream.refresh(step)
        stream.next_batch(8)
    gate.set()
    stream.news.listing.join(60)
    assert stream.refresh(12) == {"code": ["data/code/new.npy"]}
    assert calls == ["code"], "one listing at a time"


def test_bytes_tokenizer():
    """Any text survives; the end-of-document id is no byte; bits per byte need bytes per token."""
    t = data.Tokenizer({"tokenizer": "bytes", "eot": 256})
    for text in ("plain", "", "größer ≥ 😀\n\t\0"):
        assert t.decode(t.encode(text)) == text
    assert t.bytes_exact and t.decode([72, 256, 105]) == "Hi"
    assert t.bytes_per_token(torch.tensor([[72, 256], [-1, 105]])) == pytest.approx(2 / 3)
    unknown = data.Tokenizer({})
    assert not unknown.bytes_exact and unknown.decode([5, 6]) == "5 6"
    assert math.isnan(unknown.bytes_per_token([1]))
    with pytest.raises(data.DataError, match="names no tokenizer"):
        unknown.encode("x")


def test_bigram_baseline_equals_a_plain_count(tmp_path):
    """Against a dictionary of pairs over the same rows; the stream goes on as if nothing had been read."""
    r = np.random.default_rng(0)
    text = (r.integers(0, 4, 4000) ** 2 % 7).astype("uint8")
    write(tmp_path, "data/code/a.npy", text)
    corpora.describe(tmp_path, vocab_size=7)
    s = settings(tmp_path, domains=["code"])
    crew = Crew(s)
    got = data.bigram_baseline(crew.streams[0], tokens=2048, rows_per_domain=3)
    train = Crew(s).run(range(4), n=64)
    pairs = [pair for _, _, x, y in train for pair in zip(x, y, strict=True) if pair[1] >= 0]
    val = [(b.x[0].tolist(), b.y[0].tolist()) for b in crew.streams[0].val_batches(3, 1)]
    both, first = Counter(pairs), Counter(a for a, _ in pairs)
    held_out = [pair for x, y in val for pair in zip(x, y, strict=True) if pair[1] >= 0]
    nats = [-math.log((both[a, b] + 1) / (first[a] + 7)) for a, b in held_out]
    assert got == pytest.approx(sum(nats) / len(nats), rel=1e-9)
    assert crew.run(range(4), n=64) == train


def test_wasted_tokens_are_counted_and_said(tmp_path):
    """A file of 103 tokens is 12 samples of 8; the 97th token is the last target, 6 are left."""
    write(tmp_path, "data/code/a.npy", np.arange(103, dtype="uint16"))
    corpora.describe(tmp_path)
    lines = []
    crew = Crew(settings(tmp_path, domains=["code"]), log=lines.append)
    assert crew.streams[0].wasted() == 6
    assert any("its last 6 of 103 tokens" in line for line in lines)


def test_metadata_of_others_is_only_asked_for_the_vocabulary(root):
    """The seed's metadata.json may say anything else, also under names that pack uses."""
    corpora.describe(root, domains=["code", "math"], tokenizer="someone/tokenizer", note=None)
    lines = []
    crew = Crew(settings(root), log=lines.append)
    assert not crew.streams[0].tokenizer.bytes_exact
    assert any("someone/tokenizer" in line for line in lines)


def test_epochs_say_how_far_each_domain_is(root):
    crew = Crew(settings(root, domain_weights=[2, 1, 1, 1]))
    crew.run(range(9), n=15)
    epochs = crew.streams[0].epochs()
    assert epochs["code"] == pytest.approx(2.0, abs=0.01) and epochs["math"] == pytest.approx(1.0, abs=0.01)


no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: pinned copies were not tested")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_cuda])])
def test_batches_reach_their_device_whole(root, device):
    """A GPU through pinned memory, without waiting."""
    batch = Crew(settings(root)).streams[0].next_batch(24)
    moved = batch.to(device)
    assert moved.x.device.type == device and moved.ids == batch.ids and batch.x.dtype == torch.int64
    assert all(torch.equal(getattr(moved, k).cpu(), getattr(batch, k)) for k in ("x", "y", "domain"))


def test_permutations_are_pinned():
    """The order of a run must not change with a version of numpy: a resume would repeat and skip rows."""
    assert shards.permutation(8, 7, "code", 0).tolist() == [2, 3, 6, 5, 1, 4, 7, 0]
