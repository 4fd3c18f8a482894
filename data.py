"""Shards of token ids -> batches, exactly: every row once per epoch, in one order on any number of ranks.

The one idea: **sample g of the run is a pure function of (seed, admitted shards, g)**. Every rank walks the same cursor,
a handful of integers, and reads only its own slice of the next n samples. Hence the same global sequence at any
world size, exact domain weights, and a resume that is exact to the row, also on another number of ranks.

    data/<domain>/*.npy      1-D or 2-D integer arrays in C order, in a folder or a Hub dataset repo of this layout
    metadata.json            vocab_size, tokenizer ("bytes", "tokenizer.json"), eot: the end-of-document id

Reading is `pread` in the training process: no workers, no shuffle buffer, no mmap (whose pages count as memory of the
process, and whose file must not shrink). Shards named val* are held out whole; without any, the last rows of the
first shards are. Every bad input is a `DataError` that names the file, the row, the value and the cure.

    python data.py pack OUT code='src/**/*.py' general=notes.jsonl      text -> shards
    python data.py inspect DIR                                          what is in there
"""

from launch import entry

if __name__ == "__main__":
    entry.prepare()

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
import threading
from dataclasses import dataclass

import numpy as np
import torch

from text import (
    DataError,
    Domain,
    FolderSource,
    Shard,
    Shelf,
    Tokenizer,
    agreed,
    mixture,
    open_tokenizer,
    permutation,
    read_metadata,
    survey,
    vocabulary,
    way_past,
)

STATE_VERSION = 1
LISTING_WAIT = 20.0  # seconds that a step waits for a listing which began long before


# --- batches -----------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Rows of this rank. A target of -1 is ignored by the loss."""

    x: torch.Tensor  # (B, T) int64, input ids
    y: torch.Tensor  # (B, T) int64, next tokens or -1
    domain: torch.Tensor  # (B,) int64, index into stream.domains
    ids: list  # B global sample numbers; -1 for a padding row of the validation

    def to(self, device) -> "Batch":
        """On a GPU through pinned memory, without waiting for the copy."""
        cuda = torch.device(device).type == "cuda"
        tensors = {k: getattr(self, k) for k in ("x", "y", "domain")}
        moved = {k: (t.pin_memory() if cuda else t).to(device, non_blocking=cuda) for k, t in tensors.items()}
        return dataclasses.replace(self, **moved)

    def contexts(self, length: int) -> "Batch":
        """(B, T) -> (B*T/length, length): shorter contexts, every token kept. A target at the end of a context is
        the first token of the next one, as before."""
        rows, T = self.x.shape
        if length < 1 or T % length:
            raise DataError(f"a context of {length} does not divide rows of {T} tokens: no token is dropped")
        k = T // length
        return Batch(
            self.x.view(rows * k, length),
            self.y.view(rows * k, length),
            self.domain.repeat_interleave(k),
            [i for i in self.ids for _ in range(k)],
        )


# --- one domain: where it stands ---------------------------------------------------------------------------------


def epoch_order(admitted: list, epoch: int, *key) -> list[str]:
    """The shards of an epoch: what was admitted before it, mixed; then, in order, what came during it."""
    old = sorted(n for e, _, group in admitted if e < epoch for n, _ in group)
    names = [old[i] for i in permutation(len(old), *key, epoch)]
    for j, (e, _, group) in enumerate(admitted):
        if e == epoch:
            new = sorted(n for n, _ in group)
            names += [new[i] for i in permutation(len(new), *key, epoch, j)]
    return names


