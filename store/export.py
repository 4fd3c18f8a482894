"""Weights alone: an export's folder, and reading a model from an export or a checkpoint without a process group."""

import json
import os
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from . import sealed
from .folder import by_serial, serial_of
from .sealed import CheckpointError, describe, read_state, verify, write_text

FILE_BYTES = 5 * 10**9  # an export larger than this is split, as Hub repos usually are


def in_files(tensors: dict, file_bytes: int) -> dict[str, list[str]]:
    """{file: names of its tensors}, filled in the order of names."""
    files, size = [[]], 0
    for name in sorted(tensors):
        size += tensors[name].nbytes
        if files[-1] and size > file_bytes:
            files.append([])
            size = tensors[name].nbytes
        files[-1].append(name)
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


def export(folder: str, tensors: dict, config: dict, agree, file_bytes: int = FILE_BYTES):
    """Write model.safetensors (or several and an index) and config.json, whole tensors in the order of their names:
    the same bytes from any number of ranks. Called by all ranks; an earlier export is replaced when this is complete."""
    temporary, files = folder + ".tmp", in_files(tensors, file_bytes)
    text = sealed.to_json(config, "config")
    entries = {}  # hashed as written: reading 30 GB again would keep all ranks waiting

    def begin():
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)

    def write(file, whole):
        entries[file] = sealed.write_tensors(os.path.join(temporary, file), whole, {"format": "pt"})

    def finish():
        write_text(os.path.join(temporary, "config.json"), text)
        if len(files) > 1:
            total = sum(entry["size"] for entry in entries.values())
            where = {name: file for file, names in files.items() for name in names}
            index = sealed.to_json({"metadata": {"total_size": total}, "weight_map": where}, "index")
            write_text(os.path.join(temporary, "model.safetensors.index.json"), index)
        for name in sealed.files_below(temporary) - set(entries):
            entries.update(describe(temporary, name))
        manifest = {"format": sealed.FORMAT, "kind": "export", "files": dict(sorted(entries.items()))}
        write_text(os.path.join(temporary, "manifest.json"), sealed.seal(manifest))
        shutil.rmtree(folder + ".old", ignore_errors=True)
        if os.path.exists(folder):
            os.rename(folder, folder + ".old")
        os.rename(temporary, folder)
        sealed.sync(os.path.dirname(folder))
        shutil.rmtree(folder + ".old", ignore_errors=True)

    def on_rank_0(part, *args):
        problem = None
        try:
            if agree.rank == 0:
                part(*args)
        except Exception as e:
            problem = CheckpointError(f"export to {folder}: {e}")
        agree.verdict(problem, "export")

    on_rank_0(begin)
    for file, names in files.items():
        whole = {}
        for name in names:
            value = tensors[name].detach()
            if isinstance(value, DTensor):  # all ranks, tensor by tensor, on the mesh's device (cpu_offload!)
                value = value.to(value.device_mesh.device_type).full_tensor()
            if agree.rank == 0:
                whole[name] = value.to("cpu").contiguous()
        on_rank_0(write, file, whole)
    on_rank_0(finish)


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


def newest_below(path: str) -> str:
    """The intact checkpoint folder that `path` means: itself, or the newest one of a run folder."""
    if os.path.exists(os.path.join(path, "manifest.json")):
        verify(path)
        return path
    folders = [f for f in (os.path.join(path, "checkpoints"), path) if os.path.isdir(f)]
    found = [(serial_of(n), os.path.join(f, n)) for f in folders for n in by_serial(os.listdir(f))]
    for _, candidate in sorted(found, reverse=True):
        try:
            verify(candidate)
            return candidate
        except (CheckpointError, OSError) as e:
            print(f"skipping a damaged checkpoint: {e}")
    raise CheckpointError(f"{path} holds no usable checkpoint")


def read_model(path: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """(the `config` of a checkpoint's state, {parameter name: whole tensor}), from a checkpoint or a run folder."""
    path = newest_below(path)
    config = read_state(path)["config"]
    tensors, chunks = {}, {}
    for key, (dtype, shape, pieces) in sealed.saved_tensors(os.path.join(path, "tensors")).items():
        if key.startswith("model."):
            tensors[key] = torch.empty(shape, dtype=sealed.DTYPES[dtype])
            for piece in pieces:
                chunks.setdefault(piece.file, []).append((key, piece))
    for file, pieces in chunks.items():
        with safe_open(file, framework="pt") as f:
            for key, piece in pieces:
                at = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.shape, strict=True))
                tensors[key][at] = f.get_tensor(key)
    return config, {k.removeprefix("model."): t for k, t in tensors.items()}
