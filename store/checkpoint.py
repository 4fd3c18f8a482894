"""Checkpoints: nothing lost, nothing unsafe, and a resumed run is the same run.

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

import datetime
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from launch.agreement import SAVER, gather_json

from .sealed import (
    DTYPES,
    FORMAT,
    NAME,
    CheckpointError,
    Writer,
    check_shared_folder,
    compare,
    describe,
    export,
    files_below,
    layout_of,
    read_export,
    read_manifest,
    read_model,
    read_state,
    saved_tensors,
    seal,
    sync,
    to_json,
    verify,
    write_tensors,
    write_text,
)
from .uploads import (
    ROTATED,
    SLACK,
    Uploads,
    by_serial,
    fetch,
    owner_on_hub,
    patiently,
    published,
    serial_of,
    step_of,
)

__all__ = [  # what other files use, this file's and sealed.py's
    "CheckpointError", "Checkpoints", "check_shared_folder", "export", "read_export", "read_model",
    "read_state", "verify",
]  # fmt: skip
KINDS = (*ROTATED, "final")
NO_SPACE = re.compile(rf"Errno ({errno.ENOSPC}|{errno.EDQUOT})\b")  # in the words of whichever rank met it
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


# --- the run's checkpoints -----------------------------------------------------------------------------------------


class Save:
    """One save in flight: what the saver thread found out."""

    def __init__(self, step: int, kind: str, name: str):
        self.step, self.kind, self.name = step, kind, name
        self.done, self.error, self.receipt = False, None, None


class Checkpoints:
    """Saves, finds and loads the checkpoints of one run in one folder.

    Opening it takes the folder's lock (two runs can't write into one folder), settles which run it holds (`run_id`;
    with None the folder's own run goes on, or a new one begins), and removes what a killed save left. All methods
    are called by all ranks. `failures` holds a line for each save that failed."""

    def __init__(
        self, folder: str, run_id: str | None, agree, keep: int = 2, log=print, publisher=None, resume: str = "auto"
    ):  # fmt: skip
        self.folder, self.agree, self.keep, self.log = os.path.abspath(folder), agree, keep, log
        self.publisher, self.resume = publisher, resume
        self.failures: list[str] = []
        self.parent: str | None = None  # the checkpoint that this state comes from
        self.beside: list[str] = []  # files that each checkpoint takes a copy of
        self.lock, self.flight, self.uploads = None, None, None
        self.receipts, self.buffers, self.verified, self.serial = [], {}, set(), 0
        problem = None
        if agree.rank == 0:
            try:
                self._claim(run_id)
            except Exception as e:
                self._unlock()
                problem = e if hasattr(e, "exit_code") else CheckpointError(f"out_dir {self.folder}: {e}")
        agree.verdict(problem, "checkpoints")
        self.run_id = agree.broadcast(self.run_id if agree.rank == 0 else "")
        # A rank that writes to a slow disk keeps the others waiting here, in threads that hold up nothing.
        patience = datetime.timedelta(hours=2)
        self.group = dist.new_group(backend="gloo", timeout=patience, group_desc=SAVER)
        if publisher is not None and agree.rank == 0:
            self.uploads = Uploads(self.folder, self.run_id, publisher, keep, log)

    def _claim(self, run_id: str | None):
        """Rank 0: lock the folder, decide which run it belongs to, clear away a killed save's leftovers."""
        os.makedirs(self.folder, exist_ok=True)
        self.lock = open(os.path.join(self.folder, ".lock"), "a+")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            self.lock.seek(0)
            raise CheckpointError(
                f"{self.folder} is in use by another run ({self.lock.read().strip() or 'unknown'}): "
                "stop that one, or choose another out_dir"
            ) from None
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {os.uname().nodename}, since {time.strftime('%F %T')}\n")
        self.lock.flush()
        record = os.path.join(self.folder, "run.json")
        owner, earlier = self._owner(record)
        if run_id and owner and run_id != owner:
            raise CheckpointError(
                f"{self.folder} belongs to run {owner}, not {run_id}: choose another out_dir"
            )
        if self.resume == "never" and owner:
            owner, earlier = None, [*earlier, owner]
            self.log(
                f"--resume=never: a new run begins in {self.folder}; checkpoints of {earlier} stay untouched"
            )
        if not owner and not run_id and self.resume != "never" and self.publisher is not None:
            owner = owner_on_hub(self.publisher, self._stem(), self.log)
        self.run_id = owner or run_id or self._new_id()
        if not RUN_ID.fullmatch(self.run_id):
            raise CheckpointError(f"run id {self.run_id!r}: use letters, digits, '.', '_' and '-'")
        write_text(record, to_json({"run_id": self.run_id, "earlier": earlier}, "run.json"))
        for name in os.listdir(self.folder):  # `.part` is a download, which goes on
            path = os.path.join(self.folder, name)
            if name.startswith(f".tmp-{self.run_id}+") and not name.endswith(".part"):
                self.log(f"removing {name}, left by a save that was killed")
                shutil.rmtree(path, ignore_errors=True)
            if name in ("run.json.tmp", "published.json.tmp"):
                os.unlink(path)
            if NAME.search(name):  # also of damaged and of other runs': a serial number is never used twice
                self.serial = max(self.serial, serial_of(name))

    def _owner(self, record: str) -> tuple[str | None, list[str]]:
        """(the run that the folder belongs to, or None; the runs that were there before it)."""
        try:
            with open(record, encoding="utf-8") as f:
                data = json.load(f)
            return data["run_id"], data["earlier"]
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            self.log(f"{record} is damaged; the checkpoints beside it say whose they are")
        owners = sorted({m["run_id"] for m in self._manifests().values()})
        if len(owners) > 1:
            raise CheckpointError(
                f"{self.folder} holds checkpoints of several runs and no run.json: {owners}"
            )
        return (owners[0], []) if owners else (None, [])

    def _stem(self) -> str:
        """The run folder's name, with which run ids begin: that is how a run finds itself on the Hub."""
        parts = [p for p in self.folder.split(os.sep) if p not in ("", "checkpoints")]
        return re.sub(r"[^A-Za-z0-9_]+", "_", parts[-1] if parts else "run").strip("_") or "run"

    def _new_id(self) -> str:
        return f"{self._stem()}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"

    def _unlock(self):
        if self.lock is not None:
            self.lock.close()  # which releases it, as the end of the process does
            self.lock = None

    def _manifests(self) -> dict[str, dict]:
        """{name: manifest} of all folders here that have an intact manifest, of whatever run, oldest save first."""
        found = {}
        for name in by_serial(os.listdir(self.folder)):
            try:
                manifest = read_manifest(os.path.join(self.folder, name))
            except (CheckpointError, OSError):
                continue
            if manifest.get("name") == name:  # else a copy that somebody made
                found[name] = manifest
        return found

    def room(self, size: float) -> int:
        """Bytes that checkpoints of `size` bytes may still take here: those of each kind that rotation keeps, a final one
        and one in flight, less those that are here. Never under two: a save must fit before rotation makes room."""
        most = len(ROTATED) * (self.keep + (SLACK if self.publisher is not None else 0)) + 2
        mine = (m for m in self._manifests().values() if m["run_id"] == self.run_id)
        held = sum(entry["size"] for m in mine for entry in m["files"].values())
        return int(max(2 * size, most * size - held))

    # --- save ---

    def save(self, step: int, kind: str, shared: dict, own: dict, state: dict, wait: bool = False):
        """Begin a save; return when the state is copied, so that training may change it again.

        shared: {key: tensor or DTensor}, the same keys on all ranks, loadable at any world size. own: {key: tensor} of
        this rank. state: JSON, rank 0's is kept. A save still in flight is waited for first. An argument that can't be
        saved is a CheckpointError here; a disk that fails is only logged and counted (`failures`)."""
        began = time.monotonic()
        if self.flight is not None:
            self.wait_local()
        problem, text = None, ""
        try:
            if kind not in KINDS:
                raise CheckpointError(f"kind {kind!r}: use one of {KINDS}")
            for key, value in [*shared.items(), *own.items()]:
                if not isinstance(value, torch.Tensor):
                    raise CheckpointError(
                        f"{key} is {type(value).__name__}, not a tensor: put it into `state`"
                    )
                if value.is_meta or value.is_sparse or value.dtype not in DTYPES.values():
                    raise CheckpointError(f"{key}: a {value.dtype} tensor on {value.device} can't be saved")
            if wrong := sorted(k for k, v in own.items() if isinstance(v, DTensor)):
                raise CheckpointError(f"`own` holds DTensors: {wrong}: they belong into `shared`")
            text = to_json(state, "state")
        except CheckpointError as e:
            problem = e
        self.agree.verdict(problem, "save")
        call = [step, kind, hashlib.sha256("\n".join(sorted(shared)).encode()).hexdigest()]
        if any(c != call for c in self.agree.gather(call)):
            raise CheckpointError(
                "ranks disagree about a save: step, kind or keys of `shared`; a bug of the caller"
            )
        self.serial = self.agree.broadcast(self.serial + 1)
        flight = Save(step, kind, f"step-{step:08d}-{kind}-{self.serial:04d}")
        layout = layout_of(shared)
        shared = {k: self._copy(("shared", k), v) for k, v in shared.items()}
        own = {k: self._copy(("own", k), v) for k, v in own.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies to pinned memory are asynchronous
        pause = time.monotonic() - began
        arguments = (flight, shared, own, text, layout, pause)
        job = threading.Thread(target=self._run, args=arguments, name=f"save {flight.name}", daemon=True)
        self.flight = flight, job
        job.start()
        if wait:
            self.wait_local()

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

    def _run(self, flight: Save, *arguments):
        """Body of the saver thread."""
        try:
            flight.receipt = self._write(flight, *arguments)
        except CheckpointException as e:  # DCP's: it names each rank's error
            flight.error = "; ".join(f"rank {rank}: {error[0]}" for rank, error in sorted(e.failures.items()))
        except Exception as e:
            flight.error = f"{type(e).__name__}: {e}" if not isinstance(e, CheckpointError) else str(e)
        finally:
            flight.done = True

    def _write(self, flight: Save, shared: dict, own: dict, text: str, layout: str, pause: float) -> dict:
        """Write, hash, agree, rename. In the saver thread of every rank; `group` is the only thing it talks over."""
        began, rank = time.monotonic(), self.agree.rank
        temporary = os.path.join(self.folder, f".tmp-{self.run_id}+{flight.name}")
        final = os.path.join(self.folder, flight.name)

        def together(function, only_rank_0: bool = False) -> list:
            """The function's value from each rank, or an error on all: no rank goes on alone."""
            value, problem = None, None
            try:
                if rank == 0 or not only_rank_0:
                    value = function()
            except Exception as e:
                problem = f"rank {rank}: {type(e).__name__}: {e}"
            answers = gather_json([problem, value], self.group)
            if problems := [p for p, _ in answers if p]:
                raise CheckpointError("; ".join(problems))
            return [v for _, v in answers]

        def prepare():
            for part in ("", "tensors", "own"):
                os.mkdir(os.path.join(temporary, part))

        def write_own() -> dict:
            """This rank's entries of the manifest."""
            entries = dict(writer.entries)
            if own:
                name = f"own/rank-{rank:05d}.safetensors"
                entries[name] = write_tensors(os.path.join(temporary, name), own, {"format": "pt"})
            return entries

        def finish():
            write_text(os.path.join(temporary, "state.json"), text)
            entries = describe(temporary, "state.json")
            for path in filter(os.path.exists, self.beside):
                copy = shutil.copy(path, temporary)
                sync(copy)
                entries |= describe(temporary, os.path.basename(copy))
            for part in files:
                entries |= part
            if files_below(temporary) != set(entries):
                raise CheckpointError(
                    f"ranks don't see each other's files in {temporary}: is it one file system?"
                )
            for part in ("tensors", "own"):
                sync(os.path.join(temporary, part))
            manifest = {
                "format": FORMAT, "run_id": self.run_id, "step": flight.step, "kind": flight.kind,
                "name": flight.name, "parent": self.parent, "world": self.agree.world,
                "layout": layout, "created": time.strftime("%FT%TZ", time.gmtime()), "files": entries,
            }  # fmt: skip
            write_text(os.path.join(temporary, "manifest.json"), seal(manifest))
            os.rename(temporary, final)
            sync(self.folder)
            return sum(e["size"] for e in entries.values())

        try:
            together(prepare, only_rank_0=True)
            writer = Writer(temporary, rank)
            dcp.save(shared, storage_writer=writer, process_group=self.group)
            files = together(write_own)
            size = together(finish, only_rank_0=True)[0]
        except (CheckpointError, CheckpointException) as e:
            if rank == 0:  # all ranks have stopped writing
                shutil.rmtree(temporary, ignore_errors=True)
                # what waits for the Hub would keep every later save from succeeding
                for kind in ROTATED if NO_SPACE.search(str(e)) else ():
                    self._rotate(kind, full=True)
            raise
        if rank == 0:
            self._rotate(flight.kind)
        seconds = time.monotonic() - began
        return dict(
            step=flight.step, kind=flight.kind, name=flight.name, bytes=size, seconds=seconds, pause=pause
        )

    def _rotate(self, kind: str, full: bool = False):
        """Rank 0: delete this run's oldest checkpoints of a kind; on a `full` disk also those that the Hub has not got.
        What it can't delete it only logs."""
        try:
            mine = [
                n for n, m in self._manifests().items() if (m["run_id"], m["kind"]) == (self.run_id, kind)
            ]
            if kind not in ROTATED:
                return
            for i, name in enumerate(mine[: -self.keep]):
                if full:
                    self.log(f"deleting {name} to make room, on the Hub or not: the disk is full")
                if full or self.uploads is None or self.uploads.may_delete(name, mine[i:], self.keep):
                    doomed = os.path.join(self.folder, f".tmp-{self.run_id}+deleting-{name}")
                    os.rename(os.path.join(self.folder, name), doomed)  # a half-deleted checkpoint is not one
                    shutil.rmtree(doomed)
        except Exception as e:  # the save itself is done
            self.log(f"old checkpoints could not be deleted: {e}")

    def poll(self) -> list[dict]:
        """Receipts of saves that are finished on all ranks: [{step, kind, name, bytes, seconds, pause}], on rank 0 with the
        `upload_seconds` of the latest upload. Never waits; only while a save is in flight do the ranks exchange a word."""
        if self.flight is not None and all(self.agree.gather(self.flight[0].done)):
            self.wait_local()
        receipts, self.receipts = self.receipts, []
        if self.uploads is not None and self.uploads.seconds is not None:
            receipts = [r | {"upload_seconds": self.uploads.seconds} for r in receipts]
        return receipts

    def wait_local(self):
        """Finish the save in flight."""
        if self.flight is None:
            return
        flight, job = self.flight
        job.join()
        self.flight = None
        if flight.error is not None:
            self.failures.append(f"step {flight.step} ({flight.kind}): {flight.error}")
            self.log(
                f"CHECKPOINT FAILED, number {len(self.failures)} of this launch: {self.failures[-1]}. "
                "Training goes on; the newest earlier checkpoints are as they were"
            )
            return
        self.parent = f"{self.run_id}/{flight.name}"
        self.receipts.append(flight.receipt)
        if self.uploads is not None:
            self.uploads.put(flight.name, flight.kind)

    def publish(self, folder: str, prefix: str):
        """Queue another sealed folder (an export) for the Hub, below `prefix` ("" is the repo's root)."""
        if self.uploads is not None:
            self.uploads.put(prefix, f"folder {prefix}", os.path.abspath(folder), prefix)

    def close(self, timeout: float = 0.0, stop=lambda: False) -> list[str]:
        """Finish the local save, give uploads `timeout` seconds or until stop() on any rank, release the folder.
        Names that are not on the Hub."""
        self.wait_local()
        stopped = threading.Event()
        upload = partial(self.uploads.close, timeout, stopped.is_set) if self.uploads else list
        left = patiently(upload, self.agree, stop, stopped)
        if left:
            where = os.path.dirname(self.folder)
            self.log(
                f"NOT on the Hub: {', '.join(left)}; they stay in {where}, and the same command publishes them later"
            )
        self._unlock()
        dist.destroy_process_group(self.group)
        return left

    # --- find and load ---

    def newest(self) -> str | None:
        """The folder of the newest complete and intact checkpoint of this run, here or on the Hub, the same on all ranks.
        None where there is none at all; where there are only damaged ones, a CheckpointError."""
        if self.resume == "never":
            return None
        damaged = []
        here = self.agree.broadcast(by_serial(os.listdir(self.folder)) if self.agree.rank == 0 else [])
        there, ahead, silent = [], [], ""
        if self.publisher is not None:
            there, ahead, silent = patiently(self._ask_hub, self.agree)
        # What another machine has trained beyond the steps here, then the newest first. Of two alike, the one here.
        found = [(n in ahead, serial_of(n), False, n) for n in there] + [
            (False, serial_of(n), True, n) for n in here
        ]
        for _, _, local, name in sorted(found, reverse=True):
            path = os.path.join(self.folder, name)
            if local:
                path = path if self._usable(path, damaged) else None
            else:
                path = patiently(lambda name=name: self._fetch(name, damaged), self.agree)
            if path:
                if silent:
                    self.log(
                        f"going on with what is here: the Hub could not be asked for a newer one: {silent}"
                    )
                if self.uploads is not None and local:  # else what is here was overtaken
                    self.uploads.take_up(here)
                return path
        if silent:
            raise CheckpointError(
                f"no checkpoint in {self.folder} to go on with, and the Hub could not be asked for one: {silent}"
            )
        damaged = self.agree.broadcast(damaged + self._set_aside_before() if self.agree.rank == 0 else [])
        if damaged:
            raise CheckpointError(
                f"run {self.run_id} has checkpoints, but none is usable: {', '.join(damaged)}. Nothing was started "
                "over. Restore one of them, or begin a new run with --resume=never (these files stay)"
            )
        if self.resume == "must":
            raise CheckpointError(f"--resume=must: run {self.run_id} has no checkpoint in {self.folder}")
        return None

    def _usable(self, path: str, damaged: list) -> bool:
        """All ranks: whether a folder is an intact checkpoint of this run; says loudly why not."""
        owner, answer = self.run_id, ["ok", ""]
        try:
            manifest = read_manifest(path)
            if manifest.get("name") != os.path.basename(path):
                raise CheckpointError(f"{path} is a renamed copy of {manifest.get('name')}")
            owner = manifest["run_id"]
            if owner == self.run_id:
                verify(path, self.agree.rank, self.agree.world)
        except CheckpointError as e:
            answer = ["damaged", str(e)]
        except OSError as e:
            answer = ["unreadable", f"{path}: {e}"]
        bad = [a for a in self.agree.gather(answer) if a[0] != "ok"]
        if bad:
            damaged.append(os.path.basename(path))
            self.log(f"DAMAGED CHECKPOINT, falling back to an older one: {bad[0][1]}")
            if self.agree.rank == 0 and owner == self.run_id and all(a[0] == "damaged" for a in bad):
                self._set_aside(path)
            self.agree.barrier()
        elif owner != self.run_id:
            self.log(f"skipping {path}: it belongs to run {owner}, this is {self.run_id}")
        else:
            self.verified.add(path)
        return not bad and owner == self.run_id

    def _set_aside_before(self) -> list[str]:
        """Rank 0: this run's damaged checkpoints that earlier launches renamed. They too forbid a fresh start."""
        found = []
        for name in os.listdir(self.folder):
            if name.startswith("damaged-") and NAME.fullmatch(name.removeprefix("damaged-")):
                try:
                    owner = read_manifest(os.path.join(self.folder, name))["run_id"]
                except (CheckpointError, OSError):
                    owner = self.run_id
                if owner == self.run_id:
                    found.append(name)
        return sorted(found)

    def _set_aside(self, path: str):
        """Rank 0: rename a damaged checkpoint, so that rotation does not keep it in place of a good one."""
        try:
            os.rename(path, os.path.join(self.folder, "damaged-" + os.path.basename(path)))
        except OSError as e:
            self.log(f"{path} stays where it is: {e}")

    def _ask_hub(self) -> tuple[list[str], list[str], str]:
        """Rank 0: (names of the run's checkpoints on the Hub, those that another machine put there beyond the steps here,
        ""), or ([], [], why it could not be asked). Serial numbers can't tell: each machine counts on from what it saw."""
        try:
            names = published(self.publisher, self.run_id)
        except OSError as e:
            return [], [], str(e)
        self.serial = max([self.serial, *map(serial_of, names)])
        last = max(
            (step_of(n) for n, m in self._manifests().items() if m["run_id"] == self.run_id), default=-1
        )
        foreign = [n for n in names if f"{self.run_id}/{n}" not in self.uploads.receipts]
        return names, [n for n in foreign if step_of(n) > last], ""

    def _fetch(self, name: str, damaged: list) -> str | None:
        """Rank 0: a checkpoint of this run on the Hub, downloaded and intact; its folder, or None where it is damaged."""
        path = os.path.join(self.folder, name)
        if os.path.exists(path):
            self._set_aside(path)
        self.log(
            f"downloading checkpoint {name} of run {self.run_id} from the Hub: nothing as new is intact here"
        )
        try:
            return fetch(self.publisher, self.run_id, name, path)
        except CheckpointError as e:
            damaged.append(f"{name} (Hub)")
            self.log(f"DAMAGED CHECKPOINT on the Hub, falling back to an older one: {e}")
        except OSError as e:  # to go on behind it would train twice, and rotate it away there
            raise CheckpointError(
                f"{name} on the Hub is newer than what is intact in {self.folder}, and could not be downloaded: {e}. "
                "The same command tries again; --publish=False goes on with what is here"
            ) from None
        return None

    def load(self, path: str, shared: dict, own: dict) -> tuple[dict, bool]:
        """Fill tensors in place from a checkpoint, and return (state, whether `own` was filled too).

        Keys, shapes and dtypes of `shared` must be the saved ones. `own` is filled only if world size, layout and all
        its entries on all ranks are the saved ones; else the caller derives it from `shared`."""
        agree, problem = self.agree, None
        try:
            manifest = read_manifest(path) if path in self.verified else verify(path, agree.rank, agree.world)
            state = read_state(path)
            compare(saved_tensors(os.path.join(path, "tensors")), shared, path)
        except (CheckpointError, OSError, ValueError, KeyError) as e:
            problem = (
                e if isinstance(e, CheckpointError) else CheckpointError(f"{path}: {type(e).__name__}: {e}")
            )
        agree.verdict(problem, "load")
        try:
            reader = HuggingFaceStorageReader(os.path.join(path, "tensors"))
            target = {k: v.detach() for k, v in shared.items()}
            dcp.load(target, storage_reader=reader, process_group=self.group)
        except CheckpointException as e:
            problem = CheckpointError(f"{path} could not be read: {e.failures}")
        agree.verdict(problem, "load")
        file, mine = os.path.join(path, f"own/rank-{agree.rank:05d}.safetensors"), None
        fits = manifest["world"] == agree.world and manifest["layout"] == layout_of(shared)
        try:
            mine = load_file(file) if fits and os.path.exists(file) else {}
        except (OSError, ValueError) as e:
            problem = CheckpointError(f"{file} could not be read: {e}")
        agree.verdict(problem, "load")
        form = {k: (v.dtype, v.shape) for k, v in own.items()}
        fits = all(agree.gather(bool(fits and form == {k: (v.dtype, v.shape) for k, v in mine.items()})))
        if fits:
            for key, tensor in own.items():
                tensor.detach().copy_(mine[key])
        self.parent = f"{manifest['run_id']}/{os.path.basename(path)}"
        return state, fits
