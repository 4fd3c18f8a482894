"""Text -> shards: nothing lost, nothing mixed up, nothing half-made; and the corpus that Python itself carries."""

import glob
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import conftest
import corpora
import numpy as np
import pytest
from corpora import Crew, settings
from fake_hub import files_below, folder_with
from workers import Rank

import data
from text import corpus, pack

EOT = 256


def text_files(root, n=40) -> list[bytes]:
    """n text files of different lengths."""
    os.makedirs(root / "in" / "deep", exist_ok=True)
    texts = [f"document {i}\n".encode() + b"words, words\n" * (i % 7) + "größer".encode() for i in range(n)]
    for i, t in enumerate(texts):
        (root / "in" / ("deep" if i % 3 else "") / f"{i:03d}.txt").write_bytes(t)
    return texts


def packed(out, domain="code") -> dict[str, np.ndarray]:
    return {os.path.basename(f): np.load(f) for f in sorted(glob.glob(f"{out}/data/{domain}/*.npy"))}


def documents(line: np.ndarray, eot=EOT) -> list[np.ndarray]:
    """The ids between end-of-document ids; the line ends with one."""
    assert line[-1] == eot
    return [part[:-1] for part in np.split(line, np.flatnonzero(line == eot) + 1)][:-1]


def texts_of(line: np.ndarray) -> list[bytes]:
    return [bytes(part.astype("uint8")) for part in documents(line)]


def run(*arguments) -> int:
    return pack.main(["pack", *map(str, arguments)])


def test_every_document_once_in_another_order_and_apart_from_validation(tmp_path):
    """All texts come back, each followed by the end-of-document id; training and validation share none."""
    texts = text_files(tmp_path)
    assert run(tmp_path / "out", f"code={tmp_path}/in", "--val=0.2") == 0
    shards = packed(tmp_path / "out")
    val, train = texts_of(shards.pop("val.npy")), texts_of(np.concatenate(list(shards.values())))
    assert sorted(val + train) == sorted(texts)
    assert 3 <= len(val) <= 15
    assert train != sorted(train) and train != [t for t in texts if t in train], "not shuffled"
    meta = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert meta["vocab_size"] == 257 and meta["tokenizer"] == "bytes" and meta["eot"] == EOT
    code = meta["domains"]["code"]
    assert code["documents"] == 40 and code["tokens"] + code["val_tokens"] == sum(map(len, texts)) + 40


def test_the_same_command_gives_the_same_bytes(tmp_path):
    text_files(tmp_path)

    def content(*options):
        run(tmp_path / "out", f"code={tmp_path}/in/**/*.txt", *options)
        return files_below(tmp_path / "out")

    first = content()
    assert content() == first and len(first) == 3
    assert content("--seed=1") != first


def test_a_single_text_is_cut_as_nanogpt_does(tmp_path):
    """nanoGPT: train = data[: int(n * 0.9)], val = the rest, so that losses can be compared."""
    text = bytes(np.random.default_rng(0).integers(97, 122, 100_003, dtype="uint8"))
    (tmp_path / "input.txt").write_bytes(text)
    run(tmp_path / "out", f"general={tmp_path}/input.txt", "--val=0.1")
    shards = packed(tmp_path / "out", "general")
    assert bytes(shards["00000.npy"].astype("uint8")) == text[: len(text) - 10_000]
    assert texts_of(shards["val.npy"]) == [text[-10_000:]]


def test_jsonl(tmp_path):
    """A document a line, blank lines and a missing last newline are fine; any field; unicode as it is."""
    texts = ["one", "zwei größer", "three\nlines\n", "😀" * 50]
    lines = [json.dumps({"body": t, "id": i}) for i, t in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "last"}))
    run(tmp_path / "out", f"math={tmp_path}/*.jsonl", "--field=body", "--val=0")
    got = texts_of(packed(tmp_path / "out", "math")["00000.npy"])
    assert sorted(got) == sorted(t.encode() for t in [*texts, "last"])


