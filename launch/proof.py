"""What must be proven before a long run may go on: the machine, its collectives, the weights, the run's own first step.

Each check can fail, and then stops all ranks before anything is saved. They get an agreement object and values, and know
nothing of the model, the optimizers or the data. Reference for checking every element: NVIDIA's nccl-tests.
"""

import functools
import glob
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import time
import warnings

import torch
import torch.distributed as dist

from kernels import local

from .failures import NOBODY, StartupError

NEXT = "Next: nvidia-smi topo -m; dmesg -T | grep Xid; NOVA_NCCL_SAFE=1 avoids the peer-to-peer paths"
BAND = (0.6, 1.3)  # singular values of an orthogonalised block: five Polar Express steps end in [0.86, 1.14]
WELL = 0.02  # directions above this share of a gradient's norm must be orthogonalised; weaker ones may lag


def check_equal(agree, what: str, value):
    """The value must be the same on all ranks. Names the ranks that differ from the majority, and in what."""
    values = agree.gather(value)
    texts = [json.dumps(v, sort_keys=True) for v in values]
    usual = max(texts, key=texts.count)
    odd = [r for r, t in enumerate(texts) if t != usual]
    if not odd:
        return
    other = texts.index(usual)
    clear = texts.count(usual) * 2 > len(texts)  # one against one: nobody can say who is right
    mine, theirs = values[odd[0]], values[other]
    if isinstance(mine, dict):
        names = [k for k in {**theirs, **mine} if mine.get(k) != theirs.get(k)]
        mine, theirs = ({k: v.get(k) for k in names} for v in (mine, theirs))
    mine, theirs = (json.dumps(v, sort_keys=True)[:300] for v in (mine, theirs))
    who = f"rank {odd[0]} has" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} have"
    them = "the others" if clear else f"rank {other}"
    raise StartupError(f"{what} differs: {who} {mine}, {them} {theirs}", rank=odd[0] if clear else NOBODY)


@functools.cache
def code() -> dict[str, str]:
    """{file: sha256} of the code of this project, read once: what runs, whatever is edited meanwhile."""
    root, found = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), {}
    rooms = [os.path.dirname(n) for n in glob.glob("*/__init__.py", root_dir=root)]
    files = [n for room in ("", *rooms) for n in glob.glob(os.path.join(room, "*.py"), root_dir=root)]
    for name in sorted(files):
        with open(os.path.join(root, name), "rb") as f:
            found[name] = hashlib.sha256(f.read()).hexdigest()
    return found


def code_digest() -> str:
    """One sha256 of all of it, kept in each checkpoint."""
    return hashlib.sha256(json.dumps(code()).encode()).hexdigest()


