"""What the checkpoint tests share: agreement over gloo, a state with every awkward tensor, a Hub in memory."""

import hashlib
import json
import os
import random
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import cpu_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from store import Store


class Ranks:
    """The agreement object, over the default group of the test's processes."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world, self.info = rank, world, {}

    def gather(self, value):
        answers = [None] * self.world
        dist.all_gather_object(answers, json.loads(json.dumps(value)))
        return answers

    def broadcast(self, value):
        return self.gather(value if self.rank == 0 else None)[0]

    def verdict(self, problem, what=""):
        problems = [p for p in self.gather(problem and f"{type(problem).__name__}: {problem}") if p]
        if problem:
            raise problem
        if problems:
            raise RuntimeError(f"{what}: {problems[0]}")

    def barrier(self):
        self.gather(None)

    def busy(self, seconds):
        pass

    def note(self, **info):
        self.info |= info


def reference(seed: int = 0) -> dict[str, torch.Tensor]:
    """The whole tensors. 7 rows split unevenly, 3 rows leave a fourth rank empty."""
    g = torch.Generator().manual_seed(seed)
    f32 = {"a": (7, 5), "b": (3, 2), "c": (8,), "wide": (16, 33)}
    state = {f"model.{k}": torch.randn(s, generator=g) for k, s in f32.items()}
    state["model.bf16"] = torch.randn(9, 4, generator=g).to(torch.bfloat16)
    state["model.fp8"] = torch.randn(8, 4, generator=g).to(torch.float8_e4m3fn)
    state["muon.a.momentum"] = torch.randn(7, 5, generator=g)
    state["nan"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    return state


def state_for(rank: int, world: int, seed: int = 0, replicas: int = 1) -> tuple[dict, dict]:
    """(shared, own) of a rank: `reference` in shards, beside plain tensors that all ranks hold alike."""
    mesh = cpu_mesh(world, (replicas, world // replicas) if replicas > 1 else None)
    placements = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]
    shared = {}
    for key, value in reference(seed).items():
        as_bytes = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        local = distribute_tensor(as_bytes, mesh, placements).to_local().clone()
        local = local.view(value.dtype) if value.dtype == torch.float8_e4m3fn else local
        whole = dict(shape=value.shape, stride=value.stride())
        shared[key] = DTensor.from_local(local, mesh, placements, run_check=False, **whole)
    shared["adamw.step"] = torch.tensor(11.0 + seed)  # 0-dim
    shared["count"] = torch.tensor(7 + seed)
    shared["transposed"] = (torch.arange(12.0) + seed).view(3, 4).t()  # not contiguous
    shared["mask"] = torch.tensor([True, False, seed == 0])
    shared["none"] = torch.empty(0, 3)
    codes = torch.full((4 + rank,), (10 * seed + rank) % 256, dtype=torch.uint8)
    return shared, {"codes": codes, "scale": torch.rand(1)[0] + seed}


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the local values: NaN equals NaN, -0.0 differs from 0.0."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_bits(state: dict) -> dict[str, bytes]:
    return {k: bits(v) for k, v in state.items()}


OPEN = []  # stores that nobody has closed yet


def open_folder(folder, rank=0, world=1, **options):
    """(Store, its log lines). What a test leaves open `one_rank_group` closes."""
    lines = []
    c = Store(str(folder), Ranks(rank, world), log=lines.append, **options)
    OPEN.append(c)
    plain = c.close
    c.close = lambda *a, **k: (OPEN.remove(c), plain(*a, **k))[1]
    return c, lines


def save(c, *steps, kind="latest"):
    """Save steps, whose values depend on the step, one after the other."""
    for step in steps:
        tensors = state_for(c.agree.rank, c.agree.world, seed=step)
        c.save(step, kind, *tensors, {"step": step, "config": {}}, wait=True)


def digest_of(folder: str) -> dict[str, str]:
    """{path: sha256} of every file below a folder."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def saved_once(folder, *steps, **options):
    """A closed folder with a checkpoint of each step."""
    c, _ = open_folder(folder, **options)
    save(c, *steps or (1,))
    assert not c.failures
    c.close()


def names_in(folder) -> list[str]:
    return sorted(n for n in os.listdir(folder) if n.startswith("step-"))


def damage(folder: str, rng: random.Random) -> str:
    """One single-bit flip, truncation or appended byte in one file of a checkpoint; says what."""
    file = rng.choice(sorted(digest_of(folder)))
    path = os.path.join(folder, file)
    size, kind = os.path.getsize(path), rng.choice(["flip", "flip", "flip", "truncate", "append"])
    with open(path, "r+b") as f:
        if kind == "flip":
            at = rng.randrange(size)
            f.seek(at)
            byte = f.read(1)[0] ^ (1 << rng.randrange(8))
            f.seek(at)
            f.write(bytes([byte]))
            return f"flip in byte {at} of {file}"
        if kind == "truncate":
            f.truncate(rng.randrange(size))
        else:
            f.seek(0, 2)
            f.write(b"\0" if file.endswith("safetensors") else rng.choice([b"\n", b" "]))
    return f"{kind} {file}"


class MemoryHub:
    """A publisher that keeps everything in memory, fails on demand, and notes what was asked of it."""

    def __init__(self):
        self.files, self.calls, self.failing, self.corrupt = {}, [], 0, False
        self.gate = threading.Event()
        self.gate.set()

    def _call(self, what):
        self.calls.append(what)
        self.gate.wait(30)
        if self.failing:
            self.failing -= 1
            raise OSError("503 from the Hub")

    def upload(self, folder, prefix):
        self._call(f"upload {prefix}")
        for name in digest_of(folder):
            data = Path(folder, name).read_bytes()
            self.files[f"{prefix}/{name}" if prefix else name] = data[:-1] + b"?" if self.corrupt else data
        return {"prefix": prefix, "commit": f"c{len(self.calls)}"}

    def list(self, prefix=""):
        found = {k: v for k, v in self.files.items() if not prefix or k.startswith(prefix + "/")}
        return {k: (len(v), hashlib.sha256(v).hexdigest()) for k, v in found.items()}

    def download(self, prefix, folder):
        self._call(f"download {prefix}")
        assert not os.path.exists(folder)
        for key, data in self.files.items():
            if key.startswith(prefix + "/"):
                path = Path(folder, key.removeprefix(prefix + "/"))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def delete(self, prefix):
        self._call(f"delete {prefix}")
        self.files = {k: v for k, v in self.files.items() if not k.startswith(prefix + "/")}
