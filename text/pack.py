"""Text -> shards: `python data.py pack`, `python data.py inspect`.

    python data.py pack OUT [--tokenizer=bytes|PATH/tokenizer.json] [options] domain=GLOB [domain=GLOB …]

A GLOB names text files (a document each), .jsonl files (a document a line, in --field), folders (every text file below
them), or .bin token files of nanoGPT and modded-nanogpt (copied in their order, val.bin and *_val_*.bin held out;
give --vocab_size). Documents are shuffled, and each is followed by the end-of-document id. The last documents, --val of
the text, become val.npy, which is never trained on; of a single document, its end does.

A domain is built aside and takes its place at once, metadata.json last: a killed run leaves nothing half-made, and the
same command again gives the same bytes.
"""

import argparse
import contextlib
import filecmp
import glob
import json
import os
import re
import shutil
import sys

import numpy as np

from .mixture import check_domains
from .shards import DataError, Shard, os_reason, permutation
from .source import FolderSource, is_val
from .tokenizer import Tokenizer

PIECE = 1 << 20  # bytes of a document that are tokenised at once: bounds the memory
SHARD_TOKENS = 1 << 26  # 134 MB of uint16
MAX_VAL = 1 << 24  # bytes: enough for any evaluation
# in a file's name: nanoGPT's val.bin, modded-nanogpt's fineweb_val_….bin
HELD_OUT = re.compile(r"(^|[_-])val([_.-]|$)")
# first int32 of llm.c's and modded-nanogpt's .bin files; then version, tokens, 253 more
MODDED_MAGIC = 20240520
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "</s>", "<eos>", "<|eos|>")


# --- documents ---------------------------------------------------------------------------------------------------


class Documents:
    """Many documents in few bytes of memory: a table of (source, start, stop), sources being paths or bytes."""

    def __init__(self, sources: list, field: str = "text"):
        self.sources, self.field, self.files = sources, field, {}
        self.table = np.concatenate([self.find(i) for i in range(len(sources))] or [np.empty((0, 3), int)])
        self.table = self.table[self.table[:, 2] > self.table[:, 1]]

    def is_jsonl(self, i: int) -> bool:
        return isinstance(self.sources[i], str) and self.sources[i].endswith(".jsonl")

    def find(self, i: int) -> np.ndarray:
        """The documents of one source, (n, 3)."""
        source = self.sources[i]
        if isinstance(source, bytes):
            return np.array([[i, 0, len(source)]])
        if not self.is_jsonl(i):
            try:
                return np.array([[i, 0, os.path.getsize(source)]])
            except OSError as e:
                raise DataError(f"{source}: {os_reason(e)}") from None
        ends, size = [], 0
        while block := self.read(i, size, size + (PIECE << 3)):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + size)
            size += len(block)
        ends = np.concatenate([*ends, [size]])  # the last line may lack its newline
        starts = np.concatenate([[0], ends[:-1] + 1])
        return np.stack([np.full(len(ends), i), starts, ends], 1)

    def read(self, i: int, start: int, stop: int) -> bytes:
        if isinstance(self.sources[i], bytes):
            return self.sources[i][start:stop]
        try:
            if i not in self.files:
                if len(self.files) > 64:
                    self.close()
                self.files[i] = open(self.sources[i], "rb")  # noqa: SIM115 (closed by close)
            return os.pread(self.files[i].fileno(), stop - start, start)
        except OSError as e:
            raise DataError(f"{self.sources[i]}: {os_reason(e)}") from None

    def close(self):
        for file in self.files.values():
            file.close()
        self.files = {}

    def pieces(self, i: int, start: int, stop: int):
        """The text of one document, as bytes, in pieces that end at a line where possible."""
        if self.is_jsonl(i):
            text = json_text(self.read(i, start, stop), self.field)
            if isinstance(text, str):
                raise self.first_bad_line(i)
            yield text
            return
        while start < stop:
            piece = self.read(i, start, min(start + PIECE, stop))
            if not piece:
                raise DataError(f"{self.sources[i]}: became shorter while it was read")
            if start + len(piece) < stop and (cut := piece.rfind(b"\n") + 1):
                piece = piece[:cut]
            if (at := piece.find(b"\0")) >= 0:
                why = f"has a zero byte at {start + at}: not text; leave it out of the glob"
                raise DataError(f"{self.sources[i]}: {why}")
            yield piece
            start += len(piece)

    def first_bad_line(self, i: int) -> DataError:
        """Documents are met in another order than the file's: the first line that is bad is the one to name."""
        with open(self.sources[i], "rb") as file:
            for number, line in enumerate(file, 1):
                if isinstance(why := json_text(line, self.field), str):
                    return DataError(f"{self.sources[i]} line {number}: {why}")
        return DataError(f"{self.sources[i]}: was changed while it was read")

    def split(self, share: float, seed, domain: str) -> tuple[np.ndarray, np.ndarray]:
        """(training, validation) tables of (source, start, stop, whole), shuffled. Whole documents are held out, unless
        one is so long that its end is."""
        table = np.column_stack([self.table, np.ones(len(self.table), int)])
        table = table[permutation(len(table), "documents", seed, domain)]
        need = min(int(share * (table[:, 2] - table[:, 1]).sum()), MAX_VAL)
        val, whole = [], need
        while need > 0 and len(table):
            i, start, stop, _ = table[-1]
            if stop - start > 2 * whole and not self.is_jsonl(i):
                val.append([i, stop - need, stop, 1])
                table[-1, 2:] = stop - need, 0  # no end-of-document id where the text goes on
                break
            if len(table) == 1:
                break
            val.append(table[-1])
            table, need = table[:-1], need - (stop - start)
        return table, np.array(val, int).reshape(-1, 4)


