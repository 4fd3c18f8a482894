"""Checkpoints: nothing lost, nothing unsafe, and a resumed run is the same run.

One checkpoint is one folder, the same for 1 GPU and for 64:

    step-00001000-latest-0007/                     step, kind, and the serial number of the save in its run
        tensors/shard-0000R-model-….safetensors    what any world size can load: one file per rank, written by DCP
        own/rank-0000R.safetensors                 what only the same world size and layout can load (8-bit codes)
        state.json                                 everything that is not a tensor
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
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from settings import Settings, SettingsError, changes

FORMAT = "nova-checkpoint-1"
KINDS = ("latest", "best", "milestone", "final")
ROTATED = ("latest", "best", "milestone")  # `final` is never deleted
NAME = re.compile(r"step-(\d{8,})-(latest|best|milestone|final)-(\d{4,})")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
DTYPES = {  # safetensors' names
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
SLACK = 2  # checkpoints of a kind kept beyond `keep` while the Hub has none of them yet
EXPORT_FILE_BYTES = 5 * 10**9  # an export larger than this is split, as Hub repos usually are


class CheckpointError(RuntimeError):
    """A checkpoint that can't be used, a folder that is not this run's, or state that can't be saved."""

    exit_code = 74


# --- files ---------------------------------------------------------------------------------------------------------


def sync(path: str):
    """Force a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str, text: str):
    """Write a file so that after a crash it has either its old or its new content."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)
    sync(os.path.dirname(path))


def to_json(value, what: str) -> str:
    """JSON text, or a CheckpointError for a value that JSON has no word for (tensor, NaN, set…)."""
    try:
        return json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{what} is not JSON: {e}") from None


