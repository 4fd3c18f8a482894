"""What is measured in a step: where its time goes, its loss by domain, the speed and memory of its machine; and the loss on
held-out rows. The one idea: nothing of a step waits for the device before the step's own host sync, which is the reading of the loss.
"""

import math
import time

import torch
import torch.distributed as dist

from kernels import device_peak, host_memory

PARTS = ("data", "forward_backward", "optimizer", "other")


class StepTimer:
    """Splits a step into parts. On a GPU by events in the stream, so that only time really lost counts and nothing
    is synchronised before `read`, which must follow the step's own sync."""

    def __init__(self, device):
        self.cuda = torch.device(device).type == "cuda"

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self):
        self.begin = time.perf_counter()
        self.marks: list[tuple[str | None, object]] = [(None, self._now())]

    def mark(self, part: str):
        """What happened since the last mark was `part`."""
        self.marks.append((part, self._now()))

    def read(self) -> dict[str, float]:
        """{part: seconds}, with "other" and the whole step's wall time as "total"."""
        total = time.perf_counter() - self.begin
        parts = dict.fromkeys(PARTS, 0.0)
        if self.cuda:
            self.marks[-1][1].synchronize()
        for (_, a), (part, b) in zip(self.marks, self.marks[1:], strict=False):
            parts[part] += a.elapsed_time(b) / 1e3 if self.cuda else b - a
        parts["other"] += max(0.0, total - sum(parts.values()))
        return {**parts, "total": total}


class LossMeter:
    """Sums of token losses per domain on the device, read once per step."""

    def __init__(self, domains: list[str], device):
        self.domains, self.sums = domains, torch.zeros(2, len(domains), dtype=torch.float64, device=device)

    def add(self, token_loss, targets, domain):
        """token_loss (B, T) with 0 where ignored, targets (B, T) with -1 where ignored, domain (B,) index."""
        rows = domain.to(self.sums.device)
        self.sums[0].index_add_(0, rows, token_loss.detach().sum(1, dtype=torch.float64))
        self.sums[1].index_add_(0, rows, (targets >= 0).sum(1, dtype=torch.float64))

    def read(self, all_reduce=None) -> tuple[float, dict[str, float], int]:
        """(mean loss, mean per domain seen, valid tokens), over all ranks when `all_reduce(tensor)` sums in place."""
        sums = self.sums.clone()
        self.sums.zero_()
        if all_reduce:
            all_reduce(sums)
        total, count = sums.tolist()
        means = {d: t / n for d, t, n in zip(self.domains, total, count, strict=True) if n}
        return sum(total) / max(sum(count), 1), means, int(sum(count))


@torch.no_grad()
def evaluate(net, stream, rows: int, batch_rows: int, device) -> tuple[float, dict[str, float], float | None]:
    """(loss in nats/token, the same of each domain, bits per byte where the tokenizer allows) on `rows` held-out rows per
    domain, `batch_rows` at a time on each rank: the same at every call and world size. The model is left in eval mode."""
    net.eval()
    meter, byte_count = LossMeter(stream.domains, device), torch.zeros((), dtype=torch.float64, device=device)
    for batch in stream.val_batches(rows, batch_rows):
        part = batch.to(device)
        _, token_loss = net(part.x, part.y)
        meter.add(token_loss, part.y, part.domain)
        if stream.tokenizer.bytes_exact and (batch.y >= 0).any():
            byte_count += stream.tokenizer.bytes_per_token(batch.y) * int((batch.y >= 0).sum())
    loss, by_domain, tokens = meter.read(dist.all_reduce)
    dist.all_reduce(byte_count)
    return loss, by_domain, loss * tokens / math.log(2) / byte_count.item() if byte_count else None


class Machine:
    """What the run computes on: `world` devices, FLOP/s of one (None: unknown), their name, GB used before the model
    (a CPU's resident memory holds Python and torch, too)."""

    def __init__(self, device, world: int, measure: bool):
        self.device, self.world = torch.device(device), world
        self.peak, self.name = device_peak(device) if measure else (None, "")
        self.baseline = memory(device)["now"]

    def speed(self, tokens: float, seconds: float, flops: float | None) -> dict:
        """tokens/s, tokens/s/GPU and MFU (None where FLOPs a token or the device's peak are unknown)."""
        rate = tokens / seconds if seconds else 0.0
        mfu = rate * flops / self.world / self.peak if self.peak and flops else None
        return {"tokens_per_second": rate, "tokens_per_second_per_gpu": rate / self.world, "mfu": mfu}


def memory(device) -> dict[str, float]:
    """GB of this process: allocated now, peak since the start, what the device has. On a CPU: resident memory, and
    what the machine or container has."""
    if torch.device(device).type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return {"now": now / 1e9, "peak": peak / 1e9, "total": torch.cuda.mem_get_info(device)[1] / 1e9}
    with open("/proc/self/status") as f:
        kib = {k: v.split()[0] for k, _, v in (line.partition(":") for line in f) if k.startswith("Vm")}
    # not getrusage's ru_maxrss, which a process inherits from the one that started it
    now, peak = (int(kib[name]) * 1024 / 1e9 for name in ("VmRSS", "VmHWM"))
    return {"now": now, "peak": peak, "total": host_memory() / 1e9}
