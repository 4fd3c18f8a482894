"""Store: nothing lost, nothing unsafe, and a resumed run is the same run.

One checkpoint is one folder, the same for 1 GPU and for 64:

    step-00001000-latest-0007/                     step, kind, and the serial number of the save in its run
        tensors/rank-0000R.safetensors             what any world size can load: each rank its part, as planned by DCP
        own/rank-0000R.safetensors                 what only the same world size and layout can load (8-bit codes)
        state.json                                 everything that is not a tensor
        metrics.jsonl                              the run's rows so far, for a machine that has nothing else
        manifest.json                              run, step, parent, and size and sha256 of every file; written last

The ideas:
* No pickle: tensors travel as safetensors, all else as JSON. A file from a stranger's Hub repo can at worst be refused.
* A folder is a checkpoint only under its final name and with a manifest that fits every byte. A save works in
  `.tmp-…`, syncs files and folders to the disk, writes the manifest, then renames. A kill at any point leaves the
  previous checkpoints as they were and a temporary folder that the next start removes.
* Training waits only for the copy to host memory (the pause in the receipt). A thread on every rank writes, hashes
  and agrees over a gloo group of its own; one save is in flight at a time. The Hub is further behind, see `Uploads`.
* A failed save is logged and counted, and training goes on. A failed load stops the run: it never starts over.

References: torch.distributed.checkpoint (DCP) and its HuggingFaceStorageWriter; the safetensors format.
"""

import dataclasses
import math
import os
import shutil
import threading
import time
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from launch import proof
from schedule import HORIZON
from settings import MATH, ROUNDING, changes, refuse_changes

from . import export
from .finder import Finder
from .folder import ROTATED, SLACK, Folder, check_shared_folder
from .saver import Saver
from .sealed import CheckpointError, read_state
from .uploads import OnHub, Uploads, check_write, owner_on_hub, patiently

UPLOAD_SECONDS = 4 * 3600  # a finished run waits this long for its last uploads; the rest stays local
STATUS_SECONDS = 10.0  # before torchrun's kill, for leaving and the status


