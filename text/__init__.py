"""From text to shards: files of token ids, who made them, and how they are made.

    shards.py      one shard, a folder of shards, names and metadata; what is wrong with a file, in words
    tokenizer.py   text <-> ids
    pack.py        text, .jsonl and .bin files -> shards; what a dataset holds
    corpus.py      the text that every Python carries, packed for the quickstart

The invariant: every bad input is a DataError that names the file, the value and the cure; what was packed from the same
input is the same to the byte, and a killed pack leaves nothing half-made.
"""

from .shards import (
    DataError,
    FolderSource,
    Shard,
    check_domains,
    check_kind,
    check_metadata,
    check_name,
    check_weights,
    is_val,
    label,
    permutation,
    survey,
    way_past,
    weighted_pattern,
    whereabouts,
)
from .tokenizer import Tokenizer, open_tokenizer

__all__ = [
    "DataError", "FolderSource", "Shard", "Tokenizer", "check_domains", "check_kind", "check_metadata", "check_name",
    "check_weights", "corpus", "is_val", "label", "open_tokenizer", "pack", "permutation", "survey", "way_past",
    "weighted_pattern", "whereabouts",
]  # fmt: skip
