"""How the bench measures: contenders that take turns, rows, peak bytes, ranks; Nova and its peers as contenders."""

import json
import math
import os
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from settings import Settings, assign, check

from . import peers

# Models of equal parameters: Nova with half as many kv heads and 3 d of SwiGLU has GPT's 12 d^2 a block. `0.8M` is
# nanoGPT's recipe for a CPU, 768 tokens a step; `12M` has the blocks and the 16,384 tokens a step of its
# config/train_shakespeare_char.py. `accumulate`: micro-batches per optimizer step, the same for all contenders.
SIZES = {
    "tiny": dict(vocab=65, d=32, layers=2, heads=2, context=16, batch=4, accumulate=(1,)),
    "0.8M": dict(vocab=65, d=128, layers=4, heads=4, context=64, batch=12, accumulate=(1,)),
    "12M": dict(vocab=4096, d=384, layers=6, heads=6, context=256, batch=8, accumulate=(8,)),
}


@dataclass
class Row:
    """One comparison. Ratio > 1 where ours is ahead; `facts`: more figures."""

    case: str
    ours: str
    peer: str
    ours_value: float
    peer_value: float
    unit: str
    ratio: float
    spread: float
    n: int
    facts: dict

    @property
    def verdict(self) -> str:
        if not 0 < self.ratio < math.inf:
            return "not reached"
        if abs(self.ratio - 1) <= self.spread:
            return "inconclusive"
        return "ahead" if self.ratio > 1 else "behind"