class Store:
    """Saves, finds, loads, exports and publishes the work of one run. All methods are called by all ranks.

    Making it takes the folder's lock (two runs can't write into one folder), settles which run it holds, and removes
    what a killed save left. publisher: a hub.Publisher, or None; grace: seconds from a signal to torchrun's kill."""

    def __init__(self, folder: str, agree, log=print, keep=2, resume="auto", publisher=None, grace=None):
        self.folder, self.agree, self.hub, self.grace = Folder(folder, keep, log), agree, publisher, grace
        problem = None
        if agree.rank == 0:
            try:
                self.folder.claim(resume, lambda stem: publisher and owner_on_hub(publisher, stem, log))
            except Exception as e:
                self.folder.unlock()
                problem = e if hasattr(e, "exit_code") else CheckpointError(f"out_dir {folder}: {e}")
        agree.verdict(problem, "checkpoints")
        self.folder.run_id = agree.broadcast(self.folder.run_id)
        hub = OnHub(self.folder, publisher) if publisher and agree.rank == 0 else None
        self.uploads = Uploads(hub) if hub else None
        self.saver = Saver(self.folder, agree, self.uploads, log)
        self.finder = Finder(self.folder, agree, hub, publisher is not None, resume, log)
        self.receipts: list[dict] = []  # of all saves of this launch
        self.warned = False  # that torchrun may kill a save
        self.saved_at = time.monotonic()  # of the newest save of this launch, or its start

    @property
    def export_folder(self) -> str:
        return os.path.join(os.path.dirname(self.folder.path), "export")

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @property
    def failures(self) -> list[str]:
        """A line for each save of this launch that failed."""
        return self.saver.failures

    @property
    def parent(self) -> str | None:
        """RUN/NAME of the checkpoint that this state comes from, by a save or a load."""
        return self.saver.parent

    def room(self, size: float) -> int:
        """Bytes that checkpoints of `size` bytes may still take here: those of each kind that rotation keeps, a final one
        and one in flight, less those that are here. Never under two: a save must fit before rotation makes room."""
        most = len(ROTATED) * (self.folder.keep + (SLACK if self.finder.published else 0)) + 2
        held = sum(entry["size"] for m in self.folder.mine().values() for entry in m["files"].values())
        return int(max(2 * size, most * size - held))

    def newest(self) -> str | None:
        """The folder of the newest complete and intact checkpoint of this run, here or on the Hub, the same on all ranks.
        None where there is none at all; where there are only damaged ones, a CheckpointError."""
        path, here = self.finder.newest()
        if self.uploads is not None:
            self.uploads.take_up(here)
        return path

    def load(self, path: str, shared: dict, own: dict) -> tuple[dict, bool]:
        """Fill tensors in place from a checkpoint, and return (state, whether `own` was filled too).

        Keys, shapes and dtypes of `shared` must be the saved ones. `own` is filled only if world size, layout and all
        its entries on all ranks are the saved ones; else the caller derives it from `shared`."""
        manifest, state, fits = self.finder.load(path, shared, own, self.saver.group)
        self.saver.parent = f"{manifest['run_id']}/{os.path.basename(path)}"
        return state, fits

    def save(self, step: int, kind: str, shared: dict, own: dict, state: dict, beside=(), wait=False):
        """Begin a save; return when the state is copied, so that training may change it again.

        shared: {key: tensor or DTensor}, the same keys on all ranks, loadable at any world size. own: {key: tensor} of
        this rank. state: JSON, rank 0's is kept. beside: files that the checkpoint takes a copy of. A save still in
        flight is waited for first. An argument that can't be saved is a CheckpointError here; a disk that fails is only
        logged and counted (`failures`)."""
        self.saver.save(step, kind, shared, own, state, beside)
        self.saved_at = time.monotonic()
        if wait:
            self.saver.wait()

    def poll(self, step: int = 0, slow_step=lambda: 0.0) -> list[dict]:
        """Receipts of saves that have finished on all ranks: [{step, kind, name, bytes, seconds, pause}], on rank 0 with
        the `upload_seconds` of the latest upload. Says them, also to status.json, and once if torchrun's grace is too
        short for a step (`slow_step()` seconds) and a save. Never waits."""
        receipts = self.saver.poll()
        self.receipts += receipts
        for receipt in receipts:
            size, seconds, pause = receipt["bytes"] / 1e6, receipt["seconds"], receipt["pause"]
            told = f"{size:.1f} MB in {seconds:.2f} s, training waited {pause * 1e3:.0f} ms"
            self.folder.log(f"saved {receipt['name']}: {told}")
            need = slow_step() + pause + seconds
            if self.grace is not None and need > self.grace and not self.warned:
                self.folder.log(
                    f"WARNING: a step and a save take {need:.2g} s, and torchrun kills {self.grace:g} s after a signal: a stop "
                    f"may lose the work since the last save. Start it with --shutdown-timeout={math.ceil(need / 30) * 60}"
                )
                self.warned = True
        failed = len(self.failures)  # known at once, not when one succeeds again
        if receipts or failed != self.agree.info.get("failed_saves", 0):
            saved = {"saved": receipts[-1]["step"]} if receipts else {}
            self.agree.note(step=step, failed_saves=failed, **saved)
        if self.uploads is not None and self.uploads.seconds is not None:
            receipts = [r | {"upload_seconds": self.uploads.seconds} for r in receipts]
        return receipts

    def wait(self):
        """Finish the save in flight."""
        self.saver.wait()

    def export(self, tensors: dict, config: dict):
        """Write {name: tensor} and config (JSON) into the folder `export`, in place of an earlier one."""
        export.export(self.export_folder, tensors, config, self.agree)

    def publish(self, files: dict[str, str]):
        """Complete the export with copies of {name: path}, and queue it for the Hub: again at each launch, since a kill may
        have come between."""
        if self.agree.rank == 0 and os.path.isdir(self.export_folder):  # nobody moved it away
            for name, path in files.items():
                shutil.copy(path, os.path.join(self.export_folder, name))
        if self.uploads is not None:
            self.uploads.put_folder("", self.export_folder, "export")

    def patience(self, ended: bool, left: float | None) -> float:
        """Seconds that `close` may wait for uploads: at the end of a run or of its time (ended), or of a launch. left: of a
        budget, where they were reserved."""
        patience, signalled = self.hub.patience if self.hub else 0.0, self.agree.signals.when
        if ended:
            return UPLOAD_SECONDS if left is None else min(UPLOAD_SECONDS, max(patience, left))
        if self.grace is None or not signalled:
            return patience
        # the next launch does the rest; the status must be written by that time
        return max(0.0, min(patience, signalled + self.grace - time.monotonic() - STATUS_SECONDS))

    def trial(self) -> float | None:
        """Bytes/s that the Hub takes, by 16 MB that do not stay there; None without a Hub."""
        if self.hub is None:
            return None
        rate = self.agree.on_rank_0(lambda: self.hub.trial(f"drill-{os.getpid()}"), "Hub")
        self.folder.log(f"drill: the Hub took {rate / 1e6:.1f} MB/s")
        return rate

    def clear(self):
        """Delete checkpoints and export: of a drill that passed."""
        if self.agree.rank == 0:
            for folder in (self.folder.path, self.export_folder):
                shutil.rmtree(folder, ignore_errors=True)
        self.folder.log(f"drill: deleted its checkpoints and export in {os.path.dirname(self.folder.path)}")

    def close(self, timeout: float = 0.0, stop=lambda: False) -> list[str]:
        """Finish the local save, give uploads `timeout` seconds or until stop() on any rank, release the folder.
        Names that are not on the Hub."""
        self.saver.wait()
        stopped = threading.Event()
        upload = partial(self.uploads.close, timeout, stopped.is_set) if self.uploads else list
        left = patiently(upload, self.agree, stop, stopped)
        if left:
            where = os.path.dirname(self.folder.path)
            stay = f"they stay in {where}, and the same command publishes them later"
            self.folder.log(f"NOT on the Hub: {', '.join(left)}; {stay}")
        self.folder.unlock()
        dist.destroy_process_group(self.saver.group)
        return left


