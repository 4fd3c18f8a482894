"""Checkpoints go to the Hub behind the run: a queue and a thread on rank 0, which training never waits for.

And at a start the other way: which run is there, what of it is newer than what is here, the download. The client and
its retries are in hub/; the publisher is handed in.
"""

import json
import os
import re
import shutil
import threading
import time

from .folder import ROTATED, SLACK, by_serial
from .sealed import NAME, CheckpointError, read_manifest, sync, to_json, verify, write_text

KEPT = ("milestone", "final")  # kinds of which each one goes to the Hub
PATIENCE = 120.0  # seconds that a stage gets beyond the last word that a transfer goes on


def patiently(function, agree, stop=lambda: False, stopped=None):
    """Rank 0 runs `function` in a thread, the others hear every second that it still does; its value, everywhere.

    A download may take longer than any collective or stage is allowed to. Once stop() is true on any rank, the Event
    `stopped` is set, by which `function` knows that it should end: so all ranks leave together."""
    box = {}

    def work():
        try:
            box["value"] = function()
        except Exception as e:
            box["error"] = e

    thread = threading.Thread(target=work, daemon=True)
    if agree.rank == 0:
        thread.start()
        thread.join(1.0)
    while agree.broadcast(thread.is_alive()):
        agree.busy(PATIENCE)
        if any(agree.gather(bool(stop()))) and stopped:
            stopped.set()
        if agree.rank == 0:
            thread.join(1.0)
    agree.verdict(box.get("error"), "checkpoint")
    return agree.broadcast(box.get("value", False))


def owner_on_hub(publisher, stem: str, log) -> str | None:
    """The youngest run on the Hub that had a folder of this name, or None."""
    paths = publisher.list("")
    if pickles := sorted(p for p in paths if p.endswith(".model.pt")):
        log(f"pickles in the Hub repo are not supported, and never fetched or touched: {pickles[0]} …")
    folders = {path.split("/")[0] for path in paths if path.endswith("/manifest.json")}
    runs = sorted(m[0] for f in folders if (m := re.fullmatch(r"(\w+)-\d{8}-\d{6}-[0-9a-f]{4}", f)))
    mine = [r for r in runs if r.rsplit("-", 3)[0] == stem]
    if mine:
        older = f" (older ones there: {', '.join(mine[:-1])})" if mine[1:] else ""
        log(f"nothing local: going on with run {mine[-1]} of the Hub; --resume=never starts another{older}")
        return mine[-1]
    if runs:  # another name of out_dir is all that parts this start from them
        there, cure = ", ".join(runs), f"--out_dir=…/{runs[-1].rsplit('-', 3)[0]}"
        log(f"a fresh start; the Hub repo also holds run {there}: to go on, give its out_dir, e.g. {cure}")
    return None


def check_write(publisher, folder: str, resume: str, log):
    """Prove that the run may publish. A Hub that can't be reached stops no run that has checkpoints here: uploads wait."""
    try:
        publisher.check_write()
    except OSError as e:
        here = os.path.isdir(folder) and by_serial(os.listdir(folder))
        if resume == "never" or not here or getattr(e, "final", True):
            raise
        log(f"{e}. Going on all the same; uploads are tried again as the run goes")


