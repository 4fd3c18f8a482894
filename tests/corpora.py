"""Small datasets whose token ids say where they lie, and agreement between ranks that take turns in one process."""

import json
import os
from pathlib import Path

import numpy as np
from conftest import quiet, tiny_settings
from workers import Rank

import data

DOMAINS = ["code", "general", "math", "reasoning"]
ROW = 1 << 10  # ids of row r begin at r * ROW: the next token of a row is id + 1, and rows never touch


def rows(first: int, count: int, length: int, dtype="uint32") -> np.ndarray:
    """(count, length): row r holds (first + r) * ROW + 0, 1, 2, …"""
    return ((first + np.arange(count))[:, None] * ROW + np.arange(length)).astype(dtype)


def write(root, name: str, array):
    """One shard, whole or not at all, as `pack` writes them."""
    path = os.path.join(root, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".tmp", "wb") as f:
        np.save(f, array)
    os.replace(path + ".tmp", path)
    return path


def describe(root, **metadata):
    Path(root, "metadata.json").write_text(json.dumps({"vocab_size": 1 << 30, **metadata}))


def dataset(root, length=9, shards=(13, 7, 10), domains=DOMAINS) -> str:
    """`shards` files of that many rows in each domain, all ids different."""
    row = 0
    for domain in domains:
        for k, count in enumerate(shards):
            write(root, f"data/{domain}/{k:03d}.npy", rows(row, count, length))
            row += count
    describe(root)
    return str(root)


def settings(root, **changes):
    rows = dict(val_rows=3, eval_rows=3, final_eval_rows=3, sequences_per_step=24, micro_batch=1)
    where = dict(data=str(root), vocab_size=None, max_len=8, shard_refresh_steps=4, seed=7)
    return tiny_settings(**(rows | where | changes))


class Turns(Rank):
    """Rank `rank` of `world` simulated ranks: what rank 0 broadcast is replayed to the others, which run after it."""

    def __init__(self, rank: int, world: int, said: list):
        super().__init__(rank, world)
        self.said, self.to_hear = said, iter(said)

    def broadcast(self, value):
        if self.rank == 0:
            self.said.append(json.loads(json.dumps(value)))
            return value
        return next(self.to_hear)


class Crew:
    """All ranks of a run in one process."""

    def __init__(self, s, world=1, state=None, log=quiet, source=None):
        said, self.s, self.streams = [], s, []
        for agree in (Turns(rank, world, said) for rank in range(world)):
            where = source or data.open_source(s, agree, log)
            self.streams.append(data.Stream(where, s, agree, log, state))

    def step(self, n: int, step: int | None = None) -> list:
        """The global batch of one step as [(id, domain, inputs, targets)], ranks in order."""
        if step is not None:
            for stream in self.streams:
                if stream.agree.rank == 0 and stream.news.listing:
                    stream.news.listing.join(60)
                stream.refresh(step)
        out = []
        for stream in self.streams:
            b = stream.next_batch(n)
            out += list(zip(b.ids, b.domain.tolist(), b.x.tolist(), b.y.tolist(), strict=True))
        return out

    def run(self, steps: range, n: int = 24, between=None) -> list:
        """Consecutive steps as one list of samples; between(step) happens before each."""
        out = []
        for step in steps:
            if between:
                between(step)
            out += self.step(n, step)
        return out

    def state(self) -> dict:
        """Through JSON, as in a checkpoint; the same on every rank."""
        states = [json.dumps(s.state()) for s in self.streams]
        assert len(set(states)) == 1, "ranks hold different states"
        return json.loads(states[0])