def json_text(line: bytes, field: str) -> bytes | str:
    """The text of one line of a .jsonl file as bytes, or a str that says what is wrong with the line."""
    if not line.strip():
        return b""
    try:
        value = json.loads(line)
    except ValueError as e:
        return f"is not JSON ({e}): one JSON object a line is expected"
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        names = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        return f"has no text in field {field!r} (has {names}): give --field=NAME"
    return value[field].encode("utf-8", errors="replace")


def expand(pattern: str, domain: str) -> list[str]:
    """The files that a GLOB names, sorted."""
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    files = [f for f in found if os.path.isfile(f)]
    for folder in (f for f in found if os.path.isdir(f) and "**" not in pattern):
        for top, folders, names in os.walk(folder):
            folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
            files += [os.path.join(top, n) for n in sorted(names) if not n.startswith(".")]
    if not files:
        raise DataError(f"{domain}={pattern}: no such file; quote the pattern if it holds *")
    for file in files:
        for end in (".gz", ".zst", ".xz", ".zip", ".parquet", ".arrow", ".npy"):
            if file.endswith(end):
                raise DataError(f"{file}: {end} files are not read: make text, .jsonl or .bin of it first")
    return files


# --- writing -----------------------------------------------------------------------------------------------------


class Writer:
    """Collects tokens and writes shards of `size` to 1.5 x `size` tokens, so that none is too short to be used."""

    def __init__(self, folder: str, vocab_size: int, size: int):
        self.folder, self.size = folder, size
        self.dtype = np.uint16 if vocab_size <= 65536 else np.uint32
        self.parts, self.held, self.shards, self.tokens = [], 0, 0, 0

    def add(self, ids):
        self.parts.append(np.asarray(ids).astype(self.dtype))
        self.held += len(self.parts[-1])
        while self.held > self.size * 3 // 2:
            self.write(self.size)

    def write(self, n: int, name: str | None = None):
        """The first n tokens that are held become a shard."""
        line = np.concatenate(self.parts)
        with open(os.path.join(self.folder, name or f"{self.shards:05d}.npy"), "wb") as f:
            np.save(f, line[:n])
            f.flush()
            os.fsync(f.fileno())
        self.parts, self.held = [line[n:].copy()], len(line) - n
        self.shards, self.tokens = self.shards + 1, self.tokens + n

    def close(self, name: str | None = None):
        if self.held:
            self.write(self.held, name)