def file_sha256(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def seal(manifest: dict) -> str:
    """The text of a manifest: its own digest included, so that a flipped bit in it is seen too."""
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    digest = hashlib.sha256(to_json(body, "manifest").encode()).hexdigest()
    return to_json({**body, "sha256": digest}, "manifest")


def read_manifest(folder: str) -> dict:
    """The manifest of a checkpoint or export. Raises CheckpointError unless it is intact, to the byte."""
    path = os.path.join(folder, "manifest.json")
    try:
        with open(path, "rb") as f:
            text = f.read()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no manifest.json, so this is not a checkpoint") from None
    try:
        manifest = json.loads(text)
        intact = manifest["format"] == FORMAT and seal(manifest).encode() == text
    except (ValueError, TypeError, KeyError, RecursionError, CheckpointError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path}: damaged, or not written by this version ({FORMAT})")
    return manifest


def files_below(folder: str) -> set[str]:
    """Relative paths of all files below a folder."""
    return {
        os.path.relpath(os.path.join(root, name), folder)
        for root, _, names in os.walk(folder)
        for name in names
    }


def verify(folder: str, rank: int = 0, world: int = 1, others: bool = False) -> dict:
    """The manifest, after comparing every size, and the sha256 of this rank's share of the files.

    `others`: files beside the listed ones are accepted (an export gets a report added to it)."""
    manifest = read_manifest(folder)
    files = manifest["files"]
    present = files_below(folder) - {"manifest.json"}
    missing, extra = sorted(set(files) - present), sorted(present - set(files))
    if missing or (extra and not others):
        raise CheckpointError(f"{folder}: " + (f"missing {missing}" if missing else f"unknown files {extra}"))
    for name, entry in files.items():
        size = os.path.getsize(os.path.join(folder, name))
        if size != entry["size"]:
            raise CheckpointError(f"{folder}/{name}: {size} bytes, should be {entry['size']}")
    largest_first = sorted(files, key=lambda n: (-files[n]["size"], n))
    for name in largest_first[rank::world]:
        if file_sha256(os.path.join(folder, name)) != files[name]["sha256"]:
            raise CheckpointError(f"{folder}/{name}: its sha256 is not the manifest's: the file is damaged")
    return manifest


def describe(folder: str, name: str) -> dict:
    """A manifest's entry for a file."""
    path = os.path.join(folder, name)
    return {name: {"size": os.path.getsize(path), "sha256": file_sha256(path)}}


class Chunk(NamedTuple):
    """A piece of a saved tensor: the file that holds it and where it lies in the whole."""

    file: str
    offsets: tuple
    shape: tuple


def saved_tensors(folder: str) -> dict[str, tuple[str, tuple, list[Chunk]]]:
    """{key: (safetensors dtype, global shape, chunks)} from the headers of a checkpoint's tensor files."""
    found = {}
    for file in sorted(os.listdir(folder)):
        path = os.path.join(folder, file)
        with open(path, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        offsets = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        for key, entry in header.items():
            shape = tuple(entry["shape"])
            at = tuple(offsets[key]["saved_offsets"]) if key in offsets else (0,) * len(shape)
            dtype, whole, chunks = found.setdefault(key, (entry["dtype"], shape, []))
            chunks.append(Chunk(path, at, shape))
            whole = tuple(max(w, a + s) for w, a, s in zip(whole, at, shape, strict=True))
            found[key] = dtype, whole, chunks
    return found


# --- exchange between ranks ----------------------------------------------------------------------------------------


def gather_json(value, group) -> list:
    """[value of rank 0, value of rank 1, …] over a gloo group. The saver thread's own `agree.gather`."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = int(max(sizes))
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    return [json.loads(bytes(r[: int(n)].tolist())) for r, n in zip(rows, sizes, strict=True)]


def patiently(function, agree):
    """Rank 0 runs `function` in a thread, the others hear every few seconds that it still does; its value, everywhere.

    A download may take longer than any collective is allowed to."""
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
        thread.join(5.0)
    agree.verdict(box.get("error"), "checkpoint")
    return agree.broadcast(box.get("value", False))


def check_shared_folder(folder: str, agree, patience: float = 10.0):
    """Raise CheckpointError unless every rank sees what rank 0 writes: a checkpoint's files come from all of them."""
    problem, token, marker = None, secrets.token_hex(8), os.path.join(folder, ".shared-folder")
    if agree.rank == 0:
        try:
            os.makedirs(folder, exist_ok=True)
            write_text(marker, token)
        except OSError as e:
            problem = CheckpointError(f"out_dir {folder} can't be written: {e}")
    agree.verdict(problem, "shared folder")
    token, seen, end = agree.broadcast(token), None, time.monotonic() + patience
    while seen != token and time.monotonic() < end:  # a network file system may show a new file late
        try:
            with open(marker, encoding="utf-8") as f:
                seen = f.read()
        except OSError:
            time.sleep(0.2)
    if seen != token:
        problem = CheckpointError(
            f"rank {agree.rank} does not see rank 0's files in {folder}: several nodes need one shared file system"
        )
    agree.verdict(problem, "shared folder")
    if agree.rank == 0:
        os.unlink(marker)


def check_space(folder: str, bytes_needed: float):
    """Raise CheckpointError unless the file system of `folder` has that many bytes free."""
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        raise CheckpointError(
            f"{folder} has {free / 1e9:.1f} GB free, its checkpoints need {bytes_needed / 1e9:.1f} GB: "
            "free space, choose another out_dir, or lower ckpt_keep"
        )


def refuse_changes(saved: dict, now: Settings) -> list[str]:
    """A line for each setting that differs from the saved run's, or a SettingsError for those that may not."""
    lines, refused = [], []
    for name, before, after, kind in changes(saved, now):
        line = f"{name}: {before!r} -> {after!r}"
        if kind == "model":
            refused.append(
                f"{line} (the saved weights have another form: start another run in another out_dir)"
            )
        elif kind == "math" and name not in now.allow_change:
            refused.append(f"{line} (changes the course of the run: --allow_change={name} accepts it)")
        else:
            lines.append(line)
    if refused:
        raise SettingsError("this run was started with other settings:\n  " + "\n  ".join(refused))
    return lines


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
        self.lock, self.flight, self.uploads = None, None, None
        self.receipts, self.buffers, self.verified, self.serial = [], {}, set(), 0
        problem = None
        if agree.rank == 0:
            try:
                self._claim(run_id)
            except (OSError, CheckpointError) as e:
                self._unlock()
                problem = (
                    e if isinstance(e, CheckpointError) else CheckpointError(f"out_dir {self.folder}: {e}")
                )
        agree.verdict(problem, "checkpoints")
        self.run_id = agree.broadcast(self.run_id if agree.rank == 0 else "")
        # A rank that writes to a slow disk keeps the others waiting here, in threads that hold up nothing.
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=2))
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
            owner = self._owner_on_hub()
        self.run_id = owner or run_id or self._new_id()
        if not RUN_ID.fullmatch(self.run_id):
            raise CheckpointError(f"run id {self.run_id!r}: use letters, digits, '.', '_' and '-'")
        write_text(record, to_json({"run_id": self.run_id, "earlier": earlier}, "run.json"))
        for name in os.listdir(self.folder):
            if name.startswith(f".tmp-{self.run_id}+"):
                self.log(f"removing {name}, left by a save that was killed")
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)
            if NAME.search(name):  # also of damaged and of other runs': a serial number is never used twice
                self.serial = max(self.serial, int(NAME.search(name)[3]))

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

    def _owner_on_hub(self) -> str | None:
        """The youngest run on the Hub that had a folder of this name, or None."""
        pattern = re.compile(re.escape(self._stem()) + r"-\d{8}-\d{6}-[0-9a-f]{4}")
        runs = {path.split("/")[0] for path in self.publisher.list("")}
        runs = sorted(r for r in runs if pattern.fullmatch(r))
        if runs:
            self.log(
                f"nothing local: going on with run {runs[-1]} of the Hub; --resume=never starts another"
                + (f" (older ones there: {', '.join(runs[:-1])})" if runs[1:] else "")
            )
        return runs[-1] if runs else None

    def _unlock(self):
        if self.lock is not None:
            self.lock.close()  # which releases it, as the end of the process does
            self.lock = None

    def _manifests(self) -> dict[str, dict]:
        """{name: manifest} of all folders here that have an intact manifest, of whatever run, oldest save first."""
        found = {}
        for name in os.listdir(self.folder):
            if NAME.fullmatch(name):
                try:
                    found[name] = read_manifest(os.path.join(self.folder, name))
                except (CheckpointError, OSError):
                    continue
        return dict(sorted(found.items(), key=lambda item: item[1]["serial"]))

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
            names = [f"tensors/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"]
            if own:
                names.append(f"own/rank-{rank:05d}.safetensors")
                path = os.path.join(temporary, names[-1])
                save_file(own, path)
                sync(path)
            entries = {}
            for name in names:
                if os.path.exists(os.path.join(temporary, name)):  # a rank with nothing to write has no file
                    entries |= describe(temporary, name)  # read back, hashed in chunks
            return entries

        def finish():
            write_text(os.path.join(temporary, "state.json"), text)
            entries = describe(temporary, "state.json")
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
                "serial": int(NAME.fullmatch(flight.name)[3]), "parent": self.parent, "world": self.agree.world,
                "layout": layout, "created": time.strftime("%FT%TZ", time.gmtime()), "files": entries,
            }  # fmt: skip
            write_text(os.path.join(temporary, "manifest.json"), seal(manifest))
            os.rename(temporary, final)
            sync(self.folder)
            return sum(e["size"] for e in entries.values())

        try:
            together(prepare, only_rank_0=True)
            writer = HuggingFaceStorageWriter(os.path.join(temporary, "tensors"), save_distributed=True)
            dcp.save(shared, storage_writer=writer, process_group=self.group)
            files = together(write_own)
            size = together(finish, only_rank_0=True)[0]
        except (CheckpointError, CheckpointException):
            if rank == 0:  # all ranks have stopped writing
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if rank == 0:
            self._rotate(flight.kind)
        seconds = time.monotonic() - began
        return dict(
            step=flight.step, kind=flight.kind, name=flight.name, bytes=size, seconds=seconds, pause=pause
        )

    def _rotate(self, kind: str):
        """Rank 0: delete this run's oldest checkpoints of a kind. What it can't delete it only logs."""
        try:
            mine = [
                n for n, m in self._manifests().items() if (m["run_id"], m["kind"]) == (self.run_id, kind)
            ]
            if kind not in ROTATED:
                return
            for i, name in enumerate(mine[: -self.keep]):
                if self.uploads is None or self.uploads.may_delete(name, mine[i:], self.keep):
                    doomed = os.path.join(self.folder, f".tmp-{self.run_id}+deleting-{name}")
                    os.rename(os.path.join(self.folder, name), doomed)  # a half-deleted checkpoint is not one
                    shutil.rmtree(doomed)
        except OSError as e:
            self.log(f"old checkpoints could not be deleted: {e}")

    def poll(self) -> list[dict]:
        """Receipts of saves that are finished on all ranks: [{step, kind, name, bytes, seconds, pause}]. Never waits;
        only while a save is in flight do the ranks exchange a word."""
        if self.flight is not None and all(self.agree.gather(self.flight[0].done)):
            self.wait_local()
        receipts, self.receipts = self.receipts, []
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
                "Training goes on; earlier checkpoints are as they were"
            )
            return
        self.parent = f"{self.run_id}/{flight.name}"
        self.receipts.append(flight.receipt)
        if self.uploads is not None:
            self.uploads.put(flight.name, flight.kind)

    def wait(self) -> list[dict]:
        """Finish the save in flight, then as `poll`."""
        self.wait_local()
        return self.poll()

    def close(self, timeout: float = 0.0) -> list[str]:
        """Finish the local save, give uploads `timeout` seconds, release the folder. Names that are not on the Hub."""
        self.wait_local()
        left = patiently(lambda: self.uploads.close(timeout) if self.uploads else [], self.agree)
        if left:
            self.log(f"NOT on the Hub: {', '.join(left)}; they stay in {self.folder}")
        self._unlock()
        dist.destroy_process_group(self.group)
        return left

    # --- find and load ---

    def newest(self) -> str | None:
        """The folder of the newest complete and intact checkpoint of this run, the same on all ranks: local, else from
        the Hub. None where there is none at all; where there are only damaged ones, a CheckpointError."""
        if self.resume == "never":
            return None
        damaged = []
        names = [n for n in os.listdir(self.folder) if NAME.fullmatch(n)] if self.agree.rank == 0 else []
        for name in self.agree.broadcast(sorted(names, key=lambda n: -int(NAME.fullmatch(n)[3]))):
            path = os.path.join(self.folder, name)
            if self._usable(path, damaged):
                return path
        if self.publisher is not None:
            path = patiently(lambda: self._fetch(damaged), self.agree)
            if path:
                return path
        damaged = self.agree.broadcast(damaged)
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
        problem, manifest = None, {}
        try:
            manifest = verify(path, self.agree.rank, self.agree.world)
        except (CheckpointError, OSError) as e:
            problem = f"{type(e).__name__}: {e}" if isinstance(e, OSError) else str(e)
        problems = [p for p in self.agree.gather(problem) if p]
        if not problems:
            if manifest["run_id"] == self.run_id:
                self.verified.add(path)
                return True
            self.log(f"skipping {path}: it belongs to run {manifest['run_id']}, this is {self.run_id}")
            return False
        damaged.append(os.path.basename(path))
        self.log(f"DAMAGED CHECKPOINT, falling back to an older one: {problems[0]}")
        if self.agree.rank == 0:
            try:  # out of the way of rotation, which would keep it and delete a good one; nothing is deleted
                if read_manifest(path)["run_id"] == self.run_id:
                    os.rename(path, os.path.join(self.folder, "damaged-" + os.path.basename(path)))
            except (CheckpointError, OSError):
                pass
        self.agree.barrier()
        return False

    def _fetch(self, damaged: list) -> str | None:
        """Rank 0: the newest intact checkpoint of this run on the Hub, downloaded; its folder, or None."""
        for name in reversed(published(self.publisher, self.run_id)):
            self.serial = max(self.serial, int(NAME.fullmatch(name)[3]))
            temporary = os.path.join(self.folder, f".tmp-{self.run_id}+{name}")
            path = os.path.join(self.folder, name)
            if os.path.exists(
                path
            ):  # a damaged one whose manifest can't be read: keep it, under another name
                os.rename(path, os.path.join(self.folder, "damaged-" + name))
            self.log(f"downloading checkpoint {name} of run {self.run_id} from the Hub")
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                self.publisher.download(f"{self.run_id}/{name}", temporary)
                if verify(temporary)["run_id"] != self.run_id:
                    raise CheckpointError(f"{name} on the Hub belongs to another run")
            except CheckpointError as e:
                damaged.append(f"{name} (Hub)")
                self.log(f"DAMAGED CHECKPOINT on the Hub, falling back to an older one: {e}")
                shutil.rmtree(temporary, ignore_errors=True)
                continue
            os.rename(temporary, path)
            sync(self.folder)
            return path
        return None

    def load(self, path: str, shared: dict, own: dict) -> tuple[dict, bool]:
        """Fill tensors in place from a checkpoint, and return (state, whether `own` was filled too).

        Keys, shapes and dtypes of `shared` must be the saved ones. `own` is filled only if world size, layout and all
        its entries on all ranks are the saved ones; else the caller derives it from `shared`."""
        agree, problem = self.agree, None
        try:
            manifest = read_manifest(path) if path in self.verified else verify(path, agree.rank, agree.world)
            with open(os.path.join(path, "state.json"), encoding="utf-8") as f:
                state = json.load(f)
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