class Saved(NamedTuple):
    """A checkpoint that a run goes on from."""

    path: str
    state: dict  # its state.json
    branch: bool  # of another run (schedule_from)
    changed: set[str]  # kinds of the settings that differ from its own

    def how(self, s, agree, own_loaded: bool) -> str:
        """How closely the run goes on, in words."""
        if "data" in s.allow_change:
            return "with the data that there is now"
        if MATH in self.changed:
            return "with changed settings"
        if self.state["code"] != proof.code_digest():
            return "with changed code"
        exact = own_loaded and self.state["world"] == agree.world and ROUNDING not in self.changed
        return "bit-exact" if exact and (agree.device.type == "cpu" or s.deterministic) else "to rounding"


def open_store(s, agree, log, grace: float | None) -> tuple[Store, Saved | None]:
    """Take the run's folder; what it goes on from, here, on the Hub, or in another run that it branches from. SettingsError
    where the settings do not fit what was saved.

    Proves first that the run may publish, even if a drill will not, and that all ranks see one folder."""
    publisher, folder = None, os.path.join(s.out_dir, "checkpoints")
    if s.hf_model_repo and s.publish:
        import hub

        publisher = hub.Publisher(s.hf_model_repo, log, s.hub_patience)
        agree.on_rank_0(lambda: check_write(publisher, folder, s.resume, log), "Hub")
    check_shared_folder(s.out_dir, agree)
    store = Store(folder, agree, log, s.ckpt_keep, s.resume, None if s.drill else publisher, grace)
    store.hub = publisher  # a drill only tries it
    path, allowed = store.newest(), s
    branch = path is None and s.schedule_from is not None
    if branch:  # another run's state, under this run's schedule
        path = s.schedule_from
        if not os.path.exists(os.path.join(path, "state.json")):
            raise s.error("schedule_from", "is not the folder of a checkpoint (…/checkpoints/step-…)")
        allowed = dataclasses.replace(s, allow_change=[*s.allow_change, *HORIZON])
    if path is None:
        log(f"[resume] a fresh start in {s.out_dir}")
        return store, None
    state = read_state(path)
    for line in refuse_changes(state["settings"], allowed):
        log(f"[resume] changed setting {line}")
    saved = Saved(path, state, branch, {kind for _, _, _, kind in changes(state["settings"], s)})
    keep_choices(s, state["chosen"])
    return store, saved


def keep_choices(s, chosen: dict):
    """In a run that goes on, "auto" is what it became in the first launch: it never chooses again."""
    if s.use_fp8 == "auto":
        s.use_fp8 = "on" if chosen["fp8"] else "off"
    if s.use_compile == "auto":
        s.use_compile = chosen["compile"]
