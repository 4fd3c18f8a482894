"""Files of token ids and where they lie: one shard, a folder of shards; what is wrong with a file, in words.

The layout, in a folder or in a Hub dataset repo (hub.HubSource):

    data/<domain>/*.npy      1-D or 2-D integer arrays in C order; names that start with `val` are held out whole
    metadata.json            vocab_size, tokenizer ("bytes" or "tokenizer.json"), eot: the end-of-document id

Reading is `pread` in the training process, not mmap: mapped pages count as memory of the process (nanoGPT issues 287
and 428), and a mapped file that shrinks kills it. Every bad input is a `DataError` that names file, row, value, cure.
"""

import contextlib
import difflib
import errno
import hashlib
import json
import math
import os
import re

import numpy as np
from numpy.lib import format as npy

MAX_CYCLE = 100_000  # sum of the domain weights: the length of the pattern that is repeated
PROBE = 4096  # bytes read at each end of a shard to recognise its content


class DataError(ValueError):
    """A shard, a layout or a state that cannot be used: names the file, the value and the cure."""

    exit_code = 65


@contextlib.contextmanager
def way_past():
    """A run that cannot read a shard names what lets it go on."""
    try:
        yield
    except (DataError, OSError) as e:
        if getattr(e, "exit_code", None) == DataError.exit_code:  # not where trying again may heal it
            cure = "repair or remove it, then resume with --allow_change=data"
            e.args = (f"{e}. If that shard is bad or gone for good: {cure}",)
        raise


def permutation(n: int, *key) -> np.ndarray:
    """A permutation of range(n) that depends on the key alone. (numpy promises Philox's bits for good, but not what
    Generator.permutation makes of them.)"""
    bits = np.frombuffer(hashlib.sha256(repr(key).encode()).digest()[:16], np.uint64)
    return np.argsort(np.random.Philox(key=bits).random_raw(n), kind="stable")


# --- one shard ---------------------------------------------------------------------------------------------------


def os_reason(e: OSError) -> str:
    """An operating system error in words that say what to do."""
    if isinstance(e, PermissionError):
        return "permission denied: make it readable for this user (chmod a+r the file, a+rx its folders)"
    if isinstance(e, FileNotFoundError):
        return "no such file: it was moved or deleted; restore it"
    if isinstance(e, IsADirectoryError):
        return "is a folder: remove or rename it"
    # numpy's words
    if e.errno == errno.ENOSPC or (e.errno is None and re.search("requested and|free space", str(e))):
        return "the disk is full: make room, or choose a folder on another disk"
    return e.strerror or str(e)


def read_header(path: str, name: str) -> tuple[tuple, np.dtype, int, int]:
    """(shape, dtype, offset of the first id, bytes of the file) of a .npy file that training can read."""
    try:
        with open(path, "rb") as f:
            head = f.read(PROBE)
            size = os.fstat(f.fileno()).st_size
            f.seek(0)
            if not size:
                raise DataError(f"{name}: is empty (0 bytes): fetch or pack it again")
            if not head.startswith(b"\x93NUMPY"):
                raise DataError(f"{name}: {describe_bytes(head)}")
            version = npy.read_magic(f)
            readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            if version not in readers:
                raise DataError(f"{name}: .npy format {version}: save it again with numpy.save")
            shape, fortran, dtype = readers[version](f)
            offset = f.tell()
    except OSError as e:
        raise DataError(f"{name}: {os_reason(e)}") from None
    except (ValueError, KeyError, EOFError, SyntaxError, TypeError, RecursionError) as e:
        if isinstance(e, DataError):
            raise
        reason = re.sub(r" ?<[^>]*>", "", str(e))  # addresses of objects
        raise DataError(
            f"{name}: not a readable .npy file ({reason}): save it again with numpy.save"
        ) from None
    if dtype.hasobject:
        raise DataError(
            f"{name}: holds pickled Python objects, which are never loaded: save an integer array"
        )
    if dtype.kind not in "ui" or dtype.shape:
        raise DataError(f"{name}: holds {dtype}, token ids are integers: save it with .astype('uint16')")
    if len(shape) not in (1, 2):
        raise DataError(
            f"{name}: is {len(shape)}-D, shape {shape}: reshape it to (rows, tokens) or (tokens,)"
        )
    if fortran and len(shape) == 2 and min(shape) > 1:
        raise DataError(
            f"{name}: is in Fortran order, so rows are not contiguous: save numpy.ascontiguousarray(a)"
        )
    if any(n < 0 for n in shape):
        raise DataError(f"{name}: its header claims shape {shape}: save it again with numpy.save")
    if 0 in shape:
        raise DataError(f"{name}: holds no row, shape {shape}: delete it or pack it again")
    if len(shape) == 2 and shape[1] == 1:
        raise DataError(f"{name}: shape {shape}: a row of 1 token has no next token: save a.reshape(-1)")
    want = offset + math.prod(shape) * dtype.itemsize
    if size != want:
        how = "truncated" if size < want else f"{size - want} trailing bytes"
        raise DataError(f"{name}: has {size} bytes, its header says {want} ({how}): fetch or pack it again")
    return shape, dtype, offset, size