def layout_of(shared: dict) -> str:
    """A digest of how tensors are spread over ranks: only the same layout can take `own` tensors back."""
    rows = [
        f"{key} {tuple(v.shape)} {v.placements} {v.device_mesh.mesh.tolist()}"
        for key, v in sorted(shared.items())
        if isinstance(v, DTensor)
    ]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def compare(saved: dict, shared: dict, path: str):
    """Raise CheckpointError unless keys, shapes and dtypes are the saved ones and nothing of a tensor is missing."""
    missing, unknown = sorted(set(shared) - set(saved)), sorted(set(saved) - set(shared))
    if missing or unknown:
        raise CheckpointError(f"{path} does not fit: it lacks {missing[:8]}, and has {unknown[:8]} in excess")
    for key, (dtype, shape, chunks) in saved.items():
        have = shared[key]
        if tuple(have.shape) != shape or DTYPES.get(dtype) != have.dtype:
            raise CheckpointError(
                f"{path}: {key} is {dtype} {shape}, this run's is {have.dtype} {tuple(have.shape)}"
            )
        covered = sum(torch.Size(c.shape).numel() for c in chunks)
        if covered != have.numel():
            raise CheckpointError(f"{path}: {key} is saved in part: {covered} of {have.numel()} values")


# --- the Hub -------------------------------------------------------------------------------------------------------