class Cursor:
    """epoch -> shard of its order -> place in the permutation of the shard's samples."""

    def __init__(self, domain: Domain, seed: int):
        self.domain, self.seed = domain, seed
        self.epoch = self.shard = self.pos = 0
        self.ready = None  # (epoch, shard, the open Shard, permutation of its samples) that `pos` counts in
        self.opened = None, None  # (name, Shard) of the current shard
        self.near = set()  # names of the current and the next shard, whose files are held

    def order(self, epoch: int) -> list[str]:
        return epoch_order(self.domain.admitted, epoch, self.seed, self.domain.name)

    def seek(self):
        """Open the shard at (epoch, shard), roll over where it is used up, and have the next one fetched."""
        domain, where = self.domain, self.domain.where()
        names = self.order(self.epoch)
        while True:
            if self.shard >= len(names):
                self.epoch, self.shard, self.pos = self.epoch + 1, 0, 0
                names = self.order(self.epoch)
                continue
            name = names[self.shard]
            if self.opened[0] != name:
                self.opened = name, domain.shelf.open(name, *where[name])
            shard = self.opened[1]
            n = domain.trained(shard, name)
            if self.pos < n:
                break
            self.shard, self.pos = self.shard + 1, 0
        self.ready = (self.epoch, self.shard, shard, permutation(n, self.seed, domain.name, self.epoch, name))
        following = (names[self.shard + 1 :] or self.order(self.epoch + 1))[0]
        near, self.near = self.near, {name, following}
        for other in near - self.near:
            domain.shelf.source.release(other)
        if following != name:
            work = threading.Thread(target=self.prefetch, args=(following, *where[following]), daemon=True)
            work.name = f"prefetch {following}"
            work.start()

    def prefetch(self, name: str, revision, id):
        """Have the next shard at hand before it is needed. A failure is met again, and raised, when it is."""
        shelf = self.domain.shelf
        try:
            shelf.source.fetch(name, revision, id)
            if name not in self.near:
                shelf.source.release(name)  # the stream has passed it meanwhile
        except Exception as e:
            shelf.log(f"data: {name} could not be fetched ahead, trying again when it is needed: {e}")

    def next(self) -> tuple[Shard, int, int]:
        """The next sample: (shard, sample in it, number of samples in it that are trained on)."""
        ready = self.ready
        if ready is None or self.pos >= len(ready[3]) or ready[0] != self.epoch or ready[1] != self.shard:
            self.seek()
            ready = self.ready
        self.pos += 1
        return ready[2], int(ready[3][self.pos - 1]), len(ready[3])

    def begin(self, found: dict, revision, val_rows: int):
        """Take what the source holds now: all of it at the start, else what is left of what was admitted."""
        if self.domain.admitted:
            order = self.order(self.epoch)
            now = self.domain.keep(found, revision, self.epoch, order)
            if self.shard < len(order) and not now[order[self.shard]]:
                self.pos = 0
            self.shard = sum(now[n] is not None for n in order[: self.shard])
        self.domain.hold_out(found, revision, val_rows)
        self.ready = None

    def epochs(self) -> float:
        """Epochs begun, as a fraction; shards count alike, whatever their size."""
        shards = sum(len(group) for e, _, group in self.domain.admitted if e <= self.epoch) or 1
        inside = self.pos / len(self.ready[3]) if self.ready else 0.0
        return self.epoch + min(1.0, (self.shard + inside) / shards)

    def state(self) -> dict:
        return {"epoch": self.epoch, "shard": self.shard, "pos": self.pos} | self.domain.state()

    def load_state(self, state: dict, allow):
        self.domain.load_state(state, allow)
        self.epoch, self.shard, self.pos = (state.get(k, 0) for k in ("epoch", "shard", "pos"))
        self.ready, self.opened = None, (None, None)


# --- all domains: the run's batches ------------------------------------------------------------------------------


