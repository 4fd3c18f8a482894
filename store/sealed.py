"""Sealed folders: what a checkpoint or an export looks like on disk, and how to read one without a process group.

A folder is sealed by its manifest.json: size and sha256 of every other file, and the manifest's own digest. One flipped
bit, one missing or one additional byte anywhere, and `verify` refuses it. Tensors are safetensors, all else is JSON:
nothing that is read here can run code.

References: the safetensors format (8 bytes of header length, a JSON header, raw values); its DCP_SHARDING_INFO metadata
is where torch.distributed.checkpoint notes which part of the whole tensor a file holds.
"""

import hashlib
import json
import os
import re
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

FORMAT = "nova-checkpoint-1"
# step, kind, serial number of the save
NAME = re.compile(r"step-(\d{8,})-(latest|best|milestone|final)-(\d{4,})")
DTYPES = {  # safetensors' names
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WRITE_BYTES = 2**24


class CheckpointError(RuntimeError):
    """A checkpoint that can't be used, a folder that is not this run's, or state that can't be saved."""

    exit_code = 74


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
        path = os.path.join(folder, name)
        size = os.path.getsize(path) if os.path.isfile(path) and not os.path.islink(path) else None
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


def read_state(folder: str) -> dict:
    """The state.json of a checkpoint."""
    with open(os.path.join(folder, "state.json"), encoding="utf-8") as f:
        return json.load(f)


def write_tensors(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict:
    """Write host tensors as safetensors, synced; {"size": bytes, "sha256": of what should have been written}.

    The library's own writer copies everything twice and holds the interpreter while it does; this one streams from
    the tensors' memory, hashes on the way, and lets training run."""
    # large items first: all are aligned
    names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
    header, at = {"__metadata__": metadata}, 0
    for name in names:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as f:
        parts = (memoryview(tensors[n].contiguous().reshape(-1).view(torch.uint8).numpy()) for n in names)
        for part in (memoryview(len(text).to_bytes(8, "little") + text), *parts):
            for start in range(0, len(part), WRITE_BYTES):
                block = part[start : start + WRITE_BYTES]
                digest.update(block)
                f.write(block)
            size += len(part)
        f.flush()
        os.fsync(f.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


class Writer(HuggingFaceStorageWriter):
    """DCP's writer of safetensors, with this project's way of putting a file on the disk."""

    def __init__(self, folder: str, rank: int):
        super().__init__(os.path.join(folder, "tensors"), save_distributed=True)
        self.folder, self.name, self.entries = folder, f"tensors/rank-{rank:05d}.safetensors", {}

    def write_data(self, plan, planner) -> torch.futures.Future:
        tensors = {item.index.fqn: planner.resolve_data(item).detach() for item in plan.items}
        assert len(tensors) == len(plan.items), "DCP planned two chunks of one tensor for one rank"
        if tensors:  # a rank whose shards are all empty writes no file
            offsets = {i.index.fqn: {"saved_offsets": list(i.tensor_data.chunk.offsets)} for i in plan.items}
            metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            self.entries[self.name] = write_tensors(os.path.join(self.folder, self.name), tensors, metadata)
        future = torch.futures.Future()
        future.set_result([])
        return future


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