def published(publisher, run_id: str) -> list[str]:
    """Names of the run's checkpoints on the Hub that have a manifest, oldest first."""
    names = (path.split("/") for path in publisher.list(f"{run_id}/") if path.endswith("/manifest.json"))
    return sorted((n[1] for n in names if NAME.fullmatch(n[1])), key=lambda n: int(NAME.fullmatch(n)[3]))


class Uploads:
    """Rank 0's queue to the Hub: a thread that uploads finished folders one at a time, behind the run.

    Retries within an upload are the publisher's; what still fails stays in the queue and is tried again later. A
    newer `latest`, `best` or export takes the place of an older one that waits; milestones and `final` wait for good.
    Old checkpoints on the Hub go only after a newer one of their kind is there, with the sizes and hashes of its
    manifest. Receipts are kept in published.json, so that a restart knows what is where."""

    RETRY = 60.0, 900.0  # seconds until a failed upload is tried again: first, and at most

    def __init__(self, folder: str, run_id: str, publisher, keep: int, log):
        self.folder, self.run_id, self.publisher, self.keep, self.log = folder, run_id, publisher, keep, log
        self.record = os.path.join(folder, "published.json")
        try:
            with open(self.record, encoding="utf-8") as f:
                self.receipts = json.load(f)
        except (OSError, ValueError):
            self.receipts = {}  # at worst something is uploaded twice
        self.pending: dict[
            str, tuple[str, str]
        ] = {}  # {remote prefix: (folder, kind)}, first come first served
        self.active, self.known, self.failures, self.deadline = None, None, 0, None
        self.changed, self.thread = threading.Condition(), None
        for name in sorted(os.listdir(folder), key=lambda n: n.rpartition("-")[2]):
            if (match := NAME.fullmatch(name)) and f"{run_id}/{name}" not in self.receipts:
                try:
                    if read_manifest(os.path.join(folder, name))["run_id"] == run_id:
                        self.put(name, match[2])
                except (CheckpointError, OSError):
                    continue

    def put(self, name: str, kind: str, folder: str | None = None, prefix: str | None = None):
        """Queue a checkpoint of this run (or another sealed folder, under a prefix of its own)."""
        prefix = f"{self.run_id}/{name}" if prefix is None else prefix
        with self.changed:
            if kind not in ("milestone", "final"):
                self.pending = {p: v for p, v in self.pending.items() if v[1] != kind or p == self.active}
            self.pending.pop(prefix, None)
            self.pending[prefix] = folder or os.path.join(self.folder, name), kind
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def may_delete(self, name: str, onwards: list[str], keep: int) -> bool:
        """Whether rotation may delete a local checkpoint. `onwards`: it and all younger ones of its kind."""
        prefixes = [f"{self.run_id}/{n}" for n in onwards]
        if self.active == prefixes[0]:
            return False
        if any(p in self.receipts for p in prefixes):
            return True  # it, or a younger one that does its service, is safely on the Hub
        if len(onwards) > keep + SLACK:
            self.log(
                f"deleting {name} although the Hub has no copy: {keep + SLACK} younger ones wait to go there"
            )
            return True
        return False

    def _work(self):
        pause = self.RETRY[0]
        while True:
            with self.changed:
                while not self.pending and self.deadline is None:
                    self.changed.wait()
                if not self.pending:
                    return
                prefix, (folder, kind) = next(iter(self.pending.items()))
                self.active = prefix
            try:
                receipt = self._upload(prefix, folder, kind)
            except Exception as e:
                with self.changed:
                    self.active = None
                    if not os.path.isdir(folder):  # rotated away meanwhile
                        self.pending.pop(prefix, None)
                        continue
                    self.failures += 1
                    self.log(f"UPLOAD FAILED, number {self.failures}: {prefix}: {type(e).__name__}: {e}")
                    if self.pending.get(prefix) == (folder, kind):  # behind the others, if there are any
                        self.pending[prefix] = self.pending.pop(prefix)
                    if self.deadline is not None and time.monotonic() > self.deadline:
                        return
                    self.changed.wait(pause)
                    pause = min(2 * pause, self.RETRY[1])
                continue
            pause = self.RETRY[0]
            with self.changed:
                self.active = None
                self.pending.pop(prefix, None)
                self.receipts[prefix] = receipt
                self.changed.notify_all()
            try:
                write_text(self.record, to_json(self.receipts, "published.json"))
            except (OSError, CheckpointError) as e:
                self.log(f"{self.record}: {e}")

    def _upload(self, prefix: str, folder: str, kind: str) -> dict:
        """Upload a folder, see that the Hub has what its manifest says, then rotate there."""
        mine = set(published(self.publisher, self.run_id))
        if self.known is not None and mine - self.known:
            raise CheckpointError(
                f"another process publishes run {self.run_id} too (it wrote {sorted(mine - self.known)}): stop one"
            )
        self.known = mine
        manifest = read_manifest(folder)
        began = time.monotonic()
        receipt = self.publisher.upload(folder, prefix)
        there = self.publisher.list(f"{prefix}/" if prefix else "")
        for name, entry in manifest["files"].items():
            size, digest = there.get(f"{prefix}/{name}" if prefix else name, (None, None))
            if size != entry["size"] or digest not in (None, entry["sha256"]):
                raise CheckpointError(
                    f"{name} on the Hub differs from {folder}: size {size}, sha256 {digest}"
                )
        self.log(f"{prefix} is on the Hub, verified ({time.monotonic() - began:.0f} s)")
        name = os.path.basename(folder)
        if prefix == f"{self.run_id}/{name}":
            self.known.add(name)
        if kind in ROTATED:
            old = [n for n in published(self.publisher, self.run_id) if NAME.fullmatch(n)[2] == kind]
            for stale in old[: -self.keep]:
                try:
                    self.publisher.delete(f"{self.run_id}/{stale}")
                    self.receipts.pop(f"{self.run_id}/{stale}", None)
                except OSError as e:
                    self.log(f"{stale} could not be deleted on the Hub: {e}")
        return receipt

    def close(self, timeout: float) -> list[str]:
        """Give the queue `timeout` seconds; what is not on the Hub then."""
        end = time.monotonic() + timeout
        with self.changed:
            self.deadline = end
            self.changed.notify_all()
            while self.pending and (left := end - time.monotonic()) > 0 and self.thread.is_alive():
                self.changed.wait(left)
            return list(self.pending)