class Stream:
    """The run's batches. Calls marked "agreed" are made by every rank at the same point."""

    def __init__(self, source, settings, agree, log=print, state: dict | None = None):
        self.settings, self.agree, self.g = settings, agree, 0
        domains, self.weights, self.pattern = mixture(settings)
        self.metadata = self.leader("metadata.json", lambda: read_metadata(source))
        self.shelf = Shelf(source, settings.max_len, vocabulary(self.metadata, settings, source), log)
        self.tokenizer: Tokenizer = agreed(
            self.agree, "tokenizer", lambda: open_tokenizer(self.metadata, source, log)
        )
        self.cursors = [Cursor(Domain(d, self.shelf), settings.seed) for d in domains]
        self.news = News(source, domains, settings.shard_refresh_steps, agree, log)
        if state is None:
            self.describe(self.begin(self.cursors))
        else:
            self.load_state(state)
        agreed(
            self.agree, "held-out rows", lambda: [c.domain.val_rows() for c in self.cursors]
        )  # not an hour later

    @property
    def domains(self) -> list[str]:
        return [c.domain.name for c in self.cursors]

    @property
    def vocab_size(self) -> int:
        return self.shelf.vocab_size

    def leader(self, what: str, make):
        """make() on rank 0, its result everywhere."""
        return self.agree.broadcast(agreed(self.agree, what, make if self.agree.rank == 0 else lambda: None))

    def begin(self, cursors: list[Cursor]) -> dict:
        """Agreed: admit what there is now, hold out the validation rows. {domain: {shard: content id}}"""
        names = [c.domain.name for c in cursors]
        start = self.leader("data", lambda: survey(self.shelf.source, names))
        found, revision, rows = start["found"], start["revision"], self.settings.val_rows
        agreed(self.agree, "data", lambda: [c.begin(found[c.domain.name], revision, rows) for c in cursors])
        self.admit(start)
        return found

    def describe(self, found: dict):
        """Log what was found, and how often the run will see it where the number of tokens is known."""
        total = self.settings.steps * self.settings.tokens_per_step
        known = (self.metadata or {}).get("domains")
        for domain, weight in zip((c.domain for c in self.cursors), self.weights, strict=True):
            about = known.get(domain.name) if isinstance(known, dict) else None
            text = f"data: {domain.name}: {len(found[domain.name])} shards"
            if isinstance(about, dict) and about.get("tokens"):
                share, tokens = total * weight / sum(self.weights), about["tokens"]
                text += f", {tokens / 1e6:.2f} M tokens; this run reads {share / 1e6:.2f} M: {share / tokens:.2f} epochs"
            self.shelf.log(text + f"; {domain.held()} rows held out")

    # --- batches -------------------------------------------------------------------------------------------
    def next_batch(self, n: int) -> Batch:
        """This rank's rows [r*n/W, (r+1)*n/W) of the next n samples of the run. If it raises, nothing was drawn."""
        rank, world = self.agree.rank, self.agree.world
        if n < 1 or n % world:
            raise DataError(f"a batch of {n} sequences is not a multiple of {world} ranks")
        self.before = self.place()
        try:
            return self.draw(n, rank * n // world, (rank + 1) * n // world)
        except BaseException:
            self.rewind(self.before)
            raise

    def attempt(self, n: int) -> tuple[Batch | None, Exception | None]:
        """next_batch(n), or the problem: it is agreed on before any rank enters a collective."""
        try:
            return self.next_batch(n), None
        except (DataError, OSError) as e:
            return None, e

    @way_past()
    def draw(self, n: int, low: int, high: int) -> Batch:
        """Rows [low, high) of the next n samples of the run."""
        T = self.shelf.T
        x, y = np.empty((high - low, T), np.int64), np.empty((high - low, T), np.int64)
        domain = np.empty(high - low, np.int64)
        for i in range(n):
            d = self.pattern[(self.g + i) % len(self.pattern)]
            shard, sample, trained = self.cursors[d].next()
            if low <= i < high:
                shard.read(sample, x[i - low], y[i - low])
                if sample + 1 == trained < shard.n and shard.start(sample) + T == shard.start(trained):
                    y[i - low, -1] = -1  # the next token is the first that is held out
                domain[i - low] = d
        ids = list(range(self.g + low, self.g + high))
        self.g += n
        return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(domain), ids)

    def place(self) -> tuple:
        """Where the stream stands, for `rewind`."""
        return self.g, [(c.epoch, c.shard, c.pos) for c in self.cursors]

    def rewind(self, before: tuple):
        self.g, places = before
        for cursor, place in zip(self.cursors, places, strict=True):
            cursor.epoch, cursor.shard, cursor.pos = place

    def val_batches(self, rows_per_domain: int, batch_rows: int):
        """The held-out rows, `batch_rows` per rank and batch: the same rows at any world size, the same number of
        batches on each rank. What is missing in the last one is filled with rows that have no target."""
        held = [cursor.domain.val_rows() for cursor in self.cursors]
        rows = [(d, *h[i]) for i in range(rows_per_domain) for d, h in enumerate(held) if i < len(h)]
        for first in range(0, len(rows), batch_rows * self.agree.world):
            start = first + self.agree.rank * batch_rows
            x = np.zeros((batch_rows, self.shelf.T), np.int64)
            y, domain = np.full_like(x, -1), np.zeros(batch_rows, np.int64)
            ids = [-1] * batch_rows
            for i, (d, row_x, row_y) in enumerate(rows[start : start + batch_rows]):
                x[i], y[i], domain[i], ids[i] = row_x, row_y, d, start + i
            yield Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(domain), ids)

    # --- new shards, counts --------------------------------------------------------------------------------
    def refresh(self, step: int) -> dict:
        """Agreed, at the end of every step: admit the shards that have appeared. {domain: new names}"""
        listed = self.news.due(step)
        return self.admit(listed) if listed else {}

    def admit(self, listed: dict) -> dict:
        found, added = listed["found"], {}
        for cursor in (c for c in self.cursors if c.domain.name in found):
            name = cursor.domain.name
            added[name] = cursor.domain.admit(found[name], listed["revision"], cursor.epoch)
        return {name: new for name, new in added.items() if new}

    def epochs(self) -> dict:
        return {c.domain.name: c.epochs() for c in self.cursors}

    def wasted(self) -> int:
        """Tokens that fill no sample, in the shards opened so far."""
        return sum(self.shelf.wasted.values())

    # --- state ---------------------------------------------------------------------------------------------
    def identity(self) -> dict:
        """What fixes the order of the samples, apart from the shards."""
        return {
            "version": STATE_VERSION, "seed": self.settings.seed, "seq_len": self.shelf.T,
            "vocab_size": self.vocab_size, "weights": list(self.weights),
        }  # fmt: skip

    def state(self) -> dict:
        """JSON: the same on every rank. Grows with the number of admitted shards (100 to 160 bytes each)."""
        domains = {c.domain.name: c.state() for c in self.cursors}
        state = self.identity() | {"samples": self.g, "domains": domains}
        return state | {"digest": state_digest(state)}

    def load_state(self, state: dict):
        """Agreed: go on where `state` was taken, on any number of ranks. DataError if it is another run's order."""
        allow = self.settings.allow_change

        def load():
            check_state(state, self.identity(), self.domains, allow)
            for cursor in self.cursors:
                cursor.load_state(state["domains"].get(cursor.domain.name, {}), allow)
            self.g = state["samples"]

        agreed(self.agree, "data state", load)
        begins = [c for c in self.cursors if not c.domain.admitted or "data" in allow]
        if begins:
            self.begin(begins)


