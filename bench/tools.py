"""How the bench measures: contenders that take turns, rows, peak bytes, ranks; Nova and its peers as contenders."""

import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

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


# --- measuring ----------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One comparison. `ours`, `peer`: (name, value); ratio > 1 where ours is ahead; `facts`: more figures."""

    case: str
    ours: tuple[str, float]
    peer: tuple[str, float]
    unit: str
    ratio: float
    spread: float
    n: int
    facts: dict = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if not math.isfinite(self.ratio):
            return "not reached"
        return (
            "inconclusive" if abs(self.ratio - 1) <= self.spread else "ahead" if self.ratio > 1 else "behind"
        )

    def as_dict(self) -> dict:
        return {
            "case": self.case, "ours": self.ours[0], "peer": self.peer[0], "ours_value": self.ours[1],
            "peer_value": self.peer[1], "unit": self.unit, "ratio": self.ratio, "spread": self.spread, "n": self.n,
            "verdict": self.verdict, **self.facts,
        }  # fmt: skip


class Report:
    """Prints rows as they come and keeps them."""

    def __init__(self, as_json=False):
        self.as_json, self.rows = as_json, []

    def row(self, row: Row):
        self.rows.append(row)
        d = row.as_dict()
        head = (
            f"{d['case']:22} {d['ours']}={short(d['ours_value'])}{d['unit']} "
            f"{d['peer']}={short(d['peer_value'])}{d['unit']} ratio={d['ratio']:.3f} spread={d['spread']:.2f} n={d['n']}"
        )
        self.line(d, " ".join([head, pairs(row.facts), row.verdict]))

    def fact(self, case: str, **facts):
        """A line without a comparison."""
        self.line({"case": case, **facts}, f"{case:22} {pairs(facts)}")

    def line(self, values: dict, text: str):
        if self.as_json:  # JSON knows no infinity
            values = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
            }
            text = json.dumps(values)
        print(text if self.as_json else f"bench {text}", flush=True)


def pairs(facts: dict) -> str:
    return " ".join(f"{k}={short(v)}" for k, v in facts.items())


def short(value) -> str:
    """Four significant figures; text without spaces, so that a row splits at blanks."""
    if isinstance(value, float):
        return f"{value:,.0f}".replace(",", "") if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace(" ", "_")


def measure(
    contenders: dict, rounds: int, seconds: float = 0.2, sync=lambda: None, clock: str = "wall"
) -> dict[str, list[float]]:
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
    value = {
        n: work / statistics.median(times[n]) if work else statistics.median(times[n]) for n in (ours, peer)
    }
    best = {n: work / min(times[n]) if work else min(times[n]) for n in (ours, peer)}
    facts = {"best": f"{short(best[ours])}/{short(best[peer])}", **facts}
    ratio = statistics.median(ratios)
    return Row(
        case, (ours, value[ours]), (peer, value[peer]), unit, ratio, spread(ratios), len(ratios), facts
    )


def spread(values: list[float]) -> float:
    """10-90 % range over the median. One value has no known spread: infinite, so that its row is inconclusive."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.inf
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / statistics.median(values)


def peak_bytes(function) -> int:
    """Largest sum of live CPU allocations that `function` makes, above what was there before: a count, not a sample."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # its start and stop lines would mix with the rows
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
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
    cpu = "unknown"
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            info = dict(line.split(":", 1) for line in f.read().split("\n\n")[0].splitlines() if ":" in line)
        info = {k.strip(): v.strip() for k, v in info.items()}
        wanted = ("avx512f", "avx512_bf16", "amx_bf16")
        cpu = (
            info.get("model name", cpu)
            + " "
            + "+".join(f for f in wanted if f in info.get("flags", "").split())
        )
    report.fact(
        "env", cpu=cpu, cores=os.cpu_count(), torch=torch.__version__, load=round(os.getloadavg()[0], 2),
        peak_fp32_GF=matmul_peak(torch.float32, clock=clock) / 1e9, peak_bf16_GF=matmul_peak(torch.bfloat16, clock=clock) / 1e9, clock=clock,
    )  # fmt: skip


# --- Nova as a contender ------------------------------------------------------------------------------------


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
    return init_device_mesh(device, (dist.get_world_size(),))


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
        return (
            sum(self.model(a, b)[0].item() for a, b in zip(x.split(50), y.split(50), strict=True)) / y.numel()
        )