# --- weights without a process group -------------------------------------------------------------------------------


def newest_below(path: str) -> str:
    """The checkpoint folder that `path` means: itself, or the newest intact one of a run folder."""
    if os.path.exists(os.path.join(path, "manifest.json")):
        return path
    folders = [f for f in (os.path.join(path, "checkpoints"), path) if os.path.isdir(f)]
    names = [
        (int(m[3]), os.path.join(f, n)) for f in folders for n in os.listdir(f) if (m := NAME.fullmatch(n))
    ]
    for _, candidate in sorted(names, reverse=True):
        try:
            verify(candidate)
            return candidate
        except (CheckpointError, OSError) as e:
            print(f"skipping a damaged checkpoint: {e}")
    raise CheckpointError(f"{path} holds no usable checkpoint")


def read_model(path: str, prefix: str = "model.") -> tuple[dict, dict[str, torch.Tensor]]:
    """(the `config` of a checkpoint's state, {parameter name: whole tensor}), from a checkpoint or a run folder."""
    path = newest_below(path)
    verify(path)
    with open(os.path.join(path, "state.json"), encoding="utf-8") as f:
        config = json.load(f)["config"]
    tensors, chunks = {}, {}
    for key, (dtype, shape, pieces) in saved_tensors(os.path.join(path, "tensors")).items():
        if key.startswith(prefix):
            tensors[key] = torch.empty(shape, dtype=DTYPES[dtype])
            for piece in pieces:
                chunks.setdefault(piece.file, []).append((key, piece))
    for file, pieces in chunks.items():
        with safe_open(file, framework="pt") as f:
            for key, piece in pieces:
                at = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.shape, strict=True))
                tensors[key][at] = f.get_tensor(key)
    return config, {k.removeprefix(prefix): t for k, t in tensors.items()}