@contextlib.contextmanager
def replacing(out: str, domain: str, source: str, vocab_size: int, size: int):
    """(train, val, about): two writers for a domain's shards, and what metadata.json says of them. They take the place of
    the present ones at the end, if nothing was raised. `source` names the input in messages."""
    top = os.path.join(out, "data")
    work, old, final = (os.path.join(top, n) for n in (f".packing-{domain}", f".old-{domain}", domain))
    for left in (work, old):
        shutil.rmtree(left, ignore_errors=True)
    os.makedirs(work)
    # what is held out stays whole: a second shard of it would be trained on
    train, val = Writer(work, vocab_size, size), Writer(work, vocab_size, sys.maxsize)
    about = {"tokens": 0, "val_tokens": 0}
    try:
        yield train, val, about
        val.close("val.npy")
        train.close()
        about |= {"tokens": train.tokens, "val_tokens": val.tokens, "shards": train.shards}
        if not train.shards:
            why = "all is held out, nothing to train on" if val.shards else "no text at all, nothing to pack"
            raise DataError(f"{domain}={source}: {why}")
        if os.path.isdir(final):
            os.rename(final, old)
        os.rename(work, final)
    finally:
        for left in (work, old):
            shutil.rmtree(left, ignore_errors=True)


def pack_text(documents: Documents, table: np.ndarray, to: Writer, encode, eot: int, progress=lambda n: None):
    """The documents of one table of `split`, each followed by eot."""
    for i, start, stop, whole in table.tolist():
        empty = True
        for piece in documents.pieces(i, start, stop):
            if piece:
                to.add(encode(piece, documents.sources[i]))
                empty = False
        progress(stop - start)
        if whole and not empty:
            to.add([eot])


