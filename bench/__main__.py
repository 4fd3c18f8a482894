"""Nova against what people would use instead, on the same machine, in the same run.

    python -m bench                            # every case below, some minutes (with --text FILE: quality too)
    python -m bench train muon                 # some cases
    python -m bench quality --text FILE        # loss against tokens and seconds; a character vocabulary, 90/10 split
    python -m bench gpu                        # one H200, at most 8 minutes: gpu.py; not among "every case"
    python -m bench --check                    # ratios and counts against tests/bench_baseline.json, under a minute

    train       an optimizer step, tokens/s          loss        chunked against whole logits: time, peak bytes
    muon        one and two processes                data        tokens/s of the loader
    checkpoint  pause of a save, bytes/s             startup     command to first step, import times
    scale       cost against layers, width, context, batch, ranks, with the exponent that it should have

The one rule: contenders take turns inside one process, in an order that reverses every round, so that a busy machine
slows them alike. A row compares medians over the rounds; its ratio is the median of the rounds' ratios, above 1 where
Nova is ahead; `spread` is the 10-90 % range of those ratios over their median. Where the ratio is within its spread of 1
the row says `inconclusive`, whatever the medians say. One row a line, `bench CASE OURS=… PEER=… ratio=…`, or JSON lines.
"""

from launch import entry

if __name__ == "__main__":
    entry.prepare()

import argparse
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from . import peers, tools
from .tools import SIZES, NovaTrainer, Report, batch_of, compare, measure, nova_settings, peak_bytes

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BASELINE = os.path.join(HERE, "tests", "bench_baseline.json")
TOLERANCE = 0.25  # of --check


def case_train(report: Report, options):
    """Tokens/s of a full optimizer step: k times forward and backward, then clip and update, each timed in turns."""
    for name in options.sizes:
        size = SIZES[name]
        x, y = batch_of(size)
        for threads in options.threads:
            torch.set_num_threads(threads)
            peak = tools.matmul_peak(torch.bfloat16, clock=options.clock)
            trainers = tools.contenders(size, options.compile, options.attention)
            steps = {}
            for contender, trainer in trainers.items():
                steps[contender, "micro"] = partial(trainer.micro, x, y)
                steps[contender, "update"] = partial(trainer.update, 0.01)
            times = measure(steps, options.rounds, options.seconds, clock=options.clock)
            for contender, trainer in trainers.items():
                parts = [statistics.median(times[contender, p]) for p in ("micro", "update")]
                report.fact(
                    f"train/{name}/{threads}t", contender=contender, micro_ms=1e3 * parts[0], update_ms=1e3 * parts[1],
                    parameters=sum(p.numel() for p in trainer.model.parameters()),
                    mfu_of_bf16_matmul=trainers["nova"].flops * x.numel() / parts[0] / peak,
                    peak_MiB=peak_bytes(steps[contender, "micro"]) / 2**20,
                )  # fmt: skip
            for k in size["accumulate"]:
                both = {c: zip(times[c, "micro"], times[c, "update"], strict=True) for c in trainers}
                step = {c: [k * micro + update for micro, update in pairs] for c, pairs in both.items()}
                case = f"train/{name}/{threads}t/{k * x.numel()}"
                for nova, peer in itertools.product(trainers, trainers):
                    if not nova.startswith("nova") or peer.startswith("nova"):
                        continue
                    if nova != "nova-fp32" or peer.endswith("fp32"):
                        report.row(compare(case, step, nova, peer, k * x.numel(), "tok/s"))
    torch.set_num_threads(1)