def describe_bytes(head: bytes) -> str:
    """What a file that is not .npy seems to be, and what to do."""
    if head.lstrip()[:1] == b"<":
        return "is a web page, not a .npy file: a download went wrong (not logged in?): fetch it again"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the data: run `git lfs pull` in that repository"
    if head.startswith(b"PK\x03\x04"):
        return "is a zip archive (numpy.savez?), not a .npy file: save each array with numpy.save"
    if head[:2] == b"\x1f\x8b":
        return "is gzip-compressed: decompress it first"
    if head[:1] == b"\x80":
        return "is a pickle, which is never loaded: save an integer array with numpy.save"
    return f"is not a .npy file (starts with {head[:8]!r}): save it with numpy.save, or `python data.py pack` text"


def content_id(path: str) -> str:
    """Size and a hash of both ends (header included): cheap enough for 20,000 shards, and different for any file that
    was packed again."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        ends = os.pread(fd, PROBE, 0) + os.pread(fd, PROBE, max(PROBE, size - PROBE))
    finally:
        os.close(fd)
    return f"{size}-{hashlib.blake2b(ends, digest_size=8).hexdigest()}"


class Shard:
    """One .npy file, cut into samples of T tokens.

    Rows of kT or kT + 1 tokens are cut row by row. Rows of any other length, longer or shorter, are read as one line of
    tokens whose row ends predict nothing (target -1): so at most a tail shorter than T is lost per shard."""

    def __init__(self, path: str, name: str, T: int, vocab_size: int):
        self.name, self.T, self.vocab_size = name, T, vocab_size
        shape, self.dtype, self.offset, _ = read_header(path, name)
        self.tokens = math.prod(shape)
        self.row = shape[-1]
        self.by_row = self.row >= T and self.row % T <= 1
        self.per_row = self.row // T
        self.n = (self.tokens // self.row) * self.per_row if self.by_row else self.tokens // T
        if self.n == 0:
            raise DataError(
                f"{name}: holds {self.tokens} tokens, one sample needs max_len={T}: set a smaller max_len, or pack "
                "more text into one shard"
            )
        # the token behind the last sample is still read, as a target
        self.wasted = 0 if self.by_row else max(0, self.tokens - self.n * T - 1)
        info = np.iinfo(self.dtype)
        self.too_large, self.negative = info.max >= vocab_size, info.min < 0  # which ids are possible
        try:
            self.fd = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise DataError(f"{name}: {os_reason(e)}") from None

    def start(self, sample: int) -> int:
        """Index of a sample's first token in the file."""
        if not self.by_row:
            return sample * self.T
        row, chunk = divmod(sample, self.per_row)
        return row * self.row + chunk * self.T

    def read(self, sample: int, x: np.ndarray, y: np.ndarray):
        """Fill x and y, (T,) int64 each, with one sample."""
        T, size = self.T, self.dtype.itemsize
        start = self.start(sample)
        end = (start // self.row + 1) * self.row if self.by_row else self.tokens
        n = T + (end > start + T)
        try:
            data = os.pread(self.fd, n * size, self.offset + start * size)
        except OSError as e:
            raise DataError(f"{self.name}: {os_reason(e)}") from None
        if len(data) != n * size:
            raise DataError(
                f"{self.name}: short read at row {start // self.row}: the file shrank while it was open; "
                "write new shards under a temporary name and rename them"
            )
        t = np.frombuffer(data, self.dtype)
        if (self.too_large and t.max() >= self.vocab_size) or (self.negative and t.min() < 0):
            at = int(np.flatnonzero((t >= self.vocab_size) | (t < 0))[0])
            raise DataError(
                f"{self.name}: row {(start + at) // self.row} column {(start + at) % self.row} holds token id {t[at]}, "
                f"outside the vocabulary of {self.vocab_size}: packed with another tokenizer, or metadata.json is wrong"
            )
        x[:] = t[:T]
        y[: n - 1] = t[1:]
        y[n - 1 :] = -1  # no next token is known
        if not self.by_row and self.row < self.tokens:
            end = self.row - 1 - start % self.row
            y[end :: self.row] = -1  # a row does not predict the one joined behind it

    def __del__(self):
        if hasattr(self, "fd"):
            os.close(self.fd)


# --- where shards come from --------------------------------------------------------------------------------------


class FolderSource:
    """A folder of the layout above. Nothing in it is ever changed or deleted.

    A source of shards has what is here, and so has hub.HubSource, the other one: `revision`, `metadata`, `list`, `fetch`
    (which must refuse content other than `id`: a resume would go on with other data), `release`, and str() for messages.
    One whose `list` may be empty at first also has `domains()`, the names that there are."""

    revision = None

    def __init__(self, root: str):
        self.root, self.known = root, {}

    def __str__(self):
        return self.root

    def metadata(self) -> dict | None:
        """metadata.json, or None where there is none."""
        path = os.path.join(self.root, "metadata.json")
        try:
            with open(path, encoding="utf-8") as f:
                return json.load(f)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise DataError(f"{path}: {os_reason(e)}") from None
        except ValueError as e:
            raise DataError(
                f"{path}: is not JSON ({e}): pack again, or set vocab_size and delete it"
            ) from None

    def list(self, domain: str) -> dict:
        """{name: content id} of the shards of one domain."""
        folder = os.path.join(self.root, "data", domain)
        try:
            with os.scandir(folder) as entries:
                files = sorted(e.name for e in entries if not e.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{folder}: {self.why_missing(domain)}") from None
        except OSError as e:
            raise DataError(f"{folder}: {os_reason(e)}") from None
        found = {}
        for file in (f for f in files if f.endswith(".npy")):
            path = os.path.join(folder, file)
            try:
                stat = os.stat(path)
                key = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
                if self.known.get(path, (None,))[0] != key:
                    self.known[path] = (key, content_id(path))
            except OSError as e:
                raise DataError(f"{path}: {os_reason(e)}") from None
            found[f"data/{domain}/{file}"] = self.known[path][1]
        if not found:
            raise DataError(f"{folder}: holds no .npy shard{self.other_files(folder, files, domain)}")
        return found

    def why_missing(self, domain: str) -> str:
        top = os.path.join(self.root, "data")
        if not os.path.isdir(top):
            files = sorted(os.listdir(self.root))
            return "no such folder" + self.other_files(self.root, files, domain)
        there = sorted(d for d in os.listdir(top) if os.path.isdir(os.path.join(top, d)))
        near = difflib.get_close_matches(domain, there, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"no such domain; {hint}data/ holds {', '.join(there) or 'no folder'}; set domains"

    def other_files(self, folder: str, files: list, domain: str) -> str:
        """The command that converts what lies there instead of shards."""
        kinds = [k for k in (".bin", ".txt", ".jsonl", ".py") if any(f.endswith(k) for f in files)]
        if not kinds:
            return "; make shards with `python data.py pack`"
        extra = " --vocab_size=50257" if kinds[0] == ".bin" else ""
        made = "nanoGPT or modded-nanogpt token files" if kinds[0] == ".bin" else f"{kinds[0]} files"
        command = f"python data.py pack OUT{extra} {domain}='{os.path.join(folder, '*' + kinds[0])}'"
        return f"; there are {made}: convert them with `{command}`, then set data=OUT"

    def fetch(self, name: str, revision: str | None = None, id: str | None = None) -> str:
        """The path of a shard whose content is still what was admitted. A renamed file is found by its content."""
        path = os.path.join(self.root, name)
        try:
            if id is None or content_id(path) == id:
                return path
        except FileNotFoundError:
            domain = name.split("/")[1] if name.count("/") == 2 else ""
            try:
                here = self.list(domain) if id and domain else {}
            except DataError:
                here = {}
            for other, content in here.items():
                if content == id:
                    return os.path.join(self.root, other)
            raise DataError(f"{path}: no such file, and no other shard has its content: restore it") from None
        except OSError as e:
            raise DataError(f"{path}: {os_reason(e)}") from None
        raise DataError(
            f"{path}: was replaced since this run admitted it (content {content_id(path)}, expected {id}): restore "
            "it, and add new data under a new name"
        )

    def release(self, name: str):
        """Nothing is cached, so nothing is deleted."""


def survey(source, domains: list[str]) -> dict:
    """The shards that the source holds now: {"revision": …, "found": {domain: {name: content id}}}"""
    found = {}
    for domain in domains:
        found[domain] = source.list(domain)
        if not found[domain]:
            there = source.domains()
            near = difflib.get_close_matches(domain, there, n=1, cutoff=0.5)
            raise DataError(
                f"{label(source)}: domain {domain!r} holds no .npy shard; "
                + (f"did you mean {near[0]!r}? " if near else "")
                + f"data/ holds {', '.join(there) or 'no folder'}; set domains"
            )
        for name in found[domain]:
            check_name(name, domain)
    return {"revision": source.revision, "found": found}


def check_kind(revision: str | None, source, allow):
    """A folder and the Hub tell contents apart by other ids: what one admitted cannot be recognised in the other."""
    was, now = ("a folder" if r is None else "a Hub repo" for r in (revision, source.revision))
    if was != now and "data" not in allow:
        raise DataError(
            f"this run's shards were admitted from {was}, data= now names {now} ({label(source)}): restore data=, or "
            "accept the move with --allow_change=data"
        )


def whereabouts(ids: dict, found: dict, log) -> dict:
    """{name: its name now, None if it is gone} of what was admitted (ids) and is listed (found), both {name: content id}.
    A renamed file is known by its content, unless the new name changes what it is for."""
    spare = {(is_val(n), id): n for n, id in found.items() if id and n not in ids}
    now = {n: n if n in found else spare.pop((is_val(n), id), None) for n, id in ids.items()}
    for name, other in now.items():
        if name != other:
            log(f"data: {name} " + (f"is {other} now" if other else "left the source, and so the run"))
    changed = [n for n in ids if now[n] and found[now[n]] != ids[n]]
    if changed:
        log(f"data: {len(changed)} shards are read with the content that they have now, e.g. {changed[0]}")
    return now


# --- names, metadata, settings ---


def label(source) -> str:
    """A source's name in messages: the repo of a Hub source, the folder else."""
    return getattr(source, "repo", None) or str(source)


def is_val(name: str) -> bool:
    return name.rsplit("/", 1)[-1].startswith("val")


def check_domains(domains: list) -> list[str]:
    if not domains:
        raise DataError("domains is empty: name at least one folder under data/")
    for d in domains:
        if not isinstance(d, str) or not re.fullmatch(r"[\w-][\w. -]*", d) or d != d.strip():
            raise DataError(f"domains: {d!r} is not the name of a folder under data/")
    if len(set(domains)) != len(domains):
        raise DataError(
            f"domains: {', '.join(domains)}: one is named twice; set domain_weights to read it more often"
        )
    return list(domains)


def check_weights(weights: list, domains: list) -> list[int]:
    good = all(isinstance(w, int) and not isinstance(w, bool) and w >= 1 for w in weights)
    if len(weights) != len(domains) or not good:
        raise DataError(
            f"domain_weights={weights}: give one positive integer for each of {', '.join(domains)}"
        )
    weights = [w // math.gcd(*weights) for w in weights]
    if sum(weights) > MAX_CYCLE:
        raise DataError(f"domain_weights={weights}: their sum must not exceed {MAX_CYCLE:,}: round them")
    return weights


def weighted_pattern(weights: list[int]) -> list[int]:
    """Domains in turn, weights[d] times each per sum(weights), spread evenly (smooth weighted round robin)."""
    pattern, credit, total = [], [0] * len(weights), sum(weights)
    for _ in range(total):
        credit = [c + w for c, w in zip(credit, weights, strict=True)]
        d = max(range(len(weights)), key=credit.__getitem__)
        credit[d] -= total
        pattern.append(d)
    return pattern


def check_name(name: str, domain: str):
    """A shard's name becomes a path on this machine: it must stay inside data/<domain>/."""
    file = name[len(f"data/{domain}/") :] if isinstance(name, str) else ""
    if name != f"data/{domain}/{file}" or not re.fullmatch(r"[^/\\:\x00-\x1f.][^/\\:\x00-\x1f]*\.npy", file):
        raise DataError(
            f"{name!r}: not of the form data/{domain}/NAME.npy, in no folder and without a leading dot: refused, rename it"
        )


def check_metadata(metadata, settings, source) -> int:
    """The vocabulary size, from metadata.json and the settings."""
    where = f"{label(source)}: metadata.json"
    if metadata is None:
        if settings.vocab_size is None:
            raise DataError(
                f"{where} is missing: `python data.py pack` makes one; or write one with vocab_size in it, or set vocab_size"
            )
        return settings.vocab_size
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: holds a {type(metadata).__name__}, not an object with vocab_size in it")
    vocab = metadata.get("vocab_size", settings.vocab_size)
    if vocab is None:
        raise DataError(f"{where}: has no vocab_size (it has {', '.join(metadata) or 'nothing'}): add it")
    if isinstance(vocab, bool) or not isinstance(vocab, int) or not 2 <= vocab < 2**31:
        raise DataError(f"{where}: vocab_size={vocab!r} must be an integer of at least 2")
    if settings.vocab_size is not None and settings.vocab_size != vocab:
        set_by = settings.source.get("vocab_size", "default")
        raise DataError(
            f"{where}: vocab_size={vocab} contradicts vocab_size={settings.vocab_size} ({set_by}): leave the setting out"
        )
    eot = metadata.get("eot")
    if eot is not None and (isinstance(eot, bool) or not isinstance(eot, int) or not 0 <= eot < vocab):
        raise DataError(f"{where}: eot={eot!r} must be a token id below vocab_size={vocab}")
    if metadata.get("tokenizer") == "bytes" and vocab < 256:
        raise DataError(f"{where}: tokenizer 'bytes' needs a vocab_size of at least 256, not {vocab}")
    return vocab