def versions(device) -> dict:
    """What must be alike on all ranks: packages, GPU, driver, NCCL, and the code of this folder."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "device": device.type}
    for package in ("torchao", "bitsandbytes", "safetensors", "huggingface_hub", "numpy"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    facts |= {name: digest[:12] for name, digest in code().items()}
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        facts |= {"gpu": p.name, "sm": f"{p.major}.{p.minor}", "memory": f"{p.total_memory / 2**30:.0f} GiB"}
        facts |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        if os.path.exists(driver := "/proc/driver/nvidia/version"):
            with open(driver, encoding="utf-8") as f:
                facts["driver"] = f.readline().strip()
    return facts


def check_versions(agree, settings, log=print):
    """Versions, code and settings are equal on all ranks."""
    facts = versions(agree.device)
    check_equal(agree, "the environment", facts)
    check_equal(agree, "the settings", settings.as_dict())
    if agree.rank == 0:
        log("environment: " + ", ".join(f"{k} {v}" for k, v in facts.items() if not k.endswith(".py")))
        log(f"environment and settings {settings.digest()[:12]} equal on {agree.world} ranks")


PROBE = {"cuda": 4096, "cpu": 256}  # rows of the square matrices that a device is measured with


def matmul_bits(device) -> tuple[str, bool]:
    """(hash of the bits, finite) of a product of two fixed random bf16 matrices."""
    size = PROBE[device.type]
    generator = torch.Generator().manual_seed(1234)  # on the CPU: the same numbers on any device
    a, b = (torch.randn(size, size, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    product = a @ b
    bits = product.cpu().view(torch.int16).numpy().tobytes()
    return hashlib.sha256(bits).hexdigest(), bool(product.isfinite().all())


def matmul_rate(device, repeats: int = 50) -> float:
    """TFLOP/s of bf16 matrix products: the best of five rounds, since another thread of the host may delay one."""
    size = PROBE[device.type]
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(5):  # the first rounds warm clocks and caches
        start = time.perf_counter()
        for _ in range(repeats):
            a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 * repeats / min(seconds) / 1e12


def check_device(agree, log=print):
    """Each device repeats its own bits, gives the same bits as all others, and is not much slower than they are."""
    gpu = agree.device.type == "cuda"
    results = [matmul_bits(agree.device) for _ in range(3)]
    wrong = "gives other bits each time" if len(set(results)) > 1 else ""
    wrong = wrong if results[0][1] else "of finite numbers is not finite"
    problem = StartupError(f"rank {agree.rank}: a matrix product {wrong}. {NEXT}") if wrong else None
    agree.verdict(problem, "device check")
    check_equal(agree, "the product of two fixed matrices", results[0][0])
    rates = agree.gather(matmul_rate(agree.device, 50 if gpu else 10))
    usual, slow = statistics.median(rates), min(range(agree.world), key=rates.__getitem__)
    text = f"{usual:.1f} TFLOP/s in bf16 (median), slowest rank {slow} with {rates[slow]:.1f}"
    if gpu and rates[slow] < 0.6 * usual:
        text += ": is another process on it, or is it throttled?"
        raise StartupError(f"device check: {text} {NEXT}", rank=slow)
    if agree.rank == 0:
        text += " SLOW" if rates[slow] < 0.9 * usual else ""
        log(f"devices: same bits on {agree.world} ranks; {text}")


def slow_links(count: int, peer: callable, topology: str | None) -> list[str]:
    """What is wrong between the GPUs of one node: no peer access, or no NVLink in the text of `nvidia-smi topo -m` (NV18
    is 18 NVLinks; PIX, PXB, PHB, NODE and SYS are not NVLink)."""
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    wrong = [f"GPU {i} cannot access GPU {j}" for i, j in pairs if not peer(i, j)]
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", topology or "").splitlines()]
    kinds = {row[0]: row[1:] for row in rows if row}
    for i, j in pairs:
        kind = kinds.get(f"GPU{i}", [])[j : j + 1]
        if kind and not kind[0].startswith("NV"):
            wrong.append(f"GPU {i} to GPU {j}: {kind[0]}, not NVLink")
    return wrong


def check_links(agree, settings, log=print):
    """All GPUs of each node reach each other directly over NVLink; the PCIe fallback is ten times slower."""
    if agree.device.type != "cuda":
        return
    problem, count = None, torch.cuda.device_count()
    if agree.local_rank == 0 and count > 1:
        topology = None
        if "CUDA_VISIBLE_DEVICES" not in os.environ:  # nvidia-smi shows, and numbers, all GPUs
            try:
                command = ["nvidia-smi", "topo", "-m"]
                topology = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
            except (OSError, subprocess.SubprocessError):
                pass
        wrong = slow_links(count, torch.cuda.can_device_access_peer, topology)
        text = f"{len(wrong)} slow links on {socket.gethostname()}: {'; '.join(wrong[:4])}"
        if wrong and not settings.allow_slow_links:
            problem = StartupError(f"{text}. {NEXT}; --allow_slow_links=true accepts it")
        elif agree.rank == 0:
            seen = "seen" if topology else "not checked"
            log(text if wrong else f"links: {count} GPUs, all pairs direct, NVLink {seen}")
    agree.verdict(problem, "links")


def check_storage(agree, out_dir: str, need: int, log=print):
    """out_dir can be written, read back, and holds `need` bytes (all checkpoints that may lie there at once)."""
    problem, path, token = None, os.path.join(out_dir, f".probe.{agree.rank}"), os.urandom(1 << 20)
    try:
        os.makedirs(out_dir, exist_ok=True)
        with open(path, "wb") as f:
            f.write(token)
            f.flush()
            os.fsync(f.fileno())
        with open(path, "rb") as f:
            if f.read() != token:
                problem = "a file reads back differently"
        os.remove(path)
        free = shutil.disk_usage(out_dir).free
        found = f"{free / 1e9:.3g} GB free, {need / 1e9:.3g} GB are needed"
        if free < need:
            cure = "set --out_dir to a larger disk, lower ckpt_keep, or delete old checkpoints there"
            problem = f"{found} for its checkpoints: {cure}"
        elif agree.rank == 0:
            log(f"storage: {out_dir} read back, {found}")
    except OSError as e:
        problem = e.strerror or str(e)
    problem = problem and f"{out_dir} on {socket.gethostname()}: {problem}"
    agree.verdict(StartupError(problem, exit_code=74) if problem else None, "storage")


def pattern(rank: int, count: int, device, shift: int = 0):
    """(count,) int32 that tells rank and position: a moved, swapped or stale element shows."""
    place = torch.arange(shift, shift + count, device=device, dtype=torch.int32)
    return place * 7919 % 1_000_003 * 1_021 + rank * 101


def check_collectives(agree, device, groups: dict | None = None, log=print):
    """Each collective on the real groups ({name: group}, all ranks in one of each name): every element is compared with a
    pattern of rank and position, GB/s of the largest size reported."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 28
    top = min(1 << 28, min(agree.gather(free)) // 64)  # bytes of a whole tensor; the test holds some 20
    problems, lines = [], []
    for name, group in (groups or {"world": None}).items():
        for size in (1 << 12, 1 << 20, top):
            wrong, speed = collective_round(device, group, size)
            problems += [f"{name} group, {size} bytes: {w}" for w in wrong]
        lines.append(f"{name}: " + ", ".join(f"{op} {gb:.2f}" for op, gb in speed.items()))
    text = f"rank {agree.rank} received wrong data: {'; '.join(problems[:3])}. {NEXT}"
    agree.verdict(StartupError(text) if problems else None, "collective self-test")
    for line in lines if agree.rank == 0 else ():
        log(f"collectives, all elements right, GB/s at {top / 2**20:.0f} MiB: {line}")


def collective_round(device, group, size: int) -> tuple[list[str], dict[str, float]]:
    """Run each collective on tensors of `size` bytes in all. -> (what was wrong here, {collective: GB/s})"""
    world, me = dist.get_world_size(group), dist.get_rank(group)
    root = dist.get_process_group_ranks(group or dist.group.WORLD)[-1]
    part = max(1, size // 4 // world) + 1  # odd sizes: not a multiple of a vector or a page
    whole, place = part * world, slice(me * part, (me + 1) * part)

    def terms(rank):  # of a sum that fp32 holds exactly: integers below 2^24
        return (pattern(rank, whole, device) % 1009).float()

    mine, total = terms(me), sum((terms(r) for r in range(world)), torch.zeros(whole, device=device))
    gathered = torch.cat([pattern(r, part, device) for r in range(world)])
    exchanged = torch.cat([pattern(r, part, device, shift=me) for r in range(world)])
    to_send = torch.cat([pattern(me, part, device, shift=r) for r in range(world)])
    told = pattern(world - 1, whole, device)
    cases = {  # collective: (what is there before, what must be there after, what else the call takes)
        "all_gather_into_tensor": (torch.zeros_like(gathered), gathered, [pattern(me, part, device)]),
        "reduce_scatter_tensor": (torch.zeros(part, device=device), total[place], [mine]),
        "all_reduce": (mine, total, []),
        "broadcast": (told if me == world - 1 else torch.zeros_like(told), told, [root]),
        "all_to_all_single": (torch.zeros_like(exchanged), exchanged, [to_send]),
    }

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wrong, speed = [], {}
    # All of them, three times, whatever is found: ranks must stay in step until the verdict.
    for name, (before, want, rest) in cases.items():
        for _ in range(3):
            got, more = before.clone(), [v.clone() if torch.is_tensor(v) else v for v in rest]
            wait()
            start = time.perf_counter()
            with warnings.catch_warnings():  # torch 2.13 renames two of them; 2.11 has the old names only
                warnings.simplefilter("ignore", FutureWarning)
                getattr(dist, name)(got, *more, group=group)
            wait()
            seconds = time.perf_counter() - start
            if not torch.equal(got, want):
                i, count = int((got != want).nonzero()[0]), int((got != want).sum())
                values = f"{got[i].item()}, not {want[i].item()} (part of rank {i // part})"
                wrong.append(f"{name}: {count} of {got.numel()} elements, first at {i}: {values}")
        speed[name] = whole * 4 / seconds / 1e9
    return wrong, speed


@torch.no_grad()
def fingerprint(named_parameters) -> dict[str, str]:
    """{name: 64-bit hash of the bits of this rank's part}; it changes when two values change places, and when all move by
    the same amount up or down, as in AdamW's first step: a plain sum sees neither."""
    totals = {}
    for name, p in named_parameters:
        flat = local(p).contiguous().flatten()
        bits = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for start in range(0, bits.numel(), 2**24):  # int64 arithmetic wraps, like C's
            part = bits[start : start + 2**24].to(torch.int64)
            place = torch.arange(start, start + part.numel(), device=flat.device)
            mixed = (part ^ (place * 0x1E3779B97F4A7C15)) * 0x3F58476D1CE4E5B9
            total += ((mixed ^ (mixed >> 29)) * 0x14D049BB133111EB).sum()
        totals[name] = total
    values = torch.stack(list(totals.values())).tolist()
    return {name: f"{v & (2**64 - 1):016x}" for name, v in zip(totals, values, strict=True)}


def check_weights(agree, named_parameters, shard: int, log=print):
    """Weights are finite, and ranks that hold the same `shard` (the replicas of an HSDP run) hold the same bits."""
    parameters = list(named_parameters)
    prints = fingerprint(parameters)
    everyone = agree.gather([shard, prints])
    for rank, (other_shard, other) in enumerate(everyone):
        odd = [name for name in prints if other[name] != prints[name]] if other_shard == shard else []
        if odd:
            raise StartupError(f"ranks {agree.rank} and {rank} are replicas but differ in {odd[:3]}", rank)
    bad = [name for name, p in parameters if not local(p).isfinite().all()]
    agree.verdict(StartupError(f"weights that are not finite: {bad[:3]}") if bad else None, "model check")
    whole = hashlib.sha256(str(everyone).encode()).hexdigest()
    log(f"weights: {len(prints)} tensors, finite; fingerprint of all ranks' bits {whole[:16]}")


class FirstStepProof:
    """Watches the run's own first step: Muon calls `watch`, its methods below are called in their order.

    `blocks`: how many Muon must orthogonalise. `dense` is {parameter: rows of it that must have a gradient}: a head cut off
    from the loss shows there even when it is tied to the embedding, which the batch's tokens reach by themselves.
    """

    def __init__(self, agree, named_parameters, blocks: int, dense: dict[str, int] | None = None, log=print):
        self.agree, self.parameters, self.blocks = agree, list(named_parameters), blocks
        self.dense, self.log = dense or {}, log
        self.names, self.norms, self.samples = [], [], {}
        self.facts = {}  # {parameter: counts of this rank, which `conclude` adds up over ranks}

    def watch(self, name: str, G, factor):
        """Muon calls it on the owner of each block with what went in and its orthogonal factor, both (rows, columns).
        Nothing is computed on the host here: other ranks wait in the exchange."""
        self.names.append(name)
        self.norms.append((factor.float().square().sum(), min(factor.shape)))
        kind = re.sub(r"\d+", "N", name.split("[")[0]) + name.partition("[")[2]
        if kind not in self.samples:
            self.samples[kind] = (name, G.detach().clone(), factor.detach().clone())

    def before_update(self):
        """After backward and clip: how many elements of each gradient are not zero, or not finite."""
        self.bits = fingerprint(self.parameters)
        for name, p in self.parameters:
            g = torch.zeros(1, 1) if p.grad is None else local(p.grad)
            fact = dict(gradient=int(g.count_nonzero()), wild=int(not g.isfinite().all()))
            fact["rows"] = int((g != 0).flatten(1).any(1).sum()) if name in self.dense else 0
            self.facts[name] = fact | dict(largest=float(g.abs().max()) if g.numel() else 0.0)

    def after_update(self, rate: float, epsilon: float = 1e-8):
        """After the optimizers: which parameters moved. `rate` is the smallest rate of the step, `epsilon` AdamW's, whose
        first step is rate * g / (|g| + epsilon). Standing still is no fault where the step is below the fp32 resolution of
        a parameter's values (norm scales of 1 early in a long warm-up), or where gradients are far below epsilon (lambda,
        which the head norm cancels at first)."""
        bits = fingerprint(self.parameters)
        for name, p in self.parameters:
            values, gradient = local(p), self.facts[name].pop("largest")
            largest = float(values.abs().max()) if values.numel() else 0.0
            step = rate * gradient / (gradient + epsilon)
            self.facts[name]["moved"] = int(bits[name] != self.bits[name])
            self.facts[name]["may_stand"] = int(step < largest * 2.0**-22)

    def conclude(self, loss: float, grad_norm: float, expected_loss: float | None = None):
        """Print one line for each part; raise StartupError or RankFailed on all ranks if any part fails. `loss` is in
        nats/token; expected_loss is None where the weights are not fresh."""
        near = expected_loss is None or abs(loss - expected_loss) <= 0.2
        fresh = "" if expected_loss is None else f", a fresh model starts at {expected_loss:.4f} ± 0.2"
        parts = [
            *self._counts(),
            (math.isfinite(grad_norm) and grad_norm > 0, f"gradient norm {grad_norm:.4g}"),
            (math.isfinite(loss) and near, f"loss {loss:.4f}{fresh}"),
        ]
        here, found = self._matrices()
        lines = [text for _, text in parts] + [text for text in self.agree.gather(found) if text]
        for line in lines if self.agree.rank == 0 else ():
            self.log(f"first step: {line}")
        self.agree.verdict(StartupError("; ".join(here)) if here else None, "first step: Muon")
        if problems := [text for holds, text in parts if not holds]:
            raise StartupError("first step: " + "; ".join(problems), rank=NOBODY)
        self.samples.clear()

    def _counts(self) -> list[tuple[bool, str]]:
        """[(does it hold, in words)] of what is added up over all ranks: blocks, gradients, moves, dense rows."""
        mine = [float(v) for fact in self.facts.values() for v in fact.values()]
        (blocks, *sums) = self.agree.control([], [float(len(self.names)), *mine])[1]
        values = iter(sums)
        total = {name: {key: next(values) for key in fact} for name, fact in self.facts.items()}
        parts = [(blocks == self.blocks, f"Muon orthogonalised {blocks:.0f} blocks, {self.blocks} expected")]
        for what, names in (
            ("without a gradient", [n for n, t in total.items() if not t["gradient"]]),
            ("with a non-finite gradient", [n for n, t in total.items() if t["wild"]]),
            ("that did not move", [n for n, t in total.items() if not t["moved"] and not t["may_stand"]]),
        ):
            more = f": {', '.join(names[:5])}" if names else ""
            parts.append((not names, f"{len(names)} of {len(total)} parameters {what}{more}"))
        for name, wanted in self.dense.items():
            rows = total[name]["rows"]
            parts.append((rows >= wanted, f"{name}: {rows:.0f} rows with a gradient, {wanted} expected"))
        return parts

    def _matrices(self) -> tuple[list[str], str]:
        """This rank's blocks: norms of all of them, singular values of one of each kind, one oracle comparison."""
        problems = []
        for name, (square, smaller) in zip(self.names, self.norms, strict=True):
            rms = math.sqrt(max(0.0, float(square)) / smaller)  # of the singular values
            if not (0 < rms <= BAND[1]):
                problems.append(f"{name}: singular values of RMS {rms:.3g} are outside {BAND}")
        if not self.samples:
            return problems, ""

        def said(low, high, off):
            return f"singular values {low:.3g} to {high:.3g} (band {BAND}), distance {off:.3g} from U V^T (0.05 allowed)"

        found = {name: against_oracle(G, factor) for name, G, factor in self.samples.values()}
        for name, (low, high, off) in found.items():
            if not (low >= BAND[0] and high <= BAND[1] and off <= 0.05):
                problems.append(f"{name}: not orthogonalised: {said(low, high, off)}")
        lows, highs, offs = zip(*found.values(), strict=True)
        worst = said(min(lows), max(highs), max(offs))
        return problems, f"rank {self.agree.rank}: {len(found)} sampled blocks of {len(self.names)}: {worst}"


def against_oracle(G, factor) -> tuple[float, float, float]:
    """Compare `factor` F with G = U S V^T, computed here in float64 from the eigenvectors of G G^T, independently of Muon's
    iteration. -> (smallest of u^T F v over the well-conditioned directions, largest singular value of F, RMS of the
    off-diagonal part of U^T F V per direction)."""
    G, F = (t.double() if t.shape[0] <= t.shape[1] else t.double().mT for t in (G, factor))  # (m, n), m <= n
    values, U = torch.linalg.eigh(G @ G.mT)
    S = values.clamp_min(0).sqrt()
    keep = S > WELL * S.square().sum().sqrt()
    U, S = U[:, keep], S[keep]
    if not S.numel() or not F.isfinite().all():
        return 0.0, math.inf, math.inf
    D = U.mT @ F @ (G.mT @ U / S)  # (k, k); the identity for an exact orthogonal factor
    off = (D - D.diag().diag()).square().sum().div(len(S)).sqrt()
    highest = torch.linalg.eigvalsh(F @ F.mT)[-1].clamp_min(0).sqrt()
    return float(D.diag().min()), float(highest), float(off)