def case_quality(report: Report, options):
    """Nova against nanoGPT's recipe: the same batches, parameters and number of tokens; seconds are of training alone."""
    import schedule

    if not options.text:
        return report.fact("quality", skipped="give a text: python -m bench quality --text FILE")
    size = dict(SIZES[options.sizes[0]])
    train, validation, size["vocab"] = tools.characters(options.text)
    steps, chunk, warmup = options.steps, max(1, options.steps // 20), min(100, options.steps // 10)
    finals, reached, tokens = {"nova": [], "nanogpt": []}, [], size["batch"] * size["context"]
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        settings = nova_settings(
            size, seed=seed, total_steps=steps, warmup_steps=warmup, attention=options.attention,
            muon_min_lr=0.0, min_lr=0.0,  # a decay to zero: 0.01 nats
        )  # fmt: skip
        gpt = peers.nanogpt(size["vocab"], size["d"], size["layers"], size["heads"], size["context"])
        trainers = {"nova": NovaTrainer(settings), "nanogpt": gpt}
        horizon = schedule.first_horizon(settings)
        many, generator = 50 if options.tiny else 400, torch.Generator().manual_seed(1234)
        held_out = tools.windows(validation, many, size["context"], generator)
        seconds = dict.fromkeys(trainers, 0.0)
        curve = {name: [(0, 0.0, t.evaluate(*held_out))] for name, t in trainers.items()}
        for start in range(0, steps, chunk):
            for name in trainers if start // chunk % 2 == 0 else reversed(trainers):
                trainer, begin = trainers[name], time.perf_counter()
                for step in range(start, min(steps, start + chunk)):
                    generator = torch.Generator().manual_seed(10**6 * seed + step)
                    trainer.micro(*tools.windows(train, size["batch"], size["context"], generator))
                    if name == "nova":
                        muon_lr, _, momentum = schedule.rates(step, settings, horizon)
                        trainer.update(muon_lr / settings.muon_lr, momentum)
                    else:
                        trainer.update(peers.gpt_schedule(step, steps, warmup))
                seconds[name] += time.perf_counter() - begin
                curve[name].append((step + 1, seconds[name], trainer.evaluate(*held_out)))
            nova, other = curve["nova"][-1], curve["nanogpt"][-1]
            report.fact(
                "quality/curve", seed=seed, step=nova[0], tokens=nova[0] * tokens, nova_loss=nova[2], nova_s=nova[1],
                nanogpt_loss=other[2], nanogpt_s=other[1],
            )  # fmt: skip
        for name in finals:
            finals[name].append(curve[name][-1][2])
        when = next((t for _, t, loss in curve["nova"] if loss <= curve["nanogpt"][-1][2]), math.inf)
        reached.append((when, curve["nanogpt"][-1][1]))
    # One value a seed, the loss and the seconds to the peer's loss: less is better in both, as in compare's seconds.
    report.row(compare("quality/final", finals, "nova", "nanogpt", 0, "nats", tokens=steps * tokens))
    times = {"nova": [ours for ours, _ in reached], "nanogpt": [peer for _, peer in reached]}
    share = statistics.median(ours / peer for ours, peer in reached)
    facts = {"share_of_peer": share, "to_within_steps": chunk}
    report.row(compare("quality/time-to-loss", times, "nova", "nanogpt", 0, "s", **facts))


def case_loss(report: Report, options):
    """The loss head: time, and the peak of live bytes above its inputs."""
    tokens, d, vocab = (64, 32, 512) if options.tiny else (2048, 256, 65536)
    for chunk in (16, 32) if options.tiny else (128, 256, 512, 2048):
        pair = tools.loss_pair(tokens, d, vocab, chunk)
        peak = {name: peak_bytes(f) / 2**20 for name, f in pair.items()}
        times = measure(pair, options.rounds, 0, clock=options.clock)
        report.row(compare(
            f"loss/chunk{chunk}", times, "chunked", "whole", 0, "s", peak_MiB=peak["chunked"],
            whole_peak_MiB=peak["whole"], memory_share=peak["chunked"] / peak["whole"],
        ))  # fmt: skip


def case_muon(report: Report, options):
    """One process against torch.optim.Muon; two processes against every rank repeating the work."""
    alone = [(4, 16, 32)] if options.tiny else [(24, 256, 1024), (192, 32, 128), (12, 1024, 1024)]
    together = alone if options.tiny else [(16, 256, 896), (24, 256, 1024), (12, 1024, 1024)]
    for n, *shape in alone:
        times = measure(tools.muon_steps([shape] * n), options.rounds, options.seconds, clock=options.clock)
        for peer in ("torch.optim.Muon", "seed"):
            report.row(compare(f"muon/{n}x{shape[0]}x{shape[1]}", times, "nova", peer, 0, "s"))
    for n, *shape in together:
        ranks = tools.on_ranks(tools.muon_on_ranks, 2, 300, shapes=[shape] * n, rounds=options.rounds)
        slowest = {k: [max(pair) for pair in zip(*(r[k] for r in ranks), strict=True)] for k in ranks[0]}
        report.row(compare(f"muon/2ranks/{n}x{shape[0]}x{shape[1]}", slowest, "nova", "repeat", 0, "s"))


def write_shards(folder: str, shards: int, rows: int, context: int) -> list[str]:
    """One domain of uint16 shards (rows, context), its metadata, and the same ids as one .bin; paths of the shards."""
    home, rng = os.path.join(folder, "data", "text"), np.random.default_rng(0)
    os.makedirs(home)
    with open(os.path.join(folder, "metadata.json"), "w") as f:
        json.dump({"vocab_size": 50304}, f)
    paths = [os.path.join(home, f"shard-{i:04d}.npy") for i in range(shards)]
    with open(os.path.join(folder, "all.bin"), "wb") as whole:
        for path in paths:
            ids = rng.integers(0, 50304, (rows, context), dtype=np.uint16)
            np.save(path, ids)
            ids.tofile(whole)
    return paths


def case_data(report: Report, options):
    """Tokens/s of one process's loader, files in the page cache, and what 10,000 batches add to its memory."""
    import data

    shards, rows, context, batch = (2, 64, 32, 4) if options.tiny else (8, 2048, 2048, 6)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(folder, shards, rows, context)
        settings = nova_settings(
            dict(SIZES["tiny"], vocab=50304, context=context, batch=batch), data=folder, domains=["text"], val_rows=4,
            eval_rows=4, final_eval_rows=4,
        )  # fmt: skip
        stream = data.open_stream(settings, tools.alone(), log=tools.quiet)
        loaders = {
            "nova": lambda: stream.next_batch(batch),
            "nanogpt-get_batch": peers.window_loader(os.path.join(folder, "all.bin"), batch, context),
            "torch-DataLoader": peers.torch_loader(paths, batch),
        }
        times = measure(loaders, options.rounds, options.seconds)
        for peer in ("nanogpt-get_batch", "torch-DataLoader"):
            report.row(compare("data/loader", times, "nova", peer, batch * context, "tok/s"))
        before, batches = resident(), 50 if options.tiny else 10_000
        for _ in range(batches):
            stream.next_batch(batch)
        report.fact("data/memory", batches=batches, grown_MiB=(resident() - before) / 2**20)


def resident() -> int:
    """Bytes of this process in memory now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def case_checkpoint(report: Report, options):
    """How long a save keeps training waiting, and how fast it writes, against torch.save of the same tensors."""
    import muon
    from store import Store

    trainer = NovaTrainer(nova_settings(SIZES["tiny" if options.tiny else "12M"]))
    state, _ = muon.optimizer_state(trainer.model, trainer.optimizers)
    shared = {**{f"model.{n}": p.detach() for n, p in trainer.model.named_parameters()}, **state}
    size = sum(t.numel() * t.element_size() for t in shared.values())
    folder = tempfile.mkdtemp(prefix="bench-checkpoint-")
    saves = Store(os.path.join(folder, "nova"), tools.alone(), keep=1, log=tools.quiet)
    pauses, walls, steps = [], [], itertools.count(1)

    def ours():
        step, begin = next(steps), time.perf_counter()
        saves.save(step, "latest", shared, {}, {"step": step})
        pauses.append(time.perf_counter() - begin)
        saves.wait()
        walls.append(time.perf_counter() - begin)

    def plain():
        whole = {k: t.full_tensor() if hasattr(t, "full_tensor") else t for k, t in shared.items()}
        with open(os.path.join(folder, "plain.pt"), "wb") as f:
            torch.save(whole, f)
            f.flush()
            os.fsync(f.fileno())

    times = measure({"nova": ours, "torch.save": plain}, options.rounds, 0)
    n, disk = options.rounds, {"MiB": size / 2**20}
    pause = {"nova-pause": pauses[-n:], "torch.save": times["torch.save"]}
    report.row(compare("checkpoint/pause", pause, "nova-pause", "torch.save", 0, "s", **disk))
    written = {"nova": walls[-n:], "torch.save": times["torch.save"]}
    report.row(compare("checkpoint/write", written, "nova", "torch.save", size / 1e6, "MB/s", **disk))
    saves.close()
    shutil.rmtree(folder)


IMPORTS = "numpy torch torchao.float8 bitsandbytes huggingface_hub model muon data store".split()


def until(pattern: str, command: list[str], deadline: float = 300) -> float:
    """Seconds until the command prints a line that matches; it is ended there."""
    start, environ = time.perf_counter(), {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    with subprocess.Popen(command, cwd=HERE, env=environ, **output) as process:
        try:
            for line in process.stdout:
                lines.append(line)
                if re.search(pattern, line):
                    return time.perf_counter() - start
                if time.perf_counter() - start > deadline:
                    break
        finally:
            process.kill()
    raise RuntimeError(f"{' '.join(command)} never printed {pattern!r}:\n" + "".join(lines[-20:]))


def case_startup(report: Report, options):
    """Command to the end of the first step, at the same parameters; then what the imports cost, each in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        nova = [
            sys.executable, "train_nova.py", "config/quickstart.py", "--max_len=64", "--sequences_per_step=12",
            "--micro_batch=12", "--total_steps=3", "--warmup_steps=1", "--log_every=1", "--resume=never",
            f"--out_dir={out}", f"--cache_dir={folder}",
        ]  # fmt: skip
        commands = {
            "nova": partial(until, r"\| step 0*1/", nova),
            "nanogpt": partial(until, "^step 1 ", [sys.executable, "-m", "bench.peers"]),
            "seed-imports": partial(until, "^step 1 ", [sys.executable, "-m", "bench.peers", "seed"]),
        }
        times = measure(commands, options.rounds, 0)
        for peer in ("nanogpt", "seed-imports"):
            report.row(compare("startup/first-step", times, "nova", peer, 0, "s"))
    code = "import {}; print('imported')"
    command = [sys.executable, "-c"]
    imports = {m: partial(until, "^imported", [*command, code.format(m)]) for m in ("sys", *IMPORTS)}
    times = measure(imports, min(3, options.rounds), 0)
    report.fact("startup/imports", **{f"{m}_s": statistics.median(t) for m, t in times.items()})


def case_scale(report: Report, options):
    """How cost grows: the exponent of seconds per step between neighbours, beside that of the FLOPs; bytes likewise."""
    if options.tiny:
        base, sweeps = dict(SIZES["tiny"]), {"layers": (1, 2)}
    else:
        base = dict(vocab=4096, d=256, layers=4, heads=4, context=256, batch=4)
        sweeps = {"layers": (2, 4, 8), "d": (128, 256, 512), "context": (128, 256, 512), "batch": (2, 4, 8)}
    for axis, values in sweeps.items():
        trainers, steps = {}, {}
        for value in values:
            size = {**base, axis: value}
            if axis == "d":
                size["heads"] = value // 64
            trainers[value] = NovaTrainer(nova_settings(size))
            steps[value] = partial(trainers[value].micro, *batch_of(size))
        times = measure(steps, options.rounds, options.seconds, clock=options.clock)
        last = None
        for value, trainer in trainers.items():
            s = trainer.settings
            tokens, seconds = s.micro_batch * s.max_len, statistics.median(times[value])
            costs = {"time": seconds, "flops": tokens * trainer.flops, "bytes": peak_bytes(steps[value])}
            facts = {axis: value, "tok/s": tokens / seconds, "ms": 1e3 * seconds}
            facts["peak_MiB"] = costs["bytes"] / 2**20
            if last:
                log = math.log(value / last[0])
                facts |= {f"{k}_exponent": math.log(costs[k] / last[1][k]) / log for k in costs}
            report.fact(f"scale/{axis}", **facts)
            last = value, costs
    alone = tools.on_ranks(tools.ranks_step, 1, 300, size=base, rounds=options.rounds)[0]
    both = tools.on_ranks(tools.ranks_step, 2, 300, size=base, rounds=options.rounds)
    both = [max(t) for t in zip(*both, strict=True)]
    a, b = statistics.median(alone), statistics.median(both)
    report.fact(
        "scale/ranks", ranks=2, one_ms=1e3 * a, two_ms=1e3 * b, throughput_exponent=math.log2(2 * a / b),
        should_be=1.0, cores=os.cpu_count(),
    )  # fmt: skip


def facts_now() -> dict[str, float]:
    """Counts that depend on the code alone: they may only grow on purpose."""
    import model

    size = SIZES["12M"]
    settings = nova_settings(size)
    trainer = NovaTrainer(nova_settings(SIZES["0.8M"]))
    x, y = batch_of(SIZES["0.8M"])
    pair = {name: peak_bytes(f) for name, f in tools.loss_pair(512, 64, 8192, 128).items()}
    listing = [sys.executable, "-c", "import sys, train_nova; print(*sys.modules)"]
    modules = subprocess.run(listing, cwd=HERE, capture_output=True, text=True).stdout.split()
    late = {"torchao", "bitsandbytes", "huggingface_hub"}
    return {
        "parameters 12M": model.count_params(settings)["total"],
        "FLOPs per token 12M": model.flops_per_token(settings, size["context"]),
        "peak bytes of the chunked loss over the whole one's": pair["chunked"] / pair["whole"],
        "peak bytes of a step 0.8M": peak_bytes(lambda: trainer.micro(x, y)),
        "modules imported by train_nova": len(modules),
        "of them torchao, bitsandbytes, huggingface_hub": len(late & {m.split(".")[0] for m in modules}),
    }


def ratios_now(rounds: int = 5) -> dict[str, float]:
    """Ratios that are far from 1 or steady, best of the rounds against best of the rounds; larger is better for Nova.
    Both sides compute in the same dtype, since CPUs differ in what bf16 gains; the clock counts this process alone."""
    size, batch = SIZES["0.8M"], batch_of(SIZES["0.8M"])
    small = measure(tools.muon_steps([(32, 128)] * 96), rounds, 0.05, clock="cpu")
    large = measure(tools.muon_steps([(256, 1024)] * 8), rounds, 0.05, clock="cpu")
    loss = measure(tools.loss_pair(512, 64, 16384, 128), rounds, 0.05, clock="cpu")
    trainers = tools.contenders(size, False, "diff")
    names = ("nova", "nova-fp32", "nanogpt-fp32", "seed-bf16")
    train = measure({n: partial(trainers[n].micro, *batch) for n in names}, rounds, 0.05, clock="cpu")

    def ratio(times: dict, ours: str, peer: str) -> float:
        return min(times[peer]) / min(times[ours])

    return {
        "muon, small matrices, against torch.optim.Muon": ratio(small, "nova", "torch.optim.Muon"),
        "muon, large matrices, against torch.optim.Muon": ratio(large, "nova", "torch.optim.Muon"),
        "loss, chunked against whole": ratio(loss, "chunked", "whole"),
        "train 0.8M, fp32, against nanoGPT": ratio(train, "nova-fp32", "nanogpt-fp32"),
        "train 0.8M, bf16, against the seed": ratio(train, "nova", "seed-bf16"),
    }


def check_baseline(update: bool) -> int:
    """0 if no count grew and no ratio fell by more than TOLERANCE; a ratio has three tries, since machines are busy."""
    facts, ratios = facts_now(), ratios_now()
    if update:  # the lowest of three: a baseline that a lucky round made would fail good code
        for _ in range(2):
            ratios = {k: min(v, ratios[k]) for k, v in ratios_now().items()}
        with open(BASELINE, "w") as f:
            json.dump({"facts": facts, "ratios": {k: round(v, 3) for k, v in ratios.items()}}, f, indent=1)
            f.write("\n")
        return 0
    with open(BASELINE) as f:
        baseline = json.load(f)
    for _ in range(2):
        if not worse({"facts": {}, "ratios": ratios}, baseline):
            break
        ratios = {k: max(v, ratios[k]) for k, v in ratios_now().items()}
    found = worse({"facts": facts, "ratios": ratios}, baseline)
    for kind, now in (("facts", facts), ("ratios", ratios)):
        for name, value in now.items():
            print(f"check {name}: {value:.6g} (baseline {baseline[kind].get(name, math.nan):.6g})")
    for line in found:
        print(f"check FAILED: {line}")
    return 1 if found else 0


def worse(now: dict, baseline: dict) -> list[str]:
    """What got worse by more than TOLERANCE, or has no baseline."""
    lines = []
    for kind, sign in (("facts", 1), ("ratios", -1)):
        for name, value in now[kind].items():
            stored = baseline[kind].get(name)
            if stored is None:
                lines.append(f"{name}: no baseline; python -m bench --check --update")
            elif (value > stored * (1 + TOLERANCE)) if sign > 0 else (value < stored * (1 - TOLERANCE)):
                lines.append(f"{name}: {value:.6g}, baseline {stored:.6g}")
    return lines


CASES = {
    "train": case_train, "quality": case_quality, "loss": case_loss, "muon": case_muon, "data": case_data,
    "checkpoint": case_checkpoint, "startup": case_startup, "scale": case_scale,
}  # fmt: skip


def main(argv=None) -> int:
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option, words = parser.add_argument, f"{', '.join(CASES)}, gpu"
    option("cases", nargs="*", metavar="case", help=f"{words}; none: all but gpu; quality needs --text")
    option("--json", action="store_true", help="one JSON object a line")
    option("--check", action="store_true", help="compare with the stored baseline; 1 if worse")
    option("--update", action="store_true", help="with --check: store the baseline anew")
    option("--clock", choices=["wall", "cpu"], default="wall", help="cpu: on a busy machine, one thread")
    option("--rounds", type=int, default=5, help="repetitions of each contender")
    option("--minutes", type=float, default=8.0, help="gpu: no case begins after this")
    option("--sizes", nargs="*", choices=list(SIZES), help="train: 0.8M 12M; quality: 0.8M")
    option("--threads", type=int, nargs="*", default=[1, 2], help="train: CPU threads")
    option("--attention", default="diff", choices=["diff", "diff_v2", "standard"])
    on_or_off = argparse.BooleanOptionalAction
    option("--compile", action=on_or_off, default=True, help="train: compiled too; gpu: compiled")
    option("--text", help="quality: a text file")
    option("--steps", type=int, default=2000, help="quality: optimizer steps")
    option("--seeds", type=int, default=1, help="quality: repetitions")
    option("--tiny", action="store_true", help="toy shapes: does it run? figures mean nothing")
    options = parser.parse_args(argv)
    options.seconds = 0.0 if options.tiny else 0.2  # that one measurement fills, by repeating short work
    if unknown := set(options.cases) - {*CASES, "gpu"}:
        parser.error(f"no case {min(unknown)!r}; there are {words}")
    torch.set_num_threads(1)
    had_group = dist.is_initialized()
    try:
        return check_baseline(options.update) if options.check else run(options)
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()


def run(options) -> int:
    """The cases, one after the other; 1 if one of `gpu` failed."""
    report, sizes, failed = Report(options.json), options.sizes, 0
    if not options.tiny and options.cases != ["gpu"]:
        tools.environment(report, options.clock)
    for name in options.cases or [c for c in CASES if c != "quality" or options.text]:
        if name == "gpu":
            from . import gpu

            failed |= gpu.run(report, options)
            continue
        default = ["tiny"] if options.tiny else ["0.8M"] if name == "quality" else ["0.8M", "12M"]
        options.sizes = sizes or default
        CASES[name](report, options)
    return failed


if __name__ == "__main__":
    sys.exit(main())
