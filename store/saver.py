"""One save in flight: copied while training waits, written by a thread on every rank while training goes on."""

import datetime
import errno
import hashlib
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from launch import agreement

from . import sealed
from .folder import ROTATED
from .sealed import CheckpointError, write_tensors

KINDS = (*ROTATED, "final")
NO_SPACE = re.compile(rf"Errno ({errno.ENOSPC}|{errno.EDQUOT})\b")  # in the words of whichever rank met it
# a slow disk keeps the others waiting here, in threads that hold up nothing
PATIENCE = datetime.timedelta(hours=2)


@dataclass
class Flight:
    """One save, and what its thread found out."""

    step: int
    kind: str
    name: str
    pause: float = 0.0  # seconds that training waited
    thread: threading.Thread | None = None
    error: str | None = None
    receipt: dict | None = None


def check(kind: str, shared: dict, own: dict):
    """Raise CheckpointError for what can't be saved."""
    if kind not in KINDS:
        raise CheckpointError(f"kind {kind!r}: use one of {KINDS}")
    for key, value in [*shared.items(), *own.items()]:
        if not isinstance(value, torch.Tensor):  # DCP would write a number in silence, and not load it
            raise CheckpointError(f"{key} is {type(value).__name__}, not a tensor: put it into `state`")
        if value.is_meta or value.is_sparse or value.dtype not in sealed.DTYPES.values():
            raise CheckpointError(f"{key}: a {value.dtype} tensor on {value.device} can't be saved")
    if wrong := sorted(k for k, v in own.items() if isinstance(v, DTensor)):
        raise CheckpointError(f"`own` holds DTensors: {wrong}: they belong into `shared`")


