"""Every bad input is a DataError (exit code 65) that names the file, the value and the cure. None hangs, none trains.

Each case harms a good dataset in one way and says what the message must hold. `python tests/test_bad_data.py` prints the
table of messages.
"""

import gzip
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import zipfile

import conftest  # noqa: F401 (finds the product's files, also as a program)
import numpy as np
import pytest
from corpora import Crew, dataset, rows, settings, write

import data
from text import pack

CASES = {}
SHARD = "data/code/001.npy"


def case(*expected, **changes):
    """A harm, done to the dataset at `root`; `changes` are settings, and so is a dictionary that it returns."""

    def add(harm):
        CASES[harm.__name__] = (harm, expected, changes)
        return harm

    return add


def put(root, name, content: bytes):
    os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
    with open(os.path.join(root, name), "wb") as f:
        f.write(content)


def meta(root, text):
    put(root, "metadata.json", text if isinstance(text, bytes) else json.dumps(text).encode())


def npy_bytes(array, **options) -> bytes:
    f = io.BytesIO()
    np.save(f, array, **options)
    return f.getvalue()


def zipped() -> bytes:
    f = io.BytesIO()
    with zipfile.ZipFile(f, "w") as z:
        z.writestr("a.npy", "x")
    return f.getvalue()


def header(text: str) -> bytes:
    """A .npy file of 80 bytes of data whose header is this text."""
    line = text.encode() + b" " * (118 - len(text)) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + b"\0" * 80


def changed(array, place, value):
    array[place] = value
    return array