def export(folder: str, tensors: dict, config: dict, agree, file_bytes: int = EXPORT_FILE_BYTES):
    """Write model.safetensors (or several and an index) and config.json, whole tensors in the order of their names:
    the same bytes from any number of ranks. Called by all ranks; an earlier export is replaced when this is complete."""
    problem, files, temporary = None, [[]], folder.rstrip("/") + ".tmp"
    size = 0
    for name in sorted(tensors):
        tensor_bytes = tensors[name].numel() * tensors[name].element_size()
        if files[-1] and size + tensor_bytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor_bytes
    titles = ["model.safetensors"]
    if len(files) > 1:
        titles = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    try:
        text = to_json(config, "config")
        if agree.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            os.makedirs(temporary)
    except (OSError, CheckpointError) as e:
        problem = e
    agree.verdict(problem, "export")
    for title, names in zip(titles, files, strict=True):
        whole = {}
        for name in names:
            value = tensors[name].detach()
            value = (
                value.full_tensor() if isinstance(value, DTensor) else value
            )  # all ranks, one tensor at a time
            if agree.rank == 0:
                whole[name] = value.to("cpu").contiguous()
        try:
            if agree.rank == 0:
                save_file(whole, os.path.join(temporary, title), metadata={"format": "pt"})
                sync(os.path.join(temporary, title))
        except Exception as e:
            problem = CheckpointError(f"export to {folder}: {e}")
        agree.verdict(problem, "export")
    try:
        if agree.rank == 0:
            _finish_export(folder, temporary, text, dict(zip(titles, files, strict=True)))
    except OSError as e:
        problem = CheckpointError(f"export to {folder}: {e}")
    agree.verdict(problem, "export")