def check_state(state: dict, now: dict, domains: list[str], allow):
    """DataError unless `state` is whole and of this run: `now` is the stream's identity."""
    try:
        whole = state["digest"] == state_digest({k: v for k, v in state.items() if k != "digest"})
        version = state["version"]
    except (KeyError, TypeError, AttributeError):
        raise DataError("the checkpoint's data state is not one of Nova's") from None
    if version != STATE_VERSION:
        raise DataError(f"the checkpoint's data state has version {version}, this code reads {STATE_VERSION}")
    if not whole:
        raise DataError("the checkpoint's data state was edited or damaged: use another checkpoint")
    for key, name in (("seed", "seed"), ("seq_len", "max_len"), ("vocab_size", "vocab_size")):
        if state[key] != now[key]:
            raise DataError(
                f"the checkpoint's data was read with {name}={state[key]}, this run has {now[key]}: the order would "
                "differ; set it back, or start a new run"
            )
    for name, was, present, allowed in (
        ("domains", list(state["domains"]), domains, {"domains"}),
        ("domain_weights", state["weights"], now["weights"], {"domains", "domain_weights"}),
    ):
        if was != present and not allowed & set(allow):
            raise DataError(
                f"the checkpoint has {name} {was}, this run {present}: set them back, or allow it with "
                f"--allow_change={name}"
            )