NINE = rows(0, 9, 9)
WRONG_SHARDS = {  # what SHARD holds, and what the message must hold beside its name
    # files that are no shards
    "html_saved_as_npy": (b"<!DOCTYPE html><html><body>Log in to continue</body></html>", "web page", "fetch it again"),
    "empty_file": (b"", "0 bytes", "again"),
    "lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\n", "Git LFS pointer", "git lfs pull"),
    "npz": (zipped(), "zip archive", "numpy.save"),
    "gzipped": (gzip.compress(npy_bytes(NINE)), "gzip", "decompress"),
    "plain_pickle": (pickle.dumps([1, 2, 3]), "pickle", "never loaded"),
    "pickled_object_array": (
        npy_bytes(np.array([[1, 2], [3, "x"]], dtype=object), allow_pickle=True), "pickled Python objects", "integer array",
    ),
    "raw_tokens": (np.arange(500, dtype="uint16").tobytes(), "not a .npy file", "numpy.save"),
    "truncated_in_the_header": (npy_bytes(NINE)[:30], "header", "again"),
    "a_header_that_is_no_dictionary": (header("[1, 2, 3]"), "Header is not a dictionary", "numpy.save"),
    "a_header_that_is_code": (header("__import__('os').system('touch /tmp/nova-was-here')"), "numpy.save"),
    "a_negative_shape": (
        header("{'descr': '<u2', 'fortran_order': False, 'shape': (-4, -10), }"), "shape", "numpy.save",
    ),
    "npy_of_another_version": (b"\x93NUMPY\x09\x00" + npy_bytes(NINE)[8:], "format (9, 0)", "numpy.save"),
    "truncated": (npy_bytes(NINE)[:-5], "truncated", "fetch or pack it again"),
    "trailing_bytes": (npy_bytes(NINE) + b"garbage", "7 trailing bytes", "again"),
    # arrays that are no tokens
    "floats": (NINE.astype("float32"), "float32", "astype"),
    "booleans": (NINE > 5, "bool", "astype"),
    "complex_numbers": (NINE.astype("complex64"), "complex", "astype"),
    "strings": (np.array([["a", "b"], ["c", "d"]]), "<U1", "astype"),
    "records": (np.zeros(20, dtype=[("ids", "<u2")]), "('ids', '<u2')", "astype"),
    "fortran_order": (np.asfortranarray(NINE), "Fortran order", "ascontiguousarray"),
    "three_dimensions": (rows(0, 18, 9).reshape(2, 9, 9), "3-D", "(2, 9, 9)", "reshape"),
    "a_scalar": (np.array(7), "0-D", "reshape"),
    "no_rows": (rows(0, 0, 9), "no row", "(0, 9)", "pack it again"),
    "rows_of_nothing": (np.zeros((9, 0), "uint16"), "no row", "(9, 0)"),
    "a_column": (np.zeros((50, 1), "uint16"), "(50, 1)", "reshape(-1)"),
    "shorter_than_one_sample": (np.arange(5, dtype="uint16"), "holds 5 tokens", "max_len=8", "pack more text"),
    # ids
    "negative_id": (changed(rows(0, 9, 9, "int32"), (3, 8), -1), "row 3 column 8", "token id -1"),
    "id_beyond_int64": (
        changed(rows(0, 9, 9, "uint64"), (0, 7), 2**64 - 1), "row 0 column 7", "token id 18446744073709551615",
    ),
    "id_in_a_single_line": (
        changed(np.arange(90, dtype="uint32"), 77, 1 << 30), "row 0 column 77", "token id 1073741824",
    ),
}  # fmt: skip
WRONG_METADATA = {
    "metadata_is_not_json": (b"{vocab_size: 257", "not JSON", "pack again"),
    "metadata_is_a_list": ([257], "a list", "vocab_size"),
    "metadata_without_vocab_size": ({"n_vocab": 257}, "no vocab_size", "n_vocab", "add it"),
    "vocab_size_as_text": ({"vocab_size": "257"}, "vocab_size='257'", "integer"),
    "vocab_size_negative": ({"vocab_size": -5}, "vocab_size=-5", "integer"),
    "vocab_size_as_boolean": ({"vocab_size": True}, "vocab_size=True", "integer"),
    "eot_outside_the_vocabulary": ({"vocab_size": 257, "eot": 300}, "eot=300", "below vocab_size=257"),
    "bytes_with_too_few_ids": ({"vocab_size": 65, "tokenizer": "bytes"}, "tokenizer 'bytes'", "at least 256, not 65"),
}  # fmt: skip
WRONG_FOLDERS = {  # what is removed, what is put there, and what the message must hold
    "a_folder_named_npy": ([SHARD], {f"{SHARD}/x": b""}, SHARD, "is a folder", "rename"),
    "nothing_left_to_hold_out": (
        [], {f"data/code/00{k}.npy": rows(k, 1, 9) for k in range(3)},
        "domain code", "data/code/000.npy", "one sample", "smaller max_len",
    ),
    "no_data_folder": (["data"], {}, "no such folder", "python data.py pack"),
    "nanogpt_folder": (
        ["data"], {"train.bin": b"\1\0" * 500, "val.bin": b"\1\0" * 50},
        "nanoGPT", "python data.py pack OUT --vocab_size=50257 code=", "*.bin", "data=OUT",
    ),
    "modded_nanogpt_bins": (
        ["data/code"], {"data/code/fineweb_train_000001.bin": b"\0" * 1024},
        "modded-nanogpt", "python data.py pack", "data/code/*.bin",
    ),
    "text_instead_of_shards": (
        ["data/code"], {"data/code/book.txt": b"Once upon a time"},
        ".txt files", "python data.py pack OUT code=", "*.txt",
    ),
    "only_validation_shards": (
        ["data/code"], {f"data/code/val{k}.npy": rows(9 * k, 9, 9) for k in range(3)},
        "domain code", "data/code/val0.npy", "named val", "nothing to train on",
    ),
    "a_name_with_backslashes": (
        [], {"data/code/a\\..\\x.npy": rows(0, 9, 9)}, "x.npy", "not of the form data/code/NAME.npy", "rename it",
    ),
    "metadata_missing": (["metadata.json"], {}, "metadata.json is missing", "set vocab_size"),
}  # fmt: skip