class Report:
    """Prints rows as they come and keeps them."""

    def __init__(self, as_json=False):
        self.as_json, self.rows = as_json, []

    def row(self, row: Row):
        self.rows.append(row)
        values = {**vars(row), **row.facts, "verdict": row.verdict}
        del values["facts"]
        text = (
            f"{row.case:22} {row.ours}={short(row.ours_value)}{row.unit} {row.peer}={short(row.peer_value)}{row.unit} "
            f"ratio={row.ratio:.3f} spread={row.spread:.2f} n={row.n} {pairs(row.facts)} {row.verdict}"
        )
        self.line(values, text)

    def fact(self, case: str, **facts):
        """A line without a comparison."""
        self.line({"case": case, **facts}, f"{case:22} {pairs(facts)}")

    def line(self, values: dict, text: str):
        unknown = [k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
        values |= dict.fromkeys(unknown)  # JSON knows no infinity
        print(json.dumps(values) if self.as_json else f"bench {text}", flush=True)


def pairs(facts: dict) -> str:
    return " ".join(f"{k}={short(v)}" for k, v in facts.items())


def short(value) -> str:
    """Four significant figures; text without spaces, so that a row splits at blanks."""
    if isinstance(value, float):
        return f"{value:,.0f}".replace(",", "") if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace(" ", "_")


def measure(contenders: dict, rounds: int, seconds=0.2, sync=lambda: None, clock="wall") -> dict:
    """{name: seconds per call, one value a round} of {name: callable}, in turns, after one warm-up call each. A value
    averages as many calls as fill `seconds`. clock="cpu" counts this process's own seconds on all its threads: what a
    busy machine takes away from it is left out, waiting for disks and other processes too."""
    now = time.perf_counter if clock == "wall" else time.process_time
    calls, order = {}, list(contenders)
    for name in order:
        contenders[name]()
        sync()
        start = now()
        contenders[name]()
        sync()
        calls[name] = max(1, math.ceil(seconds / (now() - start + 1e-9)))
    times = {name: [] for name in order}
    for r in range(rounds):
        for name in order if r % 2 == 0 else reversed(order):
            start = now()
            for _ in range(calls[name]):
                contenders[name]()
            sync()
            times[name].append((now() - start) / calls[name])
    return times


def compare(case: str, times: dict, ours: str, peer: str, work: float, unit: str, **facts) -> Row:
    """A Row from `measure`'s seconds; a contender's value is work / median seconds, or the seconds where work is 0."""
    ratios = sorted(p / o for o, p in zip(times[ours], times[peer], strict=True))
    seconds = {name: statistics.median(times[name]) for name in (ours, peer)}
    a, b = (work / seconds[name] if work else seconds[name] for name in (ours, peer))
    return Row(case, ours, peer, a, b, unit, statistics.median(ratios), spread(ratios), len(ratios), facts)


def spread(values: list[float]) -> float:
    """10-90 % range over the median. One value has no known spread: infinite, so that its row is inconclusive."""
    if len(values) < 2 or not all(0 < v < math.inf for v in values):
        return math.inf
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / statistics.median(values)


def peak_bytes(function) -> int:
    """Largest sum of live CPU allocations that `function` makes, above what was there before: a count, not a sample."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # its start and stop lines would mix with the rows
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def matmul_peak(dtype, n: int = 2048, clock: str = "wall") -> float:
    """Best FLOP/s of an (n, n) matmul: what this machine can do at all."""
    a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
    return 2 * n**3 / min(measure({"matmul": lambda: a @ b}, 3, clock=clock)["matmul"])


def environment(report: Report, clock: str):
    """The machine, once a run: figures of different machines are not comparable."""
    with open("/proc/cpuinfo") as f:
        info = dict(re.findall(r"^(model name|flags)\s*: (.*)$", f.read(), re.M))
    units = [u for u in ("avx512f", "avx512_bf16", "amx_bf16") if u in info.get("flags", "").split()]
    cpu = f"{info.get('model name', 'unknown')} {'+'.join(units)}"
    report.fact(
        "env", cpu=cpu, cores=os.cpu_count(), torch=torch.__version__, load=round(os.getloadavg()[0], 2),
        peak_fp32_GF=matmul_peak(torch.float32, clock=clock) / 1e9, peak_bf16_GF=matmul_peak(torch.bfloat16, clock=clock) / 1e9, clock=clock,
    )  # fmt: skip


def nova_settings(size: dict, **changes) -> Settings:
    """Nova at the parameters of a SIZES entry."""
    values = dict(
        vocab_size=size["vocab"], d_model=size["d"], n_layers=size["layers"], n_heads=size["heads"],
        n_kv_heads=max(1, size["heads"] // 2), ffn_hidden=3 * size["d"], max_len=size["context"],
        sequences_per_step=size["batch"], micro_batch=size["batch"], use_compile=False, use_fp8="off", adamw="fp32",
        ctx_warmup_steps=0, warmup_steps=100, total_steps=2000, muon_lr=6e-3, lr=3e-3,
    )  # fmt: skip
    settings = Settings()
    for name, value in {**values, **changes}.items():
        assign(settings, name, value, "bench")
    check(settings)
    return settings


def mesh(device="cpu"):
    """The process group that a run makes, here of one rank unless one exists, as a mesh."""
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.init_device_mesh(device, (dist.get_world_size(),))


def quiet(*_):
    """A log that drops its lines."""


class NovaTrainer:
    """Nova as the training loop drives it: FSDP2, bf16 matmuls on fp32 masters, Muon and AdamW. Same calls as
    peers.Trainer. `sharded=False` is the bare module in fp32, as sample.py uses it."""

    def __init__(self, settings: Settings, device="cpu", sharded=True):
        import model
        import muon

        self.muon, self.settings = muon, settings
        if sharded:
            self.model = model.build_model(settings, mesh(device), torch.device(device), log=quiet)
        else:
            self.model = model.Nova(settings)
            model.init_weights(self.model, settings)
        self.optimizers = muon.build_optimizers(self.model, settings, log=quiet)
        self.flops = model.flops_per_token(settings, settings.max_len)

    def micro(self, x, y):
        self.model.zero_grad(set_to_none=True)
        loss = self.model(x, y)[0] / y.numel()
        loss.backward()
        return loss

    def update(self, share: float = 1.0, momentum: float | None = None):
        s = self.settings
        self.muon.set_rates(self.optimizers, share * s.muon_lr, share * s.lr, momentum or s.muon_momentum)
        self.muon.clip_grads(self.model, s.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def evaluate(self, x, y) -> float:
        parts = zip(x.split(50), y.split(50), strict=True)
        return sum(self.model(a, b)[0].item() for a, b in parts) / y.numel()


def alone():
    """The agreement object of a run of one process."""

    def verdict(problem, what=""):
        if problem:
            raise problem

    ranks = dict(rank=0, world=1, local_rank=0, local_world=1, barrier=quiet, busy=quiet)
    return SimpleNamespace(**ranks, verdict=verdict, broadcast=lambda v: v, gather=lambda v: [v])


def batch_of(size: dict, batch=None, context=None, seed=0):
    """Random x, y (batch, context)."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch or size["batch"], (context or size["context"]) + 1
    ids = torch.randint(size["vocab"], shape, generator=generator)
    return ids[:, :-1], ids[:, 1:].contiguous()


def on_ranks(function, world: int, deadline: float, **arguments) -> list:
    """[function(rank, world, **arguments) of every rank], in `world` new gloo processes of one thread each. Raises with the
    traceback of a rank that fails; a collective fails after `deadline` seconds. A new process imports the function by name,
    and not from `__main__`: what runs on ranks stands here."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (world, folder, deadline, function, arguments), world)
        return [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(world)]


def _rank(rank, world, folder, deadline, function, arguments):
    torch.set_num_threads(1)
    store, timeout = dist.FileStore(os.path.join(folder, "store"), world), timedelta(seconds=deadline)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    torch.save(function(rank, world, **arguments), os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def contenders(size: dict, compiled: bool, attention: str) -> dict:
    """{name: trainer} at equal parameters; names say the arithmetic of the matmuls."""
    s = size
    sizes = (s["vocab"], s["d"], s["layers"], s["heads"])
    seed_sizes = (*sizes, max(1, s["heads"] // 2), 3 * s["d"], s["context"])
    torch.manual_seed(0)
    settings = nova_settings(s, attention=attention)
    made = {"nova": NovaTrainer(settings), "nova-fp32": NovaTrainer(settings, sharded=False)}
    if compiled:
        made["nova-compiled"] = NovaTrainer(nova_settings(s, attention=attention, use_compile=True))
    for dtype in ("fp32", "bf16"):
        made[f"nanogpt-{dtype}"] = peers.nanogpt(*sizes, s["context"], bf16=dtype == "bf16")
        made[f"seed-{dtype}"] = peers.seed(*seed_sizes, bf16=dtype == "bf16")
        made[f"encoder-{dtype}"] = peers.encoder(*sizes, s["context"], bf16=dtype == "bf16")
    return made


def loss_pair(tokens: int, d: int, vocab: int, chunk: int, device="cpu"):
    """{"chunked": Nova's loss, "whole": the same loss with whole logits}, each forward and backward on bf16 inputs."""
    from model import SoftcapCrossEntropy

    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, d, generator=generator, device=device).bfloat16().requires_grad_()
    weight = torch.randn(vocab, d, generator=generator, device=device).mul(0.02).bfloat16().requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator, device=device)

    def chunked():
        x.grad = weight.grad = None
        SoftcapCrossEntropy.apply(x, weight, targets, vocab, 50.0, 0.0, chunk)[0].backward()

    def whole():
        x.grad = weight.grad = None
        logits = 50.0 * torch.tanh(torch.nn.functional.linear(x, weight).float() / 50.0)
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()

    return {"chunked": chunked, "whole": whole}