class News:
    """New shards: rank 0 lists them behind the training, begun a tenth of an interval early; every `every` steps all
    ranks learn what it found."""

    def __init__(self, source, domains: list[str], every: int, agree, log):
        self.source, self.domains, self.every, self.agree, self.log = source, domains, every, agree, log
        self.listing = self.found = self.problem = None

    def look(self):
        self.found = self.problem = None
        try:
            if hasattr(self.source, "pin"):
                self.source.pin()
            self.found = survey(self.source, self.domains)
        except Exception as e:
            self.problem = e

    def due(self, step: int) -> dict | None:
        """Agreed: what `survey` found, at every `every`-th step; None at others, or where the listing failed."""
        if not self.every or step <= 0:
            return None
        early = -step % self.every <= max(1, self.every // 10)
        if self.agree.rank == 0 and self.listing is None and early:
            self.listing = threading.Thread(target=self.look, daemon=True, name="listing")
            self.listing.start()
        if step % self.every:
            return None
        found = self.collect() if self.agree.rank == 0 else None
        return self.agree.broadcast({"found": found})["found"]

    def collect(self) -> dict | None:
        self.listing.join(LISTING_WAIT)
        if self.listing.is_alive():
            found, problem = None, f"not finished after {LISTING_WAIT:.0f} s, looked at again later"
        else:
            found, problem, self.listing = self.found, self.problem, None
        if problem:
            self.log(f"data: listing failed, the known shards are kept: {problem}")
        return found


def state_digest(state: dict) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def open_stream(settings, agree, log=print, state: dict | None = None) -> Stream:
    """The stream of settings.data: "python", a folder, or a Hub dataset repo. With the `state` of a checkpoint at hand
    nothing is listed: what was admitted then is what is read."""
    return Stream(open_source(settings, agree, log), settings, agree, log, state)


def open_source(settings, agree, log):
    """Agreed: the source that settings.data names: "python", a folder, or a Hub dataset repo."""
    where, cache = settings.data, os.path.expanduser(settings.cache_dir)
    if where is None:
        raise settings.error("data", 'say where the text is: "python", a folder, or a Hub dataset repo')
    if where == "python":
        from text import corpus

        return FolderSource(corpus.python_corpus(cache, agree, log))
    folder = os.path.expanduser(where)
    if os.path.isdir(folder):
        return FolderSource(folder)
    if os.path.exists(folder):
        raise DataError(f"data={where!r}: is a file: name the folder that holds data/ and metadata.json")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", where):
        raise DataError(
            f"data={where!r}: no such folder, and not the name of a Hub dataset repo (owner/name)"
        )
    import hub

    def connect(revision):
        return hub.HubSource(where, cache, revision, settings.cache_gb, settings.hub_patience, log)

    def first() -> tuple:
        source = connect(settings.data_revision)
        return source, source.revision

    source, revision = agreed(agree, "data", first if agree.rank == 0 else lambda: None) or (None, None)
    revision = agree.broadcast(revision)  # the branch may move between two looks
    return source or connect(revision)


def bigram_baseline(stream: Stream, tokens: float = 4e6, rows_per_domain: int = 64) -> float:
    """Loss, nats per token, of an add-one-smoothed bigram table on the held-out rows: what a model must beat to have
    learnt more than pairs. Counted on about `tokens` training tokens; the stream is left where it was."""
    V, T = stream.vocab_size, stream.shelf.T
    if V > 4096:
        raise DataError(f"a bigram table of {V} x {V} is too large: the baseline is for byte vocabularies")
    counts = np.ones((V, V))
    before = stream.place()
    for _ in range(max(1, math.ceil(tokens / (64 * T)))):
        batch = stream.draw(64, 0, 64)
        x, y = batch.x.numpy().ravel(), batch.y.numpy().ravel()
        counts += np.bincount((x * V + y)[y >= 0], minlength=V * V).reshape(V, V)
    stream.rewind(before)
    nats, n = 0.0, 0
    for cursor in stream.cursors:
        for x, y in cursor.domain.val_rows()[:rows_per_domain]:
            x, y = x[y >= 0], y[y >= 0]
            nats -= np.log(counts[x, y] / counts.sum(1)[x]).sum()
            n += len(y)
    return float(nats / n)


if __name__ == "__main__":
    from text import pack

    sys.exit(pack.main(sys.argv[1:]))