def exchange(root, gone, there):
    for path in (os.path.join(root, name) for name in gone):
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    for name, content in there.items():
        (put if isinstance(content, bytes) else write)(root, name, content)


for name, (content, *expected) in WRONG_SHARDS.items():
    CASES[name] = (lambda root, c=content: exchange(root, [], {SHARD: c}), (SHARD, *expected), {})
for name, (gone, there, *expected) in WRONG_FOLDERS.items():
    CASES[name] = (lambda root, gone=gone, there=there: exchange(root, gone, there), expected, {})
for name, (content, *expected) in WRONG_METADATA.items():
    CASES[name] = (lambda root, c=content: meta(root, c), ("metadata.json", *expected), {})


@case("001.npy", "no such file", "restore")
def a_dangling_link(root):
    os.unlink(f"{root}/{SHARD}")
    os.symlink("/nowhere/else.npy", f"{root}/{SHARD}")


@case(SHARD, "row 4 column 2", "token id 300", "vocabulary of 257", "metadata.json", domains=["code"])
def id_outside_the_vocabulary(root):
    for k in range(3):
        write(root, f"data/code/{k:03d}.npy", np.ones((9, 9), "uint16"))
    write(root, SHARD, changed(np.ones((9, 9), "uint16"), (4, 2), 300))
    meta(root, {"vocab_size": 257})


@case("shard_000.npy", "column 0", "token id 9999", "vocabulary of 257", domains=["code"])
def another_vocabulary(root):
    shutil.rmtree(f"{root}/data/code")
    write(root, "data/code/shard_000.npy", np.full((20, 9), 9999, "uint16"))
    meta(root, {"vocab_size": 257})


WRONG_SETTINGS = {  # raw_: past the check of settings.py, as from another program
    "misspelt_domain": (
        dict(domains=["code", "reasonning"]),
        "domain", "did you mean 'reasoning'?", "code, general, math, reasoning", "set domains",
    ),
    "domain_with_a_space": (dict(domains=["code", " math"]), "' math'", "domains"),
    "duplicate_domains": (dict(raw_domains=["code", "math", "code"]), "twice", "domain_weights", "code, math, code"),
    "no_domains": (dict(raw_domains=[]), "domains is empty", "name at least one"),
    "domain_that_leaves_the_folder": (dict(domains=["../../etc"]), "'../../etc'", "not the name of a folder"),
    "weight_of_zero": (dict(raw_weights=[1, 0, 1, 1]), "domain_weights=[1, 0, 1, 1]", "positive integer"),
    "weights_beyond_a_cycle": (dict(raw_weights=[99_991, 99_989, 1, 1]), "domain_weights", "100,000", "round them"),
    "missing_folder": (dict(data="/nowhere/at/all"), "no such folder", "owner/name"),
    "a_name_that_is_neither_folder_nor_repo": (dict(data="mydata"), "no such folder", "owner/name"),
    "metadata_contradicts_the_setting": (
        dict(vocab_size=257), "vocab_size=1073741824 contradicts vocab_size=257 (test)", "leave the setting out",
    ),
}  # fmt: skip
for name, (changes, *expected) in WRONG_SETTINGS.items():
    CASES[name] = (lambda root, changes=changes: changes, expected, {})


@case("data/code", "no .npy shard", "pack")
def empty_domain(root):
    shutil.rmtree(f"{root}/data/code")
    os.makedirs(f"{root}/data/code")


@case("is a file", "name the folder")
def a_file_instead_of_a_folder(root):
    return dict(data=f"{root}/{SHARD}")