def _finish_export(folder: str, temporary: str, text: str, files: dict[str, list[str]]):
    """Rank 0: configuration, index, manifest, and the exchange of folders."""
    write_text(os.path.join(temporary, "config.json"), text)
    if len(files) > 1:
        total = sum(os.path.getsize(os.path.join(temporary, f)) for f in files)
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: f for f, names in files.items() for n in names},
        }
        write_text(os.path.join(temporary, "model.safetensors.index.json"), to_json(index, "index"))
    entries = {}
    for name in sorted(files_below(temporary)):
        entries |= describe(temporary, name)
    write_text(
        os.path.join(temporary, "manifest.json"), seal({"format": FORMAT, "kind": "export", "files": entries})
    )
    if os.path.exists(folder):
        shutil.rmtree(folder + ".old", ignore_errors=True)
        os.rename(folder, folder + ".old")
    os.rename(temporary, folder)
    sync(os.path.dirname(os.path.abspath(folder)))
    shutil.rmtree(folder + ".old", ignore_errors=True)


def read_export(folder: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """(config, {parameter name: tensor}) of an export, after verifying it."""
    manifest = verify(folder, others=True)
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    tensors = {}
    for name in sorted(manifest["files"]):
        if name.endswith(".safetensors"):
            tensors |= load_file(os.path.join(folder, name))
    return config, tensors