class OnHub:
    """What the Hub holds of a run. Receipts are kept in published.json, so that a restart knows what is where."""

    def __init__(self, folder, publisher):
        self.folder, self.publisher, self.log = folder, publisher, folder.log
        self.record = os.path.join(folder.path, "published.json")
        try:
            with open(self.record, encoding="utf-8") as f:
                self.receipts = json.load(f)  # {prefix in the repo: receipt}
        except (OSError, ValueError):
            self.receipts = {}  # at worst something is uploaded twice
        self.known = None  # names of checkpoints that this process has seen there, or sent

    def prefix(self, name: str) -> str:
        return f"{self.folder.run_id}/{name}"

    def has(self, name: str) -> bool:
        """Whether this machine has sent the checkpoint."""
        return self.prefix(name) in self.receipts

    def names(self) -> list[str]:
        """The run's checkpoints on the Hub that have a manifest, oldest first."""
        found = self.publisher.list(self.folder.run_id)
        return by_serial(path.split("/")[1] for path in found if path.endswith("/manifest.json"))

    def fetch(self, name: str):
        """Download a checkpoint into the folder, where it appears once it is proven; CheckpointError where it is damaged."""
        run = self.folder.run_id
        temporary = os.path.join(self.folder.path, f".tmp-{run}+{name}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            self.publisher.download(self.prefix(name), temporary)
            manifest = verify(temporary)
            if (manifest["run_id"], manifest["name"]) != (run, name):
                raise CheckpointError(f"{name} on the Hub is {manifest['name']} of run {manifest['run_id']}")
        except CheckpointError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        os.rename(temporary, os.path.join(self.folder.path, name))
        sync(self.folder.path)

    def send(self, prefix: str, folder: str, kind: str):
        """Upload a sealed folder, see that the Hub has what its manifest says, note the receipt, then rotate there."""
        mine = set(self.names())
        if self.known is not None and (foreign := sorted(mine - self.known)):
            raise CheckpointError(
                f"another process publishes run {self.folder.run_id} too: stop it ({foreign})"
            )
        self.known = mine | {prefix.rpartition("/")[2]}  # a failed attempt may have got there all the same
        manifest = read_manifest(folder)
        receipt = self.publisher.upload(folder, prefix)
        there = self.publisher.list(prefix)
        for name, entry in manifest["files"].items():
            size, digest = there.get(f"{prefix}/{name}" if prefix else name, (None, None))
            # small files have git's id instead of a sha256
            known = isinstance(digest, str) and len(digest) == 64
            if size != entry["size"] or (known and digest != entry["sha256"]):
                raise CheckpointError(f"{name} on the Hub differs from {folder}: size {size}, id {digest}")
        if kind in ROTATED:
            for stale in [n for n in self.names() if NAME.fullmatch(n)[2] == kind][: -self.folder.keep]:
                try:
                    self.publisher.delete(self.prefix(stale))
                except OSError as e:
                    self.log(f"{stale} could not be deleted on the Hub: {e}")
        self.receipts[prefix] = receipt
        try:
            write_text(self.record, to_json(self.receipts, "published.json"))
        except (OSError, CheckpointError) as e:
            self.log(f"{self.record}: {e}")


class Uploads:
    """Rank 0's queue to the Hub: a thread that uploads finished folders one at a time, behind the run.

    Retries within an upload are the publisher's; what still fails stays in the queue and is tried again later. A
    newer `latest`, `best` or export takes the place of an older one that waits; milestones and `final` wait for good."""

    RETRY = 60.0, 900.0  # seconds until a failed upload is tried again: first, and at most

    def __init__(self, hub: OnHub):
        self.hub, self.log = hub, hub.log
        self.pending: dict[str, tuple[str, str]] = {}  # {prefix in the repo: (folder, kind)}, in their order
        self.active, self.failures, self.deadline = None, 0, None
        self.refused: set[str] = set()  # prefixes whose last attempt met a "no" that waiting does not change
        self.seconds: float | None = None  # that the latest checkpoint took to get there
        self.changed, self.thread = threading.Condition(), None

    def take_up(self, names: list[str]):
        """Queue what an earlier launch did not get done."""
        mine = self.hub.folder.mine()
        for name in names:
            if name in mine and not self.hub.has(name):
                self.put(name, mine[name]["kind"])

    def put(self, name: str, kind: str):
        """Queue a checkpoint of this run."""
        self.put_folder(self.hub.prefix(name), os.path.join(self.hub.folder.path, name), kind)

    def put_folder(self, prefix: str, folder: str, kind: str):
        """Queue a sealed folder, to lie below `prefix` ("" is the repo's root)."""
        with self.changed:
            if kind not in KEPT:
                self.pending = {p: v for p, v in self.pending.items() if v[1] != kind or p == self.active}
            self.pending.pop(prefix, None)
            self.pending[prefix] = folder, kind
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def may_delete(self, name: str, onwards: list[str]) -> bool:
        """Whether rotation may delete a local checkpoint. `onwards`: it and all younger ones of its kind."""
        if self.active == self.hub.prefix(name):
            return False
        if any(map(self.hub.has, onwards)):
            return True  # it, or a younger one that does its service, is safely on the Hub
        enough = self.hub.folder.keep + SLACK
        if len(onwards) > enough:
            self.log(f"deleting {name} although the Hub has no copy: {enough} younger ones wait to go there")
        return len(onwards) > enough

    def _work(self):
        pause = self.RETRY[0]
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.pending or self.deadline is not None)
                if not self.pending:
                    return
                prefix, (folder, kind) = next(iter(self.pending.items()))
                self.active = prefix
            began = time.monotonic()
            try:
                self.hub.send(prefix, folder, kind)
            except Exception as e:
                with self.changed:
                    if not self._failed(prefix, folder, kind, e, pause):
                        return
                pause = min(2 * pause, self.RETRY[1])
                continue
            pause, seconds = self.RETRY[0], time.monotonic() - began
            self.log(f"{prefix or 'export'} is on the Hub, verified ({seconds:.0f} s)")
            if prefix:
                self.seconds = seconds
            with self.changed:
                self.active = None
                self.pending.pop(prefix, None)
                self.changed.notify_all()

    def _failed(self, prefix: str, folder: str, kind: str, error: Exception, pause: float) -> bool:
        """Put the folder back in the queue and wait; whether to go on."""
        self.active = None
        self.pending.pop(prefix, None)
        if not os.path.isdir(folder):  # rotated away meanwhile
            return True
        self.failures += 1
        what = f"{prefix or 'export'}: {type(error).__name__}"
        self.log(f"UPLOAD FAILED, number {self.failures}: {what}: {error}")
        # behind the others; not at all if a newer one of its kind waits
        if kind in KEPT or kind not in [k for _, k in self.pending.values()]:
            self.pending[prefix] = folder, kind
        final, left = getattr(error, "final", False), pause
        (self.refused.add if final else self.refused.discard)(prefix)
        if self.deadline is not None:
            left = self.deadline - time.monotonic()
            if left < 0 or self.refused.issuperset(self.pending):
                self.changed.notify_all()
                return False
            if final:
                return True  # the others have their turn at once: what is refused too ends the wait
        self.changed.wait(max(0.0, min(pause, left)))
        return True

    def close(self, timeout: float, stop=lambda: False) -> list[str]:
        """Give the queue `timeout` seconds, fewer once stop() is true or a whole pass was refused; what is not on the Hub."""
        end = time.monotonic() + timeout
        with self.changed:
            self.deadline = end
            self.refused.clear()  # a "no" of hours ago may be a "yes" now: each has one more attempt
            # the newest goes first: what the next machine goes on from
            if checkpoints := by_serial(p.rpartition("/")[2] for p in self.pending):
                newest = self.hub.prefix(checkpoints[-1])
                self.pending = {newest: self.pending[newest], **self.pending}
            self.changed.notify_all()
            while self.pending and time.monotonic() < end and self.thread.is_alive() and not stop():
                self.changed.wait(max(0.0, min(1.0, end - time.monotonic())))
            return [prefix or "export" for prefix in self.pending]