def run_case(name: str, root) -> BaseException | None:
    """The error of opening the harmed dataset and reading two epochs of it."""
    harm, _, changes = CASES[name]
    dataset(root)
    more = harm(str(root))
    more = more if isinstance(more, dict) else {}
    s = settings(root, **changes | {k: v for k, v in more.items() if not k.startswith("raw_")})
    s.domains = more.get("raw_domains", s.domains)
    s.domain_weights = more.get("raw_weights", s.domain_weights)
    try:
        Crew(s).run(range(12))
    except Exception as e:
        return e


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named_with_its_cure(name, tmp_path):
    error = run_case(name, tmp_path)
    assert isinstance(error, data.DataError), f"{type(error).__name__}: {error}"
    assert error.exit_code == 65
    for text in CASES[name][1]:
        assert text in str(error), f"{text!r} is not in: {error}"
    assert not os.path.exists("/tmp/nova-was-here")


IN_A_SHARD = {
    n: [text for text in expected if ".npy" in text or text.startswith(("row", "token id", "vocabulary"))]
    for n, (_, expected, _) in CASES.items()
    if expected[0] in (SHARD, "shard_000.npy") and n != "shorter_than_one_sample"
}


@pytest.mark.parametrize("name", IN_A_SHARD)
def test_inspect_names_the_shard_and_the_row_as_the_run_does(name, tmp_path, capsys):
    """Whoever meets a bad shard: its file and, where an id is bad, the row, the column, the id and the vocabulary."""
    CASES[name][0](dataset(tmp_path))
    assert pack.main(["inspect", str(tmp_path)]) == 65
    message = capsys.readouterr().err
    assert message.startswith(f"data.py inspect: {tmp_path}/data/code/") and len(IN_A_SHARD) > 30
    for text in IN_A_SHARD[name]:
        assert text in message


def test_a_real_run_names_the_shard_of_another_vocabulary(tmp_path):
    another_vocabulary(dataset(tmp_path / "tokens"))
    arguments = [
        "config/quickstart.py", f"--data={tmp_path}/tokens", "--domains=['code']", "--max_len=8",
        f"--out_dir={tmp_path}/out", "--val_rows=3", "--eval_rows=3", "--final_eval_rows=3",
    ]  # fmt: skip
    command = [sys.executable, "train_nova.py", *arguments]
    done = subprocess.run(command, cwd=conftest.ROOT, capture_output=True, text=True)
    told = done.stdout + done.stderr
    assert done.returncode == 65, told
    for text in ("data/code/shard_000.npy", "row 18 column 0", "token id 9999", "vocabulary of 257"):
        assert text in told


def test_there_are_at_least_forty_and_the_good_dataset_is_good(tmp_path):
    assert len(CASES) >= 60
    Crew(settings(dataset(tmp_path))).run(range(12))


def test_a_shard_that_shrinks_while_open_is_named(tmp_path):
    """With mmap this would be a SIGBUS. The row is named."""
    crew = Crew(settings(dataset(tmp_path, shards=(60,)), domains=["code"]))
    crew.run(range(1), n=1)
    os.truncate(f"{tmp_path}/data/code/000.npy", 300)
    with pytest.raises(data.DataError, match=r"000.npy: short read at row \d+: .* shrank.*rename"):
        crew.run(range(1, 3))


def test_unreadable_files_and_folders_say_chmod(tmp_path):
    """As an ordinary user: root may read everything, so a child process gives its rights away first."""
    folder = tempfile.mkdtemp(prefix="nova-test-")
    try:
        os.chmod(folder, 0o755)
        names = (SHARD, "data/code", "metadata.json")
        harmed = {name: dataset(os.path.join(folder, str(i))) for i, name in enumerate(names)}
        for name, root in harmed.items():
            os.chmod(os.path.join(root, name), 0)
        command = [sys.executable, __file__, "as-user", *harmed.values()]
        told = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        assert len(told) == 3
        for name, line in zip(harmed, told, strict=True):
            assert name in line and "permission denied" in line and "chmod" in line
    finally:
        shutil.rmtree(folder, ignore_errors=True)