def matrices(shapes, device="cpu"):
    generator = torch.Generator(device).manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(*s, generator=generator, device=device)) for s in shapes]
    for p in made:
        p.grad = torch.randn(*p.shape, generator=generator, device=device)
    return made


def muon_steps(shapes, device="cpu", row_blocks=None):
    """Optimizer steps over one list of matrices: Nova's Muon, torch's, the seed's, and AdamW for scale."""
    import muon

    ours, *others = (matrices(shapes, device) for _ in range(4))
    return {
        "nova": muon.Muon([(f"m{i}", p) for i, p in enumerate(ours)], row_blocks=row_blocks).step,
        "torch.optim.Muon": torch.optim.Muon(others[0], adjust_lr_fn="match_rms_adamw").step,
        "seed": peers.SeedMuon(others[1]).step,
        "adamw": torch.optim.AdamW(others[2], fused=True).step,
    }


def muon_on_ranks(rank, world, shapes, rounds):
    """On every rank: seconds of a step of sharded Muon, and of every rank repeating all matrices."""
    from torch.distributed.tensor import Shard, distribute_tensor

    import muon

    grid = mesh()

    def sharded():
        made = []
        for p in matrices(shapes):
            made.append(torch.nn.Parameter(distribute_tensor(p.data, grid, [Shard(0)])))
            made[-1].grad = distribute_tensor(p.grad, grid, [Shard(0)])
        return made

    ours = muon.Muon([(f"m{i}", p) for i, p in enumerate(sharded())])
    repeat = peers.RepeatMuon(sharded(), muon.orthogonalize)
    return measure({"nova": ours.step, "repeat": repeat.step}, rounds, 0, dist.barrier)


def ranks_step(rank, world, size, rounds):
    """Seconds of an optimizer step on `world` ranks, each with its own micro-batch."""
    trainer = NovaTrainer(nova_settings(size))
    x, y = batch_of(size, seed=rank)

    def step():
        trainer.micro(x, y)
        trainer.update(0.01)

    return measure({"step": step}, rounds, 0, dist.barrier)["step"]


def characters(path: str):
    """(train ids, validation ids, vocabulary) of a text file, nanoGPT's way: sorted characters, the last tenth held out."""
    with open(path, encoding="utf-8") as f:
        text = f.read()
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([alphabet[c] for c in text])
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:], len(alphabet)


def windows(ids, n: int, context: int, generator):
    """n random windows x, y (n, context)."""
    starts = torch.randint(len(ids) - context, (n, 1), generator=generator)
    rows = ids[starts + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:].contiguous()