def read_bin(path: str) -> tuple[int, int]:
    """(first byte of the ids, number of uint16 ids) of a token file of nanoGPT (ids only) or modded-nanogpt."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as f:
            head = np.frombuffer(f.read(12).ljust(12, b"\0"), "<i4")
    except OSError as e:
        raise DataError(f"{path}: {os_reason(e)}") from None
    offset, n = 0, size // 2
    if head[0] == MODDED_MAGIC:
        offset, n = 1024, int(head[2])
    if size != offset + 2 * n or not n:
        why = f"has {size} bytes, {offset + 2 * n} are expected for {n} uint16 ids: truncated?"
        raise DataError(f"{path}: {why}")
    return offset, n


def pack_bins(files: list, train: Writer, val: Writer, vocab_size: int, progress):
    """Token files, copied in order; those named HELD_OUT go to `val`."""
    for path in files:
        to = val if HELD_OUT.search(os.path.basename(path)) else train
        offset, n = read_bin(path)
        with open(path, "rb") as f:
            f.seek(offset)
            for first in range(0, n, PIECE):
                ids = np.fromfile(f, "<u2", min(PIECE, n - first))
                if ids.max() >= vocab_size:
                    at = int((ids >= vocab_size).argmax())
                    what = f"token {first + at} has id {ids[at]}, outside --vocab_size={vocab_size}"
                    raise DataError(f"{path}: {what}: give the tokenizer's size (GPT-2: 50257)")
                to.add(ids)
                progress(2 * len(ids))


def save_json(path: str, value):
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


# --- the command -------------------------------------------------------------------------------------------------


def load_tokenizer(name: str, end: str | None):
    """(what metadata.json says of it, encode(bytes, source) -> ids)."""
    if name == "bytes":
        return {"vocab_size": 257, "tokenizer": "bytes", "eot": 256}, lambda piece, _: np.frombuffer(
            piece, np.uint8
        )
    if not os.path.isfile(name):
        raise DataError(f"--tokenizer={name}: no such file; give 'bytes' or the path of a tokenizer.json")
    model = Tokenizer({"tokenizer": "tokenizer.json"}, name).model
    known = [t for t in ([end] if end else END_TOKENS) if model.token_to_id(t) is not None]
    if not known:
        special = ", ".join(t.content for t in model.get_added_tokens_decoder().values()) or "none"
        why = f"no end-of-document token {end or 'known by name'}; its special tokens: {special}"
        raise DataError(f"{name}: {why}: give --eot=TOKEN")

    def encode(piece: bytes, source):
        try:
            text = piece.decode()
        except UnicodeDecodeError as e:
            raise DataError(f"{source}: is not UTF-8 ({e.reason} near byte {e.start}): convert it") from None
        return model.encode(text, add_special_tokens=False).ids

    meta = {"vocab_size": model.get_vocab_size(), "tokenizer": "tokenizer.json"}
    return meta | {"eot": model.token_to_id(known[0])}, encode


def pack(out: str, inputs: list[str], options, log=print):
    """`python data.py pack`."""
    wanted = {}
    for text in inputs:
        domain, equals, pattern = text.partition("=")
        if not equals or not pattern:
            raise DataError(f"{text!r}: write domain=GLOB, for instance code='src/**/*.py'")
        check_domains([domain])
        wanted.setdefault(domain, []).extend(expand(pattern, domain))
    bins = {f.endswith(".bin") for files in wanted.values() for f in files}
    if len(bins) == 2:
        raise DataError(".bin files hold ids of a tokenizer unknown here: pack them apart from text")
    if bins == {True}:
        if not options.vocab_size:
            raise DataError(".bin files do not say their vocabulary: give --vocab_size=N (GPT-2: 50257)")
        eot = 50256 if options.vocab_size == 50257 else None
        meta, encode = {"vocab_size": options.vocab_size, "tokenizer": None, "eot": eot}, None
    else:
        meta, encode = load_tokenizer(options.tokenizer, options.eot)
    path, copy = os.path.join(out, "metadata.json"), os.path.join(out, "tokenizer.json")
    before = FolderSource(out).metadata() or {}
    if before:
        if not isinstance(before, dict) or not isinstance(before.get("domains"), dict):
            raise DataError(f"{path}: was not made by pack: choose another OUT")
        differing = [k for k in meta if before.get(k) != meta[k]]
        if meta["tokenizer"] == "tokenizer.json" and os.path.exists(copy):
            differing += ["tokenizer.json"] * (not filecmp.cmp(copy, options.tokenizer, shallow=False))
        if differing:
            raise DataError(f"{path}: was packed with another {', '.join(differing)}: choose another OUT")
    domains = before.get("domains", {})
    for domain in wanted:
        here = os.path.join(out, "data", domain)
        if os.path.isdir(here) and os.listdir(here) and domain not in domains:
            raise DataError(f"{here}: holds files that pack did not make: choose another OUT or remove it")
    try:
        os.makedirs(os.path.join(out, "data"), exist_ok=True)
        if meta["tokenizer"] == "tokenizer.json" and not os.path.exists(copy):
            shutil.copyfile(options.tokenizer, copy)
        total = sum(os.path.getsize(f) for files in wanted.values() for f in files)
        from tqdm import tqdm  # comes with huggingface_hub; off where nobody watches

        with tqdm(total=total, unit="B", unit_scale=True, desc="pack", disable=None) as bar:
            for domain, files in wanted.items():
                size, vocab = options.shard_tokens, meta["vocab_size"]
                with replacing(out, domain, files[0], vocab, size) as (train, val, about):
                    if bins == {True}:
                        pack_bins(files, train, val, vocab, bar.update)
                    else:
                        documents = Documents(files, options.field)
                        about["documents"] = len(documents.table)
                        trained, held_out = documents.split(options.val, options.seed, domain)
                        pack_text(documents, held_out, val, encode, meta["eot"], bar.update)
                        pack_text(documents, trained, train, encode, meta["eot"], bar.update)
                        documents.close()
                domains[domain] = about
                save_json(path, meta | {"domains": domains})
    except OSError as e:
        raise DataError(f"{e.filename or out}: {os_reason(e)}") from None
    for domain in wanted:
        log(f"{domain}: " + ", ".join(f"{v} {k}" for k, v in domains[domain].items()))
    log(f"train on it with --data={out} --domains={','.join(domains)}")


def inspect(folder: str, log=print):
    """`python data.py inspect`: domains, shards, rows, tokens, range of the ids, the beginning of a row as text."""
    if not os.path.isdir(folder):
        raise DataError(f"{folder}: no such folder")
    source = FolderSource(folder)
    meta = source.metadata() or {}
    if not isinstance(meta, dict):
        raise DataError(f"{folder}: metadata.json is not an object")
    vocab = meta.get("vocab_size")
    path = os.path.join(folder, "tokenizer.json") if meta.get("tokenizer") == "tokenizer.json" else None
    tokenizer = Tokenizer(meta, path)
    log(f"{folder}: vocab_size {vocab}, tokenizer {meta.get('tokenizer')}, end of document {meta.get('eot')}")
    top = os.path.join(folder, "data")
    if not os.path.isdir(top):
        raise DataError(f"{top}: {source.why_missing('general')}")
    for domain in sorted(os.listdir(top)):
        if domain.startswith("."):
            continue
        names = list(source.list(domain))
        tokens, rows, lows, highs, kinds, text = 0, 0, [], [], set(), ""
        for name in names:
            path = os.path.join(folder, name)
            shard = Shard(path, path, 1, vocab or 2**31)
            tokens, rows = tokens + shard.tokens, rows + shard.tokens // shard.row
            kinds.add(str(shard.dtype))
            for first in range(0, shard.tokens, PIECE):
                ids = shard.ids(first, min(PIECE, shard.tokens - first))
                lows.append(ids.min())
                highs.append(ids.max())
                text = text or tokenizer.decode(ids[: min(shard.row, 200)])
        log(
            f"{domain}: {len(names)} shards ({sum(map(is_val, names))} held out), {rows} rows, {tokens:,} tokens, "
            f"ids {min(lows)} to {max(highs)} ({', '.join(sorted(kinds))})"
        )
        log(f"    {text!r}")


def main(argv: list[str]) -> int:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="data.py", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("pack", help="text, .jsonl or .bin files -> shards")
    p.add_argument("out", metavar="OUT", help="folder of the dataset; domains are added to it or replaced")
    p.add_argument("inputs", metavar="domain=GLOB", nargs="+")
    p.add_argument("--tokenizer", default="bytes", help="bytes, or the path of a tokenizer.json")
    p.add_argument("--eot", help="end-of-document token of a tokenizer.json, if it has an unusual name")
    p.add_argument("--field", default="text", help="name of the text in .jsonl lines")
    p.add_argument("--val", type=float, default=0.01, help="share of the text held out (at most 16 MB)")
    p.add_argument("--seed", type=int, default=0, help="of the order of the documents")
    p.add_argument("--shard_tokens", type=int, default=SHARD_TOKENS, help="tokens per shard")
    p.add_argument("--vocab_size", type=int, help="of .bin files, which do not say it")
    p = commands.add_parser("inspect", help="what a dataset holds")
    p.add_argument("folder", metavar="DIR")
    options = parser.parse_args(argv)
    try:
        if options.command == "inspect":
            inspect(options.folder)
        else:
            if not 0 <= options.val <= 0.5 or options.shard_tokens < 1:
                raise DataError("--val must lie between 0 and 0.5, --shard_tokens be positive")
            pack(options.out, options.inputs, options)
    except DataError as e:
        print(f"data.py {options.command}: {e}", file=sys.stderr)
        return e.exit_code
    return 0