PACK = {
    "no_such_file": (["code=*.nothing"], ("*.nothing", "no such file", "quote")),
    "no_equals_sign": (["code"], ("'code'", "domain=GLOB")),
    "bad_domain": (["../x=a.txt"], ("'../x'", "not the name of a folder")),
    "binary": (["code=zero.txt"], ("zero.txt", "zero byte at 5", "leave it out")),
    "compressed": (["code=a.gz"], ("a.gz", ".gz files are not read")),
    "parquet": (["code=a.parquet"], ("a.parquet", ".parquet")),
    "bad_jsonl": (["code=bad.jsonl"], ("bad.jsonl line 2", "not JSON")),
    "jsonl_field": (["code=good.jsonl", "--field=content"], ("good.jsonl line 1", "'content'", "has text, id", "--field")),
    "jsonl_later": (["code=later.jsonl"], ("later.jsonl line 3", "not JSON")),
    "jsonl_first": (["code=first.jsonl"], ("first.jsonl line 1:", "'text'", "has id")),
    "jsonl_list": (["code=list.jsonl"], ("list.jsonl line 1", "list")),
    "bins_and_text": (["code=a.bin", "math=a.txt"], (".bin", "apart from text")),
    "bin_without_vocabulary": (["code=a.bin"], ("--vocab_size",)),
    "bin_id_too_large": (["code=a.bin", "--vocab_size=100"], ("a.bin", "token 100 has id 100", "50257")),
    "bin_truncated": (["code=modded.bin", "--vocab_size=100"], ("modded.bin", "1100 bytes", "1224 are expected")),
    "bin_odd": (["code=odd.bin", "--vocab_size=100"], ("odd.bin", "truncated")),
    "no_tokenizer": (["code=a.txt", "--tokenizer=none.json"], ("none.json", "no such file")),
    "nothing_in_it": (["code=empty.txt"], ("code", "empty.txt", "nothing to pack")),
    "all_held_out": (["code=val.bin", "--vocab_size=500"], ("code", "val.bin", "nothing to train on")),
    "val_share": (["code=a.txt", "--val=0.9"], ("--val", "0.5")),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PACK)
def test_bad_text_is_named_with_its_cure(name, seed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file, content in {
        "a.txt": b"hello\n", "zero.txt": b"hello\0world", "a.gz": b"x", "a.parquet": b"x", "empty.txt": b"",
        "bad.jsonl": b'{"text": "a"}\n{"text": \n', "good.jsonl": b'{"text": "a", "id": 1}\n', "list.jsonl": b"[1]\n",
        "first.jsonl": b'{"id": 1}\n{"text": "a"}\n' + b'{"id": 3}\n' * 9,
        "later.jsonl": b'{"text": "a"}\n\n{"text": \n' + b"[1]\n" * 9,
        "a.bin": np.arange(500, dtype="uint16").tobytes(), "odd.bin": b"abc", "val.bin": np.arange(500, dtype="uint16").tobytes(),
        "modded.bin": np.array([20240520, 1, 100] + [0] * 253, "int32").tobytes() + b"\0" * 76,
    }.items():  # fmt: skip
        put(tmp_path, file, content)
    arguments, expected = PACK[name]
    assert pack.main(["pack", "OUT", *arguments, f"--seed={seed}"]) == 65
    message = capsys.readouterr().err
    for text in expected:
        assert text in message
    assert "Traceback" not in message and not os.path.exists("OUT/metadata.json")


def main():
    """The table of messages, or (as-user ROOT …) datasets read without root's rights."""
    if sys.argv[1:2] == ["as-user"]:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        for root in sys.argv[2:]:
            try:
                Crew(settings(root)).run(range(12))
                print("nothing was refused")
            except data.DataError as e:
                print(e)
        return
    for name in CASES:
        with tempfile.TemporaryDirectory() as root:
            error = run_case(name, root)
            print(f"| {name.replace('_', ' ')} | {str(error).replace(root, 'DATA')} |")


if __name__ == "__main__":
    main()
