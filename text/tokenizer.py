"""Text <-> ids, and how many ids there are, as a dataset's metadata.json says."""

import json

import numpy as np

from .shards import DataError
from .source import label


class Tokenizer:
    """ "bytes", a tokenizer.json (needs the package tokenizers), or unknown."""

    def __init__(self, metadata: dict | None = None, path: str | None = None):
        metadata = metadata or {}
        self.kind, self.eot, self.lengths, self.path = "ids", metadata.get("eot"), None, path
        if metadata.get("tokenizer") == "bytes":
            self.kind, self.eot = "bytes", metadata.get("eot", 256)
            self.lengths = np.ones(256, np.int64)
        elif path:
            try:
                import tokenizers
            except ImportError:
                raise DataError(f"{path} needs the package tokenizers: pip install tokenizers") from None
            try:
                self.model = tokenizers.Tokenizer.from_file(path)
            except Exception as e:
                raise DataError(f"{path}: tokenizers cannot read it ({e})") from None
            self.kind = "file"
            if "ByteLevel" in json.dumps(json.loads(self.model.to_str()).get("decoder")):
                special = self.model.get_added_tokens_decoder()
                words = (self.model.id_to_token(i) for i in range(self.model.get_vocab_size()))
                # one character of a byte-level token stands for one byte
                self.lengths = np.array([0 if i in special else len(w or "") for i, w in enumerate(words)])

    @property
    def bytes_exact(self) -> bool:
        """Whether bits per byte can be given: every id stands for a known number of bytes."""
        return self.lengths is not None

    def encode(self, text: str) -> list[int]:
        if self.kind == "bytes":
            return list(text.encode("utf-8", errors="surrogateescape"))
        if self.kind == "file":
            return self.model.encode(text, add_special_tokens=False).ids
        raise DataError("metadata.json names no tokenizer, so text cannot be encoded")

    def decode(self, ids) -> str:
        ids = [int(i) for i in ids]
        if self.kind == "bytes":
            return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")
        if self.kind == "file":
            return self.model.decode(ids)
        return " ".join(map(str, ids))

    def bytes_per_token(self, ids) -> float:
        """Mean bytes that one of these ids stands for (ids below 0 are left out): bits per byte =
        mean loss / ln 2 / bytes_per_token(targets)."""
        ids = np.asarray(ids).reshape(-1)
        ids = ids[ids >= 0]
        if self.lengths is None or not len(ids):
            return float("nan")
        inside = ids[ids < len(self.lengths)]  # an end-of-document id above them stands for no byte
        return float(self.lengths[inside].sum() / len(ids))


def open_tokenizer(metadata, source, log) -> Tokenizer:
    name = (metadata or {}).get("tokenizer")
    if name == "tokenizer.json":
        try:
            return Tokenizer(metadata, source.fetch(name))
        except DataError as e:
            log(f"data: no text samples and no bits per byte: {e}")
            return Tokenizer({"eot": metadata.get("eot")})
    if name not in (None, "bytes"):
        log(
            f"data: metadata.json names tokenizer {name!r}, which is unknown here: ids are shown instead of text"
        )
    return Tokenizer(metadata)


def read_metadata(source):
    """What metadata.json holds, None where there is none."""
    try:
        return source.metadata()
    except ValueError as e:
        raise e if isinstance(e, DataError) else DataError(str(e)) from None


def vocabulary(metadata, settings, source) -> int:
    """The number of ids, from metadata.json and the settings."""

    def bad(why: str) -> DataError:
        return DataError(f"{label(source)}: metadata.json{why}")

    if metadata is None:
        if settings.vocab_size is None:
            raise bad(
                " is missing: `python data.py pack` makes one; or write one with vocab_size in it, or set vocab_size"
            )
        return settings.vocab_size
    if not isinstance(metadata, dict):
        raise bad(f": holds a {type(metadata).__name__}, not an object with vocab_size in it")
    vocab = metadata.get("vocab_size", settings.vocab_size)
    if vocab is None:
        raise bad(f": has no vocab_size (it has {', '.join(metadata) or 'nothing'}): add it")
    if type(vocab) is not int or not 2 <= vocab < 2**31:
        raise bad(f": vocab_size={vocab!r} must be an integer of at least 2")
    if settings.vocab_size not in (None, vocab):
        set_by = settings.source.get("vocab_size", "default")
        raise bad(
            f": vocab_size={vocab} contradicts vocab_size={settings.vocab_size} ({set_by}): leave the setting out"
        )
    eot = metadata.get("eot")
    if eot is not None and (type(eot) is not int or not 0 <= eot < vocab):
        raise bad(f": eot={eot!r} must be a token id below vocab_size={vocab}")
    if metadata.get("tokenizer") == "bytes" and vocab < 256:
        raise bad(f": tokenizer 'bytes' needs a vocab_size of at least 256, not {vocab}")
    return vocab