def test_shards_are_never_too_short(tmp_path, monkeypatch):
    """Cut at --shard_tokens, the last one takes the rest: between half and one and a half of it."""
    monkeypatch.setattr(pack, "PIECE", 333)
    text = bytes(np.random.default_rng(0).integers(97, 122, 50_000, dtype="uint8"))
    for size in (4_000, 7_919, 12_345):
        (tmp_path / "a.txt").write_bytes(text[: size * 4 + 100])
        run(tmp_path / f"out{size}", f"code={tmp_path}/a.txt", f"--shard_tokens={size}", "--val=0")
        parts = list(packed(tmp_path / f"out{size}").values())
        assert texts_of(np.concatenate(parts)) == [text[: size * 4 + 100]]
        assert len(parts) > 2 and all(size // 2 <= len(p) <= size * 3 // 2 + 1 for p in parts)


def test_memory_is_bounded_by_the_shard_not_by_the_text(tmp_path):
    """64 MB of text in one file, shards of 1 M tokens: the peak stays below 24 MB. (1 GB: see the drill below.)"""
    line = b"the quick brown fox jumps over the lazy dog\n"
    (tmp_path / "a.txt").write_bytes(line * (64_000_000 // len(line)))
    tracemalloc.start()
    try:
        assert run(tmp_path / "out", f"code={tmp_path}/a.txt", "--shard_tokens=1000000") == 0
        assert tracemalloc.get_traced_memory()[1] < 24e6
    finally:
        tracemalloc.stop()


@pytest.mark.drill
def test_one_gigabyte_packs_below_two_gigabytes_of_memory(tmp_path):
    """A text of 0.5 GB and a .jsonl of 0.5 GB with 2.5 million documents, as a command of its own; its peak RSS."""
    line = b"the quick brown fox jumps over the lazy dog, again and again and again\n" * 1000
    with open(tmp_path / "a.txt", "wb") as f, open(tmp_path / "b.jsonl", "wb") as g:
        for _ in range(500_000_000 // len(line)):
            f.write(line)
        for i in range(2_500_000):
            g.write(b'{"text": "document %d: %s"}\n' % (i, b"x" * 175))
    code = (
        "import resource, sys; from text import pack; r = pack.main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(r)"
    )
    inputs = ["pack", f"{tmp_path}/out", f"code={tmp_path}/a.txt", f"math={tmp_path}/b.jsonl"]
    command = [sys.executable, "-c", code, *inputs]
    done = subprocess.run(command, cwd=conftest.ROOT, capture_output=True, text=True, check=True)
    peak = int(done.stdout.split()[-1]) * 1024
    print(f"peak {peak / 1e9:.2f} GB")
    assert peak < 2e9


def test_a_killed_run_leaves_the_former_dataset(tmp_path, monkeypatch):
    """Interrupted anywhere while a domain is written, the dataset is what it was; the next run completes it."""
    text_files(tmp_path)
    run(tmp_path / "out", f"code={tmp_path}/in")
    before = files_below(tmp_path / "out")
    plain, calls = np.save, []

    def killed(*a):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        plain(*a)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "save", killed)
        run(tmp_path / "out", f"code={tmp_path}/in", "--seed=3")
    assert files_below(tmp_path / "out") == before
    assert os.listdir(tmp_path / "out" / "data") == ["code"]
    assert run(tmp_path / "out", f"code={tmp_path}/in", "--seed=3") == 0


def test_domains_are_added_or_replaced_one_by_one(tmp_path, capsys):
    text_files(tmp_path)
    run(tmp_path / "out", f"code={tmp_path}/in/deep")
    code = packed(tmp_path / "out")
    run(tmp_path / "out", f"math={tmp_path}/in")
    assert list(json.load(open(tmp_path / "out" / "metadata.json"))["domains"]) == ["code", "math"]
    assert all((packed(tmp_path / "out")[k] == code[k]).all() for k in code)
    run(tmp_path / "out", f"code={tmp_path}/in/0*.txt")
    assert len(packed(tmp_path / "out")["00000.npy"]) != len(code["00000.npy"])
    np.array([1, 2], "uint16").tofile(tmp_path / "a.bin")
    assert run(tmp_path / "out", f"code={tmp_path}/a.bin", "--vocab_size=50257") == 65
    assert "was packed with another vocab_size, tokenizer, eot: choose another OUT" in capsys.readouterr().err


def test_files_of_others_are_not_overwritten(tmp_path, capsys):
    text_files(tmp_path)
    folder_with(tmp_path / "out", {"data/code/mine.npy": b"precious"})
    assert run(tmp_path / "out", f"code={tmp_path}/in") == 65
    assert "files that pack did not make" in capsys.readouterr().err
    assert files_below(tmp_path / "out") == {"data/code/mine.npy": b"precious"}


@pytest.mark.parametrize("kind", ["nanogpt", "modded"])
def test_token_files_of_nanogpt_and_modded_nanogpt(tmp_path, kind):
    """Copied in their order, the val file held out; then the stream reads them."""
    ids = np.random.default_rng(0).integers(0, 50257, (3, 3000)).astype("uint16")
    head = np.zeros(256, "int32")
    head[:3] = 20240520, 1, 3000
    for name, part in zip(("train_0", "train_1", "val_0"), ids, strict=True):
        content = (head.tobytes() if kind == "modded" else b"") + part.tobytes()
        (tmp_path / f"fineweb_{name}.bin").write_bytes(content)
    assert run(tmp_path / "out", f"general={tmp_path}/*.bin", "--vocab_size=50257") == 0
    shards = packed(tmp_path / "out", "general")
    assert (shards["val.npy"] == ids[2]).all() and (shards["00000.npy"] == ids[:2].ravel()).all()
    stream = Crew(settings(tmp_path / "out", domains=["general"])).streams[0]
    assert stream.vocab_size == 50257 and stream.tokenizer.eot == 50256
    assert stream.next_batch(24).x.max() < 50257


def test_what_is_held_out_stays_whole_beside_small_shards(tmp_path, capsys):
    """Longer than a shard, it is still one val.npy: cut into numbered shards it would be trained on."""
    r = np.random.default_rng(0)
    ids = {n: r.integers(0, 50257, 5000).astype("uint16") for n in ("interval.bin", "x_val_0.bin", "val.bin")}
    for name, part in ids.items():
        part.tofile(tmp_path / name)
    small = ["--vocab_size=50257", "--shard_tokens=1000"]
    assert run(tmp_path / "out", f"code={tmp_path}/*.bin", *small) == 0
    shards = packed(tmp_path / "out")
    assert (shards.pop("val.npy") == np.concatenate([ids["val.bin"], ids["x_val_0.bin"]])).all()
    assert len(shards) > 3 and (np.concatenate(list(shards.values())) == ids["interval.bin"]).all()
    assert run(tmp_path / "none", f"code={tmp_path}/val.bin", *small) == 65
    assert "nothing to train on" in capsys.readouterr().err
    text_files(tmp_path, 200)
    assert run(tmp_path / "text", f"code={tmp_path}/in/**/*.txt", "--shard_tokens=100", "--val=0.3") == 0
    shards = packed(tmp_path / "text")
    total = sum(map(len, shards.values()))
    assert len(shards.pop("val.npy")) == pytest.approx(0.3 * total, rel=0.1) and len(shards) > 10


def test_inspect_says_what_is_there(tmp_path, capsys):
    texts = text_files(tmp_path)
    run(tmp_path / "out", f"code={tmp_path}/in", f"math={tmp_path}/in")
    capsys.readouterr()
    assert pack.main(["inspect", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert f"{sum(map(len, texts)) + 40:,} tokens" in out and "ids 10 to 256 (uint16)" in out
    assert "code: 2 shards (1 held out)" in out and "math: 2 shards" in out and "document " in out
    array = np.load(f"{tmp_path}/out/data/math/00000.npy")
    array[5] = 999
    np.save(f"{tmp_path}/out/data/math/00000.npy", array)
    assert pack.main(["inspect", str(tmp_path / "out")]) == 65
    says = "data/math/00000.npy: row 0 column 5 holds token id 999, outside the vocabulary of 257"
    assert says in capsys.readouterr().err
    assert pack.main(["inspect", str(tmp_path / "nothing")]) == 65


def test_the_command(tmp_path):
    """As a user types it: exit code 65 and one line that says why. (The good case is the same call, in this process.)"""
    command = [sys.executable, os.path.join(conftest.ROOT, "data.py"), "pack", "out", "code=in"]
    bad = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert bad.returncode == 65
    assert bad.stderr == "data.py pack: code=in: no such file; quote the pattern if it holds *\n"


def test_tokenizer_json(tmp_path, capsys):
    """A byte-level BPE trained here: ids come back as the text, bits per byte are exact, the file travels along."""
    missing = "tokenizer.json files were not tested: pip install tokenizers"
    tokenizers = pytest.importorskip("tokenizers", reason=missing)
    texts = text_files(tmp_path)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel
    model.pre_tokenizer, model.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    special = dict(special_tokens=["<|endoftext|>"], initial_alphabet=level.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, **special)
    model.train_from_iterator([t.decode() for t in texts], trainer)
    model.save(str(tmp_path / "tok.json"))
    option = f"--tokenizer={tmp_path}/tok.json"
    assert run(tmp_path / "out", f"code={tmp_path}/in", option, "--val=0.2") == 0
    stream = Crew(settings(tmp_path / "out", domains=["code"])).streams[0]
    t = stream.tokenizer
    assert stream.vocab_size == model.get_vocab_size() and t.eot == 0 and t.bytes_exact
    got = [t.decode(p).encode() for p in documents(packed(tmp_path / "out")["00000.npy"], eot=0)]
    assert got and set(got) <= set(texts)
    ids = t.encode("größer words 😀")
    assert t.decode(ids) == "größer words 😀"
    assert t.bytes_per_token(ids) * len(ids) == pytest.approx(len("größer words 😀".encode()))
    assert t.bytes_per_token([0]) == 0
    assert pack.main(["inspect", str(tmp_path / "out")]) == 0
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    assert run(tmp_path / "out2", f"code={tmp_path}/bad.txt", option) == 65
    assert "bad.txt: is not UTF-8" in capsys.readouterr().err
    assert run(tmp_path / "out2", f"code={tmp_path}/in", option, "--eot=<end>") == 65
    assert "special tokens: <|endoftext|>: give --eot=TOKEN" in capsys.readouterr().err


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def few_files(monkeypatch):
    """The corpus of a tenth of the files: packing the whole takes seconds."""
    plain = corpus.python_files
    monkeypatch.setattr(corpus, "python_files", lambda top: itertools.islice(plain(top), 0, None, 10))
    monkeypatch.setattr(corpus, "REASONING_BYTES", 100_000)


def test_python_corpus_is_packed_once_and_the_same_everywhere(few_files, tmp_path):
    """Two machines' leaders race for one cache folder; a third packs elsewhere: the same bytes. Later runs find it."""
    lines = []
    caches = [tmp_path / "shared", tmp_path / "shared", tmp_path / "other"]

    def lead(folder):
        return corpus.python_corpus(str(folder), Rank(), lines.append)

    with ThreadPoolExecutor(3) as machines:
        led = list(machines.map(lead, caches))
    assert len(lines) == 3
    here, there = map(lead, caches[1:])
    assert led == [here, here, there]
    assert len(lines) == 3, "packed again"
    assert os.listdir(caches[0]) == os.listdir(caches[2]) == [os.path.basename(here)]
    for d in corpora.DOMAINS:
        assert packed(here, d).keys() == packed(there, d).keys() == {"00000.npy", "val.npy"}
        for name, line in packed(here, d).items():
            assert (line == packed(there, d)[name]).all()


def test_python_corpus_of_a_killed_process_is_packed_again(few_files, tmp_path, monkeypatch):
    """What was half made is neither used nor kept."""
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(pack, "save_json", lambda *a: 1 / 0)
        corpus.python_corpus(str(tmp_path), Rank(), print)
    assert os.listdir(tmp_path) == []
    folder = corpus.python_corpus(str(tmp_path), Rank(), print)
    assert os.path.exists(folder + "/metadata.json")
    os.unlink(folder + "/metadata.json")  # incomplete, by whatever accident
    assert corpus.python_corpus(str(tmp_path), Rank(), print) == folder
    assert os.path.exists(folder + "/metadata.json")


def test_a_damaged_python_corpus_is_packed_again(few_files, tmp_path):
    """A shard cut short or lost, as by a full disk: the quickstart heals its own cache."""
    folder = corpus.python_corpus(str(tmp_path), Rank(), print)
    shard = f"{folder}/data/math/00000.npy"
    good = pathlib.Path(shard).read_bytes()
    for damage in (lambda: os.truncate(shard, 1000), lambda: os.unlink(shard)):
        damage()
        assert corpus.python_corpus(str(tmp_path), Rank(), print) == folder
        assert pathlib.Path(shard).read_bytes() == good


def test_only_one_process_of_a_machine_packs(cache, tmp_path):
    """Rank 1 of the same machine waits in the agreement and packs nothing itself."""
    agree = Rank(1, 2)
    agree.local_rank = 1
    folder = corpus.python_corpus(str(tmp_path), agree, print)
    assert not os.path.exists(folder)


def test_an_unusable_cache_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(data.DataError, match="cache_dir .*file.*--cache_dir=FOLDER"):
        corpus.python_corpus(str(tmp_path / "file" / "sub"), Rank(), print)


def test_python_corpus_trains(cache):
    """Four domains of bytes at any max_len, validation apart; the log says how many epochs each will see."""
    for T in (64, 1000):
        lines = []
        s = settings("python", cache_dir=str(cache), max_len=T, val_rows=8)
        stream = Crew(s, log=lines.append).streams[0]
        assert stream.vocab_size == 257 and stream.tokenizer.bytes_exact
        assert sum("epochs" in line for line in lines) == 4
        size = sum(os.path.getsize(f) for f in glob.glob(f"{cache}/*/data/*/*.npy"))
        assert 10e6 < size < 100e6
        batch = stream.next_batch(24)
        assert batch.x.shape == (24, T) and (batch.y >= 0).all()
        assert len(stream.tokenizer.decode(batch.x[0])) > T // 2
        loss = data.bigram_baseline(stream, tokens=3e5, rows_per_domain=8)
        assert 1.5 < loss < 4.0, "text is far below ln 257 = 5.5 and far above nothing"


def test_validation_texts_are_not_trained_on(cache):
    """No document of val.npy appears in the training shards (whole documents are held out, and copies are dropped)."""
    folder = corpus.python_corpus(str(cache), Rank(), print)
    for d in corpora.DOMAINS:
        shards = packed(folder, d)
        val = set(texts_of(shards.pop("val.npy")))
        train = set(texts_of(np.concatenate(list(shards.values()))))
        assert len(val) >= 3 and not [t for t in val & train if len(t) > 200]


def test_generated_steps_are_correct():
    """Every equation in the generated texts holds, and each kind appears."""
    texts = corpus.reasoning()
    assert texts == corpus.reasoning(), "not deterministic"
    checked, equation = 0, r"(?<![\d*+/-] )(?<![\d-])(-?\d+) ([-+*]) (-?\d+) = (-?\d+)(?! [*+])"
    for t in texts[:3000]:
        for a, op, b, c in re.findall(equation, t):
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op] == int(c), t
            checked += 1
        for x, q, y, r in re.findall(r"^(\d+) = (\d+) \* (\d+) \+ (\d+)\.", t, re.M):
            assert int(x) == int(q) * int(y) + int(r)
            checked += 1
        if "in binary" in t:
            assert int(t.rsplit(" ", 1)[1], 2) == int(re.search(r"Write (\d+)", t)[1])
        if "common divisor" in t:
            a, b = map(int, re.search(r"of (\d+) and (\d+)", t).groups())
            assert int(t.rsplit(" ", 1)[1]) == np.gcd(a, b)
        if m := re.match(r"Question: What is (\d+) ([+*]) (\d+)\?", t):
            assert eval(m[1] + m[2] + m[3]) == int(t.rsplit(" ", 1)[1])
    assert checked > 3000
    assert {t.split()[1] for t in texts[:200]} >= {"What", "Divide", "Solve", "How", "Write", "All"}
