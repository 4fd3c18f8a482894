"""From text to shards, and from shards to what a run takes of them.

    shards.py      one shard: a .npy file cut into samples; what is wrong with a file, in words
    source.py      where shards lie: a folder or a Hub dataset repo
    domain.py      of each domain, the shards that a run admitted and the rows that it holds out
    mixture.py     which domains, how often
    tokenizer.py   text <-> ids, metadata.json
    pack.py        text, .jsonl and .bin files -> shards; what a dataset holds
    corpus.py      the text that every Python carries, packed for the quickstart

The invariant: every bad input is a DataError that names the file, the value and the cure; what was packed from the same
input is the same to the byte, and a killed pack leaves nothing half-made.
"""

from .domain import Domain, Shelf
from .mixture import mixture
from .shards import DataError, Shard, permutation, way_past
from .source import FolderSource, agreed, survey
from .tokenizer import Tokenizer, open_tokenizer, read_metadata, vocabulary

__all__ = [
    "DataError", "Domain", "FolderSource", "Shard", "Shelf", "Tokenizer", "agreed", "corpus", "mixture", "open_tokenizer", "pack",
    "permutation", "read_metadata", "survey", "vocabulary", "way_past",
]  # fmt: skip