class Saver:
    """Writes the checkpoints of a Folder. All methods but the thread's are called by all ranks alike."""

    def __init__(self, folder, agree, uploads, log):
        self.folder, self.agree, self.uploads, self.log = folder, agree, uploads, log
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc=agreement.SAVER)
        self.parent: str | None = None  # RUN/NAME of the checkpoint that this state comes from
        self.failures: list[str] = []  # a line for each save that failed
        self.flight, self.receipts, self.buffers = None, [], {}

    def save(self, step: int, kind: str, shared: dict, own: dict, state: dict, beside: tuple):
        """See Store.save."""
        began = time.monotonic()
        self.wait()
        problem, text = None, ""
        try:
            check(kind, shared, own)
            text = sealed.to_json(state, "state")
        except CheckpointError as e:
            problem = e
        self.agree.verdict(problem, "save")
        call = [step, kind, hashlib.sha256("\n".join(sorted(shared)).encode()).hexdigest()]
        if any(c != call for c in self.agree.gather(call)):
            raise CheckpointError("ranks disagree about a save's step, kind or keys; a bug of the caller")
        self.folder.serial = self.agree.broadcast(self.folder.serial + 1)
        flight = Flight(step, kind, f"step-{step:08d}-{kind}-{self.folder.serial:04d}")
        layout = sealed.layout_of(shared)
        shared = {k: self._copy(("shared", k), v) for k, v in shared.items()}
        own = {k: self._copy(("own", k), v) for k, v in own.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies to pinned memory are asynchronous
        flight.pause = time.monotonic() - began
        arguments = (flight, shared, own, text, layout, beside)
        flight.thread = threading.Thread(target=self._run, args=arguments, name=flight.name, daemon=True)
        self.flight = flight
        flight.thread.start()

    def poll(self) -> list[dict]:
        """Receipts of saves that are finished on all ranks. Never waits; the ranks talk only while a save is in flight."""
        if self.flight is not None and all(self.agree.gather(not self.flight.thread.is_alive())):
            self.wait()
        receipts, self.receipts = self.receipts, []
        return receipts

    def wait(self):
        """Finish the save in flight."""
        if self.flight is None:
            return
        flight, self.flight = self.flight, None
        flight.thread.join()
        if flight.error is not None:
            self.failures.append(f"step {flight.step} ({flight.kind}): {flight.error}")
            text = f"CHECKPOINT FAILED, number {len(self.failures)} of this launch: {self.failures[-1]}"
            self.log(f"{text}. Training goes on; the newest earlier checkpoints are as they were")
            return
        self.parent = f"{self.folder.run_id}/{flight.name}"
        self.receipts.append(flight.receipt)
        if self.uploads is not None:
            self.uploads.put(flight.name, flight.kind)

    def _copy(self, key: tuple, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, contiguous, in a buffer that all saves reuse (pinned when there is a GPU)."""
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            self.buffers[key] = buffer
        buffer.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        # from_local would move the copy back to the mesh's device; DCP reads only the layout, so the spec can stay.
        return DTensor(buffer, tensor._spec, requires_grad=False)

    # --- in the thread ---

    def _run(self, flight: Flight, *arguments):
        try:
            flight.receipt = self._write(flight, *arguments)
        except CheckpointException as e:  # DCP's: it names each rank's error
            flight.error = "; ".join(f"rank {rank}: {error[0]}" for rank, error in sorted(e.failures.items()))
        except Exception as e:
            flight.error = str(e) if isinstance(e, CheckpointError) else f"{type(e).__name__}: {e}"

    def _write(self, flight: Flight, shared: dict, own: dict, text: str, layout: str, beside: tuple) -> dict:
        """Write, hash, agree, rename. `group` is the only thing that the threads talk over."""
        began, rank, folder = time.monotonic(), self.agree.rank, self.folder
        temporary = os.path.join(folder.path, f".tmp-{folder.run_id}+{flight.name}")

        def prepare():
            for part in ("", "tensors", "own"):
                os.mkdir(os.path.join(temporary, part))

        def write_own() -> dict:
            """This rank's entries of the manifest."""
            name = f"own/rank-{rank:05d}.safetensors"
            if own:
                writer.entries[name] = write_tensors(os.path.join(temporary, name), own, {"format": "pt"})
            return writer.entries

        def finish() -> int:
            manifest = {
                "format": sealed.FORMAT, "run_id": folder.run_id, "step": flight.step, "kind": flight.kind,
                "name": flight.name, "parent": self.parent, "world": self.agree.world, "layout": layout,
                "created": time.strftime("%FT%TZ", time.gmtime()), "files": {k: v for e in entries for k, v in e.items()},
            }  # fmt: skip
            seal_folder(temporary, os.path.join(folder.path, flight.name), manifest, text, beside)
            return sum(e["size"] for e in manifest["files"].values())

        try:
            self._together(prepare, only_rank_0=True)
            writer = sealed.Writer(temporary, rank)
            dcp.save(shared, storage_writer=writer, process_group=self.group)
            entries = self._together(write_own)
            size = self._together(finish, only_rank_0=True)[0]
        except (CheckpointError, CheckpointException) as e:
            if rank == 0:  # all ranks have stopped writing
                shutil.rmtree(temporary, ignore_errors=True)
                # what waits for the Hub would keep every later save from succeeding
                for kind in ROTATED if NO_SPACE.search(str(e)) else ():
                    folder.rotate(kind, None, full=True)
            raise
        if rank == 0:
            folder.rotate(flight.kind, self.uploads.may_delete if self.uploads else lambda *_: True)
        facts = dict(step=flight.step, kind=flight.kind, name=flight.name, bytes=size)
        return facts | dict(seconds=time.monotonic() - began, pause=flight.pause)

    def _together(self, function, only_rank_0: bool = False) -> list:
        """The function's value from each rank, or an error on all: no rank goes on alone."""
        value, problem = None, None
        try:
            if self.agree.rank == 0 or not only_rank_0:
                value = function()
        except Exception as e:
            problem = f"rank {self.agree.rank}: {type(e).__name__}: {e}"
        answers = agreement.gather_json([problem, value], self.group)
        if problems := [p for p, _ in answers if p]:
            raise CheckpointError("; ".join(problems))
        return [v for _, v in answers]


def seal_folder(temporary: str, final: str, manifest: dict, state: str, beside: tuple):
    """Rank 0: what all ranks wrote becomes a checkpoint. The manifest is the last file, its name the last change."""
    files = manifest["files"]
    sealed.write_text(os.path.join(temporary, "state.json"), state)
    files |= sealed.describe(temporary, "state.json")
    for path in filter(os.path.exists, beside):
        copy = shutil.copy(path, temporary)
        sealed.sync(copy)
        files |= sealed.describe(temporary, os.path.basename(copy))
    if sealed.files_below(temporary) != set(files):
        raise CheckpointError(f"ranks don't see each other's files in {temporary}: is it one file system?")
    for part in ("tensors", "own"):
        sealed.sync(os.path.join(temporary, part))
    sealed.write_text(os.path.join(temporary, "manifest.json"), sealed.seal(manifest))
    os.rename(temporary, final)
    sealed.sync(os.path.dirname(final))