class Alone:
    """The agreement object of a run of one process."""

    rank, world, local_rank, local_world = 0, 1, 0, 1

    def broadcast(self, value):
        return value

    def gather(self, value) -> list:
        return [value]

    def verdict(self, problem, what=""):
        if problem:
            raise problem

    def barrier(self):
        pass

    def busy(self, seconds):
        pass


def batch_of(size: dict, batch=None, context=None, seed=0):
    """Random x, y (batch, context)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(
        size["vocab"], (batch or size["batch"], (context or size["context"]) + 1), generator=generator
    )
    return ids[:, :-1], ids[:, 1:].contiguous()


def on_ranks(function, world: int, deadline: float, **arguments) -> list:
    """[function(rank, world, **arguments) of every rank], in `world` new gloo processes of one thread each."""
    context = multiprocessing.get_context("spawn")
    queue, folder = context.Queue(), tempfile.mkdtemp()
    start = (queue, os.path.join(folder, "store"), function, world, arguments)
    processes = [context.Process(target=_rank, args=(r, *start), daemon=True) for r in range(world)]
    for process in processes:
        process.start()
    try:
        answers = dict(queue.get(timeout=deadline) for _ in processes)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    failures = [a for a in answers.values() if isinstance(a, str)]
    if failures:
        raise RuntimeError(failures[0])
    return [answers[rank] for rank in range(world)]


def _rank(rank, queue, store, function, world, arguments):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        queue.put((rank, function(rank, world, **arguments)))
        dist.barrier()
    except BaseException:
        queue.put((rank, traceback.format_exc()))


# --- contenders ---------------------------------------------------------------------------------------------


def contenders(size: dict, compiled: bool, attention: str) -> dict:
    """{name: trainer} at equal parameters; names say the arithmetic of the matmuls."""
    s = size
    sizes = (s["vocab"], s["d"], s["layers"], s["heads"])
    seed_sizes = (*sizes, max(1, s["heads"] // 2), 3 * s["d"], s["context"])
    torch.manual_seed(0)
    made = {
        "nova": NovaTrainer(nova_settings(s, attention=attention)),
        "nova-fp32": NovaTrainer(nova_settings(s, attention=attention), sharded=False),
    }
    if compiled:
        made["nova-compiled"] = NovaTrainer(nova_settings(s, attention=attention, use_compile=True))
    for dtype in ("fp32", "bf16"):
        made[f"nanogpt-{dtype}"] = peers.nanogpt(*sizes, s["context"], bf16=dtype == "bf16")
        made[f"seed-{dtype}"] = peers.seed(*seed_sizes, bf16=dtype == "bf16")
        made[f"encoder-{dtype}"] = peers.encoder(*sizes, s["context"], bf16=dtype == "bf16")
    return made


def loss_pair(tokens: int, d: int, vocab: int, chunk: int):
    """{"chunked": Nova's loss, "whole": the same loss with whole logits}, each forward and backward on bf16 inputs."""
    from model import SoftcapCrossEntropy

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, d, generator=generator).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(vocab, d, generator=generator)).bfloat16().requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)

    def chunked():
        x.grad = weight.grad = None
        SoftcapCrossEntropy.apply(x, weight, targets, vocab, 50.0, 0.0, chunk)[0].backward()

    def whole():
        x.grad = weight.grad = None
        logits = torch.nn.functional.linear(x, weight).float()
        logits = 50.0 * torch.tanh(logits / 50.0)
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()

    return {"chunked": chunked, "whole": whole}


def matrices(n: int, rows: int, columns: int):
    """n parameters (rows, columns) with gradients."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(rows, columns, generator=generator)) for _ in range(n)]
    for p in made:
        p.grad = torch.randn(rows, columns, generator=generator)
    return made


def muon_pair(n: int, rows: int, columns: int):
    """Optimizer steps over one list of matrices: Nova's Muon, torch's, the seed's."""
    import muon

    ours = muon.Muon([(f"m{i}", p) for i, p in enumerate(matrices(n, rows, columns))])
    theirs = torch.optim.Muon(matrices(n, rows, columns), adjust_lr_fn="match_rms_adamw")
    return {
        "nova": ours.step,
        "torch.optim.Muon": theirs.step,
        "seed": peers.SeedMuon(matrices(n, rows, columns)).step,
    }


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
