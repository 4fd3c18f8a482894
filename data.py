"""Shards of token ids -> batches, exactly: every row once per epoch, in one order on any number of ranks.

The one idea: **sample g of the run is a pure function of (seed, admitted shards, g)**. Every rank walks the same cursor,
a handful of integers, and reads only its own slice of the next n samples. Hence the same global sequence at any
world size, exact domain weights, and a resume that is exact to the row, also on another number of ranks.

    data/<domain>/*.npy      1-D or 2-D integer arrays in C order, in a folder or a Hub dataset repo of this layout
    metadata.json            vocab_size, tokenizer ("bytes", "tokenizer.json"), eot: the end-of-document id

Reading is `pread` in the training process: no workers, no shuffle buffer, no mmap (whose pages count as memory of the
process, and whose file must not shrink). Shards named val* are held out whole; without any, the last rows of the
first shards are. Every bad input is a `DataError` that names the file, the row, the value and the cure.

    python data.py pack OUT code='src/**/*.py' general=notes.jsonl      text -> shards (pack.py)
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
    FolderSource,
    Shard,
    Tokenizer,  # noqa: F401 (others import it from here)
    check_domains,
    check_kind,
    check_metadata,
    check_name,
    check_weights,
    is_val,
    label,
    open_tokenizer,
    permutation,
    survey,
    way_past,
    weighted_pattern,
    whereabouts,
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
        if torch.device(device).type != "cuda":
            return dataclasses.replace(self, **{k: getattr(self, k).to(device) for k in ("x", "y", "domain")})
        move = {k: getattr(self, k).pin_memory().to(device, non_blocking=True) for k in ("x", "y", "domain")}
        return dataclasses.replace(self, **move)

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


# --- the stream --------------------------------------------------------------------------------------------------


class Domain:
    """Cursor of one domain: epoch -> order of the shards -> permutation of the samples in a shard."""

    def __init__(self, stream: "Stream", name: str):
        self.stream, self.name = stream, name
        self.admitted = []  # [epoch, revision, [[shard name, content id], …]] in order of admission
        self.val = []  # [shard name, content id, revision, first sample, samples] held out for good
        self.epoch = self.shard = self.pos = 0
        self.held, self.rows, self.ready, self.opened, self.fetched = {}, None, None, {}, set()

    def changed(self):
        """Forget what was computed from `admitted` and `val`."""
        self.where = {n: (revision, id) for _, revision, group in self.admitted for n, id in group}
        self.held = {n: first for n, _, _, first, _ in self.val if n in self.where}
        self.order_of, self.ready, self.rows = {}, None, None

    def order(self, epoch: int) -> list[str]:
        """The shards of an epoch: what was admitted before it, mixed; then, in order, what came during it."""
        if epoch not in self.order_of:
            key = (self.stream.seed, self.name, epoch)
            old = sorted(n for e, _, group in self.admitted if e < epoch for n, _ in group)
            names = [old[i] for i in permutation(len(old), *key)]
            for j, (e, _, group) in enumerate(self.admitted):
                if e == epoch:
                    new = sorted(n for n, _ in group)
                    names += [new[i] for i in permutation(len(new), *key, j)]
            self.order_of = {k: v for k, v in self.order_of.items() if k >= epoch - 1} | {epoch: names}
        return self.order_of[epoch]

    def open(self, name: str) -> Shard:
        if name not in self.opened:
            revision, id = self.where[name]
            self.opened[name] = self.stream.open_shard(name, revision, id)
        return self.opened[name]

    def seek(self):
        """Open the shard at (epoch, shard), roll over where it is used up, and have the next one fetched."""
        while True:
            names = self.order(self.epoch)
            if self.shard >= len(names):
                self.epoch, self.shard, self.pos = self.epoch + 1, 0, 0
                continue
            name = names[self.shard]
            shard = self.open(name)
            n = self.held.get(name, shard.n)
            if self.pos < n:
                break
            self.shard, self.pos = self.shard + 1, 0
        order = permutation(n, self.stream.seed, self.name, self.epoch, name)
        self.ready = (self.epoch, self.shard, shard, order)
        following = names[self.shard + 1 : self.shard + 2] or self.order(self.epoch + 1)[:1]
        self.opened = {name: shard}
        for other in self.fetched - {name, *following}:
            self.stream.source.release(other)
        self.fetched = {name, *following}
        if following != [name]:
            self.stream.prefetch(following[0], *self.where[following[0]])

    def next(self) -> tuple[Shard, int, int]:
        """The next sample: (shard, sample in it, number of samples in it that are trained on)."""
        ready = self.ready
        if ready is None or self.pos >= len(ready[3]) or ready[0] != self.epoch or ready[1] != self.shard:
            self.seek()
            ready = self.ready
        self.pos += 1
        return ready[2], int(ready[3][self.pos - 1]), len(ready[3])

    def hold_out(self, found: dict, revision, wanted: int):
        """Fix the validation rows: of the shards named val*, else the last rows of the first shards, never more than
        a tenth of one. Admit the rest."""
        named = sorted(n for n in found if is_val(n))
        train = sorted(n for n in found if not is_val(n))
        if not train:
            raise DataError(f"domain {self.name}: all its shards are named val*: nothing to train on")
        rows_of = {v[0] for v in self.val}  # after `keep`; what was trained on is never held out
        for name in named or ([] if self.admitted else train):
            if name in rows_of or sum(v[4] for v in self.val) >= wanted:
                continue
            shard = self.stream.open_shard(name, revision, found[name])
            self.stream.source.release(name)  # it stays open
            most = shard.n if named else max(shard.n // 10, min(1, shard.n - 1))
            count = min(most, wanted - sum(v[4] for v in self.val))
            if count:
                self.val.append([name, found[name], revision, 0 if named else shard.n - count, count])
        held = sum(v[4] for v in self.val)
        if not held:
            why = f"its shards hold one sample of {self.stream.T} tokens each, so none can be held out: set a smaller max_len"
            if self.admitted:
                why = (
                    "no shard with its held-out rows is left: add one named val*.npy, of rows new to this run"
                )
            raise DataError(f"domain {self.name}: {why}")
        if held < wanted:
            self.stream.log(f"data: {self.name} has only {held} of val_rows={wanted} rows to hold out")
        self.admitted = self.admitted or [[0, revision, [[n, found[n]] for n in train]]]
        self.changed()

    def keep(self, found: dict, revision):
        """Of what was admitted and held out, what the source lists now, with the content that it has now. The rest of
        the epoch stays in order: each shard is a group of its own, until the next epoch mixes them as it would have."""
        ids = {v[0]: v[1] for v in self.val} | {n: id for n, (_, id) in self.where.items()}
        now, order = whereabouts(ids, found, self.stream.log), self.order(self.epoch)
        if self.shard < len(order) and not now[order[self.shard]]:
            self.pos = 0
        self.shard = sum(now[n] is not None for n in order[: self.shard])
        self.admitted = [[self.epoch, revision, [[now[n], found[now[n]]]]] for n in order if now[n]]
        val, self.val = self.val, []
        for name, first, count in [(now[v[0]], v[3], v[4]) for v in val if now[v[0]]]:
            n = self.stream.open_shard(name, revision, found[name]).n
            self.stream.source.release(name)  # it stays open
            count = min(count, n - first)  # it became shorter: what was trained on is never held out
            if count > 0:
                self.val.append([name, found[name], revision, first, count])
        self.changed()

    @way_past()
    def val_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The held-out samples (x, y), read once. Of a whole val shard, samples spread evenly over it."""
        if self.rows is None:
            rows = []
            for name, id, revision, first, count in self.val:
                shard = self.stream.open_shard(name, revision, id)
                self.stream.source.release(name)  # it stays open
                for i in range(count):
                    x, y = np.empty(shard.T, np.int64), np.empty(shard.T, np.int64)
                    shard.read(first + i if name in self.where else i * shard.n // count, x, y)
                    rows.append((x, y))
            # evaluations that read fewer rows still see all of them spread
            self.rows = [rows[i] for i in permutation(len(rows), "validation", self.name)]
        return self.rows


class Stream:
    """The run's batches. Calls marked "agreed" are made by every rank at the same point."""

    def __init__(self, source, settings, agree, log=print, state: dict | None = None):
        self.source, self.agree, self.log = source, agree, log
        self.T, self.seed, self.refresh_every = settings.max_len, settings.seed, settings.shard_refresh_steps
        self.domains = check_domains(settings.domains)
        self.weights = check_weights(settings.domain_weights or [1] * len(self.domains), self.domains)
        self.pattern = weighted_pattern(self.weights)
        self.allow, self.g, self.dropped, self.listing = set(settings.allow_change), 0, {}, None
        self.metadata = self.leader("metadata.json", self.read_metadata)
        self.vocab_size = check_metadata(self.metadata, settings, source)
        self.tokenizer = self.agreed("tokenizer", lambda: open_tokenizer(self.metadata, source, log))
        self.cursors, self.held_rows = [Domain(self, d) for d in self.domains], settings.val_rows
        if state is None:
            self.describe(self.begin(self.cursors), settings)
        else:
            self.load_state(state)
        self.agreed("held-out rows", lambda: [c.val_rows() for c in self.cursors])  # not an hour later

    # --- agreement -----------------------------------------------------------------------------------------
    def agreed(self, what: str, make):
        """make() on every rank; if it fails anywhere, all ranks stop."""
        problem = result = None
        try:
            result = make()
        except Exception as e:
            problem = e
        self.agree.verdict(problem, what)
        return result

    def leader(self, what: str, make):
        """make() on rank 0, its result everywhere."""
        return self.agree.broadcast(self.agreed(what, make if self.agree.rank == 0 else lambda: None))

    def read_metadata(self):
        try:
            return self.source.metadata()
        except ValueError as e:
            raise e if isinstance(e, DataError) else DataError(str(e)) from None

    def begin(self, cursors: list[Domain]) -> dict:
        """Agreed: admit what there is now, hold out the validation rows. {domain: {shard: content id}}"""
        start = self.leader("data", lambda: survey(self.source, [c.name for c in cursors]))

        def hold_out():
            for cursor in cursors:
                if cursor.admitted:
                    cursor.keep(start["found"][cursor.name], start["revision"])
                cursor.hold_out(start["found"][cursor.name], start["revision"], self.held_rows)

        self.agreed("data", hold_out)
        self.admit(start)
        return start["found"]

    def describe(self, found: dict, settings):
        """Log what was found, and how often the run will see it where the number of tokens is known."""
        total = settings.steps * settings.tokens_per_step
        for cursor, weight in zip(self.cursors, self.weights, strict=True):
            known = (self.metadata or {}).get("domains")
            about = known.get(cursor.name) if isinstance(known, dict) else None
            text = f"data: {cursor.name}: {len(found[cursor.name])} shards"
            if isinstance(about, dict) and about.get("tokens"):
                share = total * weight / sum(self.weights)
                text += f", {about['tokens'] / 1e6:.2f} M tokens; this run reads {share / 1e6:.2f} M"
                text += f": {share / about['tokens']:.2f} epochs"
            self.log(text + f"; {sum(v[4] for v in cursor.val)} rows held out")

    # --- shards --------------------------------------------------------------------------------------------
    def open_shard(self, name: str, revision, id) -> Shard:
        path = self.source.fetch(name, revision, id)
        shard = Shard(path, f"{label(self.source)}/{name}", self.T, self.vocab_size)
        if shard.wasted > shard.tokens // 100 and name not in self.dropped:
            self.log(
                f"data: {shard.name}: its last {shard.wasted} of {shard.tokens} tokens fill no sample of {self.T}"
            )
        self.dropped[name] = shard.wasted
        return shard

    def prefetch(self, name: str, revision, id):
        """Have the next shard at hand before it is needed. A failure is met again, and raised, when it is."""

        def work():
            try:
                self.source.fetch(name, revision, id)
                if not any(name in c.fetched for c in self.cursors):
                    self.source.release(name)  # the stream has passed it meanwhile
            except Exception as e:
                self.log(f"data: {name} could not be fetched ahead, trying again when it is needed: {e}")

        threading.Thread(target=work, daemon=True, name=f"prefetch {name}").start()

    # --- batches -------------------------------------------------------------------------------------------
    def next_batch(self, n: int) -> Batch:
        """This rank's rows [r*n/W, (r+1)*n/W) of the next n samples of the run. If it raises, nothing was drawn."""
        world = self.agree.world
        if n < 1 or n % world:
            raise DataError(f"a batch of {n} sequences is not a multiple of {world} ranks")
        self.before = self.place()
        try:
            return self.draw(n, self.agree.rank * n // world, (self.agree.rank + 1) * n // world)
        except BaseException:
            self.rewind(self.before)
            raise

    @way_past()
    def draw(self, n: int, low: int, high: int) -> Batch:
        x, y = np.empty((high - low, self.T), np.int64), np.empty((high - low, self.T), np.int64)
        domain = np.empty(high - low, np.int64)
        for i in range(n):
            d = self.pattern[(self.g + i) % len(self.pattern)]
            shard, sample, trained = self.cursors[d].next()
            if low <= i < high:
                shard.read(sample, x[i - low], y[i - low])
                if sample + 1 == trained < shard.n and shard.start(sample) + self.T == shard.start(trained):
                    y[i - low, -1] = -1  # the next token is the first that is held out
                domain[i - low] = d
        self.g += n
        ids = list(range(self.g - n + low, self.g - n + high))
        return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(domain), ids)

    def place(self) -> tuple:
        """Where the stream stands, for `rewind`."""
        return self.g, [(c.epoch, c.shard, c.pos) for c in self.cursors]

    def rewind(self, before: tuple):
        self.g = before[0]
        for cursor, place in zip(self.cursors, before[1], strict=True):
            cursor.epoch, cursor.shard, cursor.pos = place

    def val_batches(self, rows_per_domain: int, batch_rows: int):
        """The held-out rows, `batch_rows` per rank and batch: the same rows at any world size, the same number of
        batches on each rank. What is missing in the last one is filled with rows that have no target."""
        rows = [
            (d, *cursor.val_rows()[i])
            for i in range(rows_per_domain)
            for d, cursor in enumerate(self.cursors)
            if i < len(cursor.val_rows())
        ]
        for first in range(0, len(rows), batch_rows * self.agree.world):
            start = first + self.agree.rank * batch_rows
            x = np.zeros((batch_rows, self.T), np.int64)
            y, domain = np.full_like(x, -1), np.zeros(batch_rows, np.int64)
            ids = [-1] * batch_rows
            for i, (d, row_x, row_y) in enumerate(rows[start : start + batch_rows]):
                x[i], y[i], domain[i], ids[i] = row_x, row_y, d, start + i
            yield Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(domain), ids)

    # --- new shards ----------------------------------------------------------------------------------------
    def refresh(self, step: int) -> dict:
        """Agreed, at the end of every step. Every shard_refresh_steps all ranks admit the shards that have appeared;
        rank 0 lists them in the background, begun a tenth of an interval before. Returns {domain: new names}."""
        every = self.refresh_every
        if not every or step <= 0:
            return {}
        if self.agree.rank == 0 and self.listing is None and -step % every <= max(1, every // 10):
            self.listing = Listing(self)
        if step % every:
            return {}
        found, problem = None, None
        if self.agree.rank == 0:
            if self.listing.wait(LISTING_WAIT):
                found, problem, self.listing = self.listing.found, self.listing.problem, None
            else:
                problem = f"not finished after {LISTING_WAIT:.0f} s, looked at again later"
        if problem:
            self.log(f"data: listing failed, the known shards are kept: {problem}")
        found = self.agree.broadcast({"found": found})["found"]
        return self.admit(found) if found else {}

    def admit(self, survey: dict) -> dict:
        added = {}
        for cursor in (c for c in self.cursors if c.name in survey["found"]):
            found = survey["found"][cursor.name]
            contents = {id for _, id in cursor.where.values() if id} | {v[1] for v in cursor.val}
            new = [n for n in sorted(found) if n not in cursor.where and not is_val(n)]
            new = [n for n in new if found[n] is None or found[n] not in contents]  # a rename is not new data
            gone = [n for n in cursor.where if n not in found]
            other = [n for n in cursor.where if n in found and found[n] != cursor.where[n][1]]
            if gone or other:
                self.log(
                    f"data: {cursor.name}: of the admitted shards {len(gone)} left the source and {len(other)} were "
                    f"replaced, e.g. {(gone + other)[0]}; the run keeps to what it admitted"
                )
            if new:
                cursor.admitted.append([cursor.epoch, survey["revision"], [[n, found[n]] for n in new]])
                place = cursor.ready, cursor.rows
                cursor.changed()
                cursor.ready, cursor.rows = place
                added[cursor.name] = new
                self.log(f"data: {cursor.name}: {len(new)} new shards, e.g. {new[0]}")
        return added

    # --- counts --------------------------------------------------------------------------------------------
    def epochs(self) -> dict:
        """{domain: epochs begun, as a fraction; shards count alike, whatever their size}"""
        out = {}
        for cursor in self.cursors:
            shards = len(cursor.order(cursor.epoch)) or 1
            inside = cursor.pos / len(cursor.ready[3]) if cursor.ready else 0.0
            out[cursor.name] = cursor.epoch + min(1.0, (cursor.shard + inside) / shards)
        return out

    def wasted(self) -> int:
        """Tokens that fill no sample, in the shards opened so far."""
        return sum(self.dropped.values())

    # --- state ---------------------------------------------------------------------------------------------
    def state(self) -> dict:
        """JSON: the same on every rank. Grows with the number of admitted shards (100 to 160 bytes each)."""
        state = {
            "version": STATE_VERSION, "seed": self.seed, "seq_len": self.T, "vocab_size": self.vocab_size,
            "weights": list(self.weights), "samples": self.g,
            "domains": {
                c.name: {
                    "epoch": c.epoch, "shard": c.shard, "pos": c.pos,
                    "admitted": json.loads(json.dumps(c.admitted)), "val": json.loads(json.dumps(c.val)),
                }
                for c in self.cursors
            },
        }  # fmt: skip
        return state | {"digest": state_digest(state)}

    def load_state(self, state: dict):
        """Agreed: go on where `state` was taken, on any number of ranks. DataError if it is another run's order."""
        self.agreed("data state", lambda: self.take_state(state))
        begins = [c for c in self.cursors if not c.admitted or "data" in self.allow]
        if begins:
            self.begin(begins)

    def take_state(self, state: dict):
        try:
            whole = state["digest"] == state_digest({k: v for k, v in state.items() if k != "digest"})
            version = state["version"]
        except (KeyError, TypeError, AttributeError):
            raise DataError("the checkpoint's data state is not one of Nova's") from None
        if version != STATE_VERSION:
            raise DataError(
                f"the checkpoint's data state has version {version}, this code reads {STATE_VERSION}"
            )
        if not whole:
            raise DataError("the checkpoint's data state was edited or damaged: use another checkpoint")
        for key, name, now in (
            ("seed", "seed", self.seed),
            ("seq_len", "max_len", self.T),
            ("vocab_size", "vocab_size", self.vocab_size),
        ):
            if state[key] != now:
                raise DataError(
                    f"the checkpoint's data was read with {name}={state[key]}, this run has {now}: the order would "
                    "differ; set it back, or start a new run"
                )
        saved = state["domains"]
        if list(saved) != self.domains and "domains" not in self.allow:
            raise DataError(
                f"the checkpoint has domains {list(saved)}, this run {self.domains}: set them back, or allow it with "
                "--allow_change=domains"
            )
        if state["weights"] != self.weights and not self.allow & {"domains", "domain_weights"}:
            raise DataError(
                f"the checkpoint has domain_weights {state['weights']}, this run {self.weights}: set them back, or "
                "allow it with --allow_change=domain_weights"
            )
        for cursor in self.cursors:
            if cursor.name not in saved:
                cursor.admitted, cursor.val = [], []  # a domain that was added: begins now
                cursor.epoch = cursor.shard = cursor.pos = 0
                continue
            place = saved[cursor.name]
            check_kind(place["admitted"][0][1], self.source, self.allow)
            for name in [n for _, _, group in place["admitted"] for n, _ in group] + [
                v[0] for v in place["val"]
            ]:
                check_name(name, cursor.name)
            cursor.epoch, cursor.shard = place["epoch"], place["shard"]
            cursor.pos = place["pos"]
            cursor.admitted, cursor.val = (json.loads(json.dumps(place[k])) for k in ("admitted", "val"))
            cursor.opened = {}
            cursor.changed()
        self.g = state["samples"]


class Listing(threading.Thread):
    """One look at the source, behind the training."""

    def __init__(self, stream: Stream):
        super().__init__(daemon=True, name="listing")
        self.stream, self.found, self.problem = stream, None, None
        self.start()

    def run(self):
        try:
            if hasattr(self.stream.source, "pin"):
                self.stream.source.pin()
            self.found = survey(self.stream.source, self.stream.domains)
        except Exception as e:
            self.problem = e

    def wait(self, seconds: float) -> bool:
        self.join(seconds)
        return not self.is_alive()


def state_digest(state: dict) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def open_stream(settings, agree, log=print, state: dict | None = None) -> Stream:
    """The stream of settings.data: "python", a folder, or a Hub dataset repo. With the `state` of a checkpoint at hand
    nothing is listed: what was admitted then is what is read."""
    return Stream(open_source(settings, agree, log), settings, agree, log, state)


def open_source(settings, agree, log):
    where = settings.data
    if where is None:
        raise settings.error("data", 'say where the text is: "python", a folder, or a Hub dataset repo')
    folder = os.path.expanduser(where)
    if where == "python":
        from text import corpus

        return FolderSource(corpus.python_corpus(os.path.expanduser(settings.cache_dir), agree, log))
    if os.path.isdir(folder):
        return FolderSource(folder)
    if os.path.exists(folder):
        raise DataError(f"data={where!r}: is a file: name the folder that holds data/ and metadata.json")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", where):
        raise DataError(
            f"data={where!r}: no such folder, and not the name of a Hub dataset repo (owner/name)"
        )
    import hub

    def make(revision):
        cache = os.path.expanduser(settings.cache_dir)
        return hub.HubSource(where, cache, revision, settings.cache_gb, settings.hub_patience, log)

    problem = source = None
    try:
        source = make(settings.data_revision) if agree.rank == 0 else None
        revision = source.revision if source else None
    except Exception as e:
        problem = e
    agree.verdict(problem, "data")
    revision = agree.broadcast(None if source is None else revision)  # the branch may move between two looks
    return source or make(revision)


def bigram_baseline(stream: Stream, tokens: float = 4e6, rows_per_domain: int = 64) -> float:
    """Loss, nats per token, of an add-one-smoothed bigram table on the held-out rows: what a model must beat to have
    learnt more than pairs. Counted on about `tokens` training tokens; the stream is left where it was."""
    V = stream.vocab_size
    if V > 4096:
        raise DataError(f"a bigram table of {V} x {V} is too large: the baseline is for byte vocabularies")
    counts = np.ones((V, V))
    before = stream.place()
    for _ in range(max(1, math.ceil(tokens / (64 * stream.T)))):
        batch = stream.draw(64, 0, 64)
        x, y = batch.x.numpy().ravel(), batch.y.numpy().ravel()
        counts += np.bincount((x * V + y)[y >= 0], minlength=V * V).reshape(V, V)
    stream.rewind(before)
    nats, n = 0.0, 0
    for cursor in stream.cursors:
        for x, y in cursor.val_rows()[:rows_per_domain]:
            x, y = x[y >= 0], y[y >= 0]
            nats -= np.log(counts[x, y] / counts.sum(1)[x]).sum()
            n += len(y)
    return float(nats / n)


if __name__ == "__main__":
    from text import pack

    sys.exit(pack.main(sys.argv[1:]))
