"""What a run takes from a source: shards opened as samples, and of each domain the admitted shards and held-out rows.

Admitted once, a shard stays the run's, with the content and the Hub commit of its admission, until --allow_change=data.
What was trained on is never held out, and what is held out is never trained on.
"""

import json

import numpy as np

from .shards import DataError, Shard, permutation, way_past
from .source import check_name, is_val, label


class Shelf:
    """Opens the shards of a source as samples of T tokens."""

    def __init__(self, source, T: int, vocab_size: int, log):
        self.source, self.T, self.vocab_size, self.log = source, T, vocab_size, log
        self.wasted = {}  # shard -> its tokens that fill no sample

    def open(self, name: str, revision, id) -> Shard:
        path = self.source.fetch(name, revision, id)
        shard = Shard(path, f"{label(self.source)}/{name}", self.T, self.vocab_size)
        if shard.wasted > shard.tokens // 100 and name not in self.wasted:
            self.log(
                f"data: {shard.name}: its last {shard.wasted} of {shard.tokens} tokens fill no sample of {self.T}"
            )
        self.wasted[name] = shard.wasted
        return shard

    def borrow(self, name: str, revision, id) -> Shard:
        """Open a shard whose file may leave the cache meanwhile: it stays open."""
        shard = self.open(name, revision, id)
        self.source.release(name)
        return shard


class Domain:
    def __init__(self, name: str, shelf: Shelf):
        self.name, self.shelf = name, shelf
        self.admitted = []  # [epoch, revision, [[shard name, content id], …]] in order of admission
        self.val = []  # [shard name, content id, revision, first sample, samples] held out for good
        self.rows = None

    def where(self) -> dict:
        """{name: (revision, content id)} of the admitted shards."""
        return {n: (revision, id) for _, revision, group in self.admitted for n, id in group}

    def trained(self, shard: Shard, name: str) -> int:
        """How many samples of a shard are trained on: those before the held-out ones."""
        return next((first for n, _, _, first, _ in self.val if n == name), shard.n)

    def held(self) -> int:
        return sum(v[4] for v in self.val)

    def hold_out(self, found: dict, revision, wanted: int):
        """Fix the validation rows: of the shards named val*, else the last rows of the first shards, never more than
        a tenth of one. Admit the rest."""
        named = sorted(n for n in found if is_val(n))
        train = sorted(n for n in found if not is_val(n))
        if not train:
            raise DataError(
                f"domain {self.name}: all its shards are named val*, e.g. {named[0]}: nothing to train on"
            )
        known = {v[0] for v in self.val}  # after `keep`; what was trained on is never held out
        for name in named or ([] if self.admitted else train):
            if name in known or self.held() >= wanted:
                continue
            shard = self.shelf.borrow(name, revision, found[name])
            most = shard.n if named else max(shard.n // 10, min(1, shard.n - 1))
            count = min(most, wanted - self.held())
            if count:
                self.val.append([name, found[name], revision, 0 if named else shard.n - count, count])
        if not self.val:
            why = f"its shards, e.g. {train[0]}, hold one sample of {self.shelf.T} tokens each, so none can be held out: "
            why += "set a smaller max_len"
            if self.admitted:
                why = f"no shard with its held-out rows is left beside {train[0]}: "
                why += "add one named val*.npy, of rows new to this run"
            raise DataError(f"domain {self.name}: {why}")
        if self.held() < wanted:
            self.shelf.log(f"data: {self.name} has only {self.held()} of val_rows={wanted} rows to hold out")
        self.admitted = self.admitted or [[0, revision, [[n, found[n]] for n in train]]]
        self.rows = None

    def admit(self, found: dict, revision, epoch: int) -> list[str]:
        """The shards that are new to the run, admitted; what was admitted before stays as it is."""
        where, log = self.where(), self.shelf.log
        contents = {id for _, id in where.values() if id} | {v[1] for v in self.val}
        new = [n for n in sorted(found) if n not in where and not is_val(n)]
        new = [n for n in new if found[n] is None or found[n] not in contents]  # a rename is not new data
        gone = [n for n in where if n not in found]
        other = [n for n in where if n in found and found[n] != where[n][1]]
        if gone or other:
            log(
                f"data: {self.name}: of the admitted shards {len(gone)} left the source and {len(other)} were "
                f"replaced, e.g. {(gone + other)[0]}; the run keeps to what it admitted"
            )
        if new:
            self.admitted.append([epoch, revision, [[n, found[n]] for n in new]])
            log(f"data: {self.name}: {len(new)} new shards, e.g. {new[0]}")
        return new

    def keep(self, found: dict, revision, epoch: int, order: list[str]) -> dict:
        """Of what was admitted and held out, what the source lists now, with the content that it has now. The running
        epoch stays in `order`: each shard is a group of its own, until the next epoch mixes them as it would have.
        Returns {name: its name now, None if it is gone}."""
        ids = {v[0]: v[1] for v in self.val} | {n: id for n, (_, id) in self.where().items()}
        now = whereabouts(ids, found, self.shelf.log)
        self.admitted = [[epoch, revision, [[now[n], found[now[n]]]]] for n in order if now[n]]
        val, self.val, self.rows = self.val, [], None
        for name, first, count in [(now[v[0]], v[3], v[4]) for v in val if now[v[0]]]:
            shard = self.shelf.borrow(name, revision, found[name])
            count = min(count, shard.n - first)  # it became shorter: what was trained on is never held out
            if count > 0:
                self.val.append([name, found[name], revision, first, count])
        return now

    @way_past()
    def val_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The held-out samples (x, y), read once. Of a whole val shard, samples spread evenly over it."""
        if self.rows is None:
            rows, where = [], self.where()
            for name, id, revision, first, count in self.val:
                shard = self.shelf.borrow(name, revision, id)
                for i in range(count):
                    x, y = np.empty(shard.T, np.int64), np.empty(shard.T, np.int64)
                    shard.read(first + i if name in where else i * shard.n // count, x, y)
                    rows.append((x, y))
            # evaluations that read fewer rows still see all of them spread
            self.rows = [rows[i] for i in permutation(len(rows), "validation", self.name)]
        return self.rows

    def state(self) -> dict:
        return json.loads(json.dumps({"admitted": self.admitted, "val": self.val}))

    def load_state(self, state: dict, allow):
        """What `state` admitted and held out, if this source can recognise it. {} is a domain that begins now."""
        admitted, val = (json.loads(json.dumps(state.get(k, []))) for k in ("admitted", "val"))
        if admitted and "data" not in allow:
            check_kind(admitted[0][1], self.shelf.source)
        for name in [n for _, _, group in admitted for n, _ in group] + [v[0] for v in val]:
            check_name(name, self.name)
        self.admitted, self.val, self.rows = admitted, val, None


def check_kind(revision: str | None, source):
    """A folder and the Hub tell contents apart by other ids: what one admitted cannot be recognised in the other."""
    was, now = ("a folder" if r is None else "a Hub repo" for r in (revision, source.revision))
    if was != now:
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
