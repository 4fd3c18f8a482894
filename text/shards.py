"""One shard: a .npy file of token ids, cut into samples; what is wrong with a file, in words.

Reading is `pread` in the training process, not mmap: mapped pages count as memory of the process (nanoGPT issues 287
and 428), and a mapped file that shrinks kills it. Every bad input is a `DataError` that names file, row, value, cure.
"""

import contextlib
import errno
import hashlib
import math
import os
import re

import numpy as np
from numpy.lib import format as npy

MAGIC = b"\x93NUMPY"


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


def read_header(path: str, name: str) -> tuple[tuple, np.dtype, int]:
    """(shape, dtype, offset of the first id) of a .npy file that training can read."""

    def bad(why: str) -> DataError:
        return DataError(f"{name}: {why}")

    try:
        with open(path, "rb") as f:
            size, head = os.fstat(f.fileno()).st_size, f.read(64)
            f.seek(0)
            if not size:
                raise bad("is empty (0 bytes): fetch or pack it again")
            if not head.startswith(MAGIC):
                raise bad(describe_bytes(head))
            version = npy.read_magic(f)
            readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            if version not in readers:
                raise bad(f".npy format {version}: save it again with numpy.save")
            shape, fortran, dtype = readers[version](f)
            offset = f.tell()
    except DataError:
        raise
    except OSError as e:
        raise bad(os_reason(e)) from None
    except (ValueError, KeyError, EOFError, SyntaxError, TypeError, RecursionError) as e:
        reason = re.sub(r" ?<[^>]*>", "", str(e))  # addresses of objects
        raise bad(f"not a readable .npy file ({reason}): save it again with numpy.save") from None
    if dtype.hasobject:
        raise bad("holds pickled Python objects, which are never loaded: save an integer array")
    if dtype.kind not in "ui" or dtype.shape:
        raise bad(f"holds {dtype}, token ids are integers: save it with .astype('uint16')")
    if len(shape) not in (1, 2):
        raise bad(f"is {len(shape)}-D, shape {shape}: reshape it to (rows, tokens) or (tokens,)")
    if fortran and len(shape) == 2 and min(shape) > 1:
        raise bad("is in Fortran order, so rows are not contiguous: save numpy.ascontiguousarray(a)")
    if any(n < 0 for n in shape):
        raise bad(f"its header claims shape {shape}: save it again with numpy.save")
    if 0 in shape:
        raise bad(f"holds no row, shape {shape}: delete it or pack it again")
    if len(shape) == 2 and shape[1] == 1:
        raise bad(f"shape {shape}: a row of 1 token has no next token: save a.reshape(-1)")
    want = offset + math.prod(shape) * dtype.itemsize
    if size != want:
        how = "truncated" if size < want else f"{size - want} trailing bytes"
        raise bad(f"has {size} bytes, its header says {want} ({how}): fetch or pack it again")
    return shape, dtype, offset


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


class Shard:
    """One .npy file, cut into samples of T tokens.

    Rows of kT or kT + 1 tokens are cut row by row. Rows of any other length, longer or shorter, are read as one line of
    tokens whose row ends predict nothing (target -1): so at most a tail shorter than T is lost per shard."""

    def __init__(self, path: str, name: str, T: int, vocab_size: int):
        self.name, self.T, self.vocab_size = name, T, vocab_size
        shape, self.dtype, self.offset = read_header(path, name)
        self.tokens, self.row = math.prod(shape), shape[-1]
        self.by_row = self.row >= T and self.row % T <= 1
        self.n = (self.tokens // self.row) * (self.row // T) if self.by_row else self.tokens // T
        if self.n == 0:
            raise DataError(
                f"{name}: holds {self.tokens} tokens, one sample needs max_len={T}: set a smaller max_len, or pack "
                "more text into one shard"
            )
        try:
            self.fd = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise DataError(f"{name}: {os_reason(e)}") from None

    @property
    def wasted(self) -> int:
        """Tokens that fill no sample. The one behind the last sample is still read, as a target."""
        return 0 if self.by_row else max(0, self.tokens - self.n * self.T - 1)

    def start(self, sample: int) -> int:
        """Index of a sample's first token in the file."""
        if not self.by_row:
            return sample * self.T
        row, chunk = divmod(sample, self.row // self.T)
        return row * self.row + chunk * self.T

    def ids(self, start: int, n: int) -> np.ndarray:
        """The n token ids from index `start` of the file, all of the vocabulary."""
        size = n * self.dtype.itemsize
        try:
            data = os.pread(self.fd, size, self.offset + start * self.dtype.itemsize)
        except OSError as e:
            raise DataError(f"{self.name}: row {start // self.row}: {os_reason(e)}") from None
        if len(data) != size:
            raise DataError(
                f"{self.name}: short read at row {start // self.row}: the file shrank while it was open; "
                "write new shards under a temporary name and rename them"
            )
        ids = np.frombuffer(data, self.dtype)
        if ids.max() >= self.vocab_size or (self.dtype.kind == "i" and ids.min() < 0):
            at = int(((ids >= self.vocab_size) | (ids < 0)).argmax())
            row, column = divmod(start + at, self.row)
            raise DataError(
                f"{self.name}: row {row} column {column} holds token id {ids[at]}, outside the vocabulary of "
                f"{self.vocab_size}: packed with another tokenizer, or metadata.json is wrong"
            )
        return ids

    def read(self, sample: int, x: np.ndarray, y: np.ndarray):
        """Fill x and y, (T,) int64 each, with one sample."""
        T, start = self.T, self.start(sample)
        end = (start // self.row + 1) * self.row if self.by_row else self.tokens
        n = T + (end > start + T)
        ids = self.ids(start, n)
        x[:] = ids[:T]
        y[: n - 1] = ids[1:]
        y[n - 1 :] = -1  # no next token is known
        if not self.by_row and self.row < self.tokens:
            y[
                self.row - 1 - start % self.row :: self.row
            ] = -1  # a row does not predict the one joined behind it

    def __del__(self):
        if hasattr(self, "fd"):
            os.close(self.fd)
