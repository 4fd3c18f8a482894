"""Data sheets of devices, and what this host has: peak FLOP/s, memory, bandwidth."""

import contextlib
import functools
import os
import time
from dataclasses import dataclass

import torch

# Dense bf16 peaks of data sheets, FLOP/s. MFU is stated against bf16 under fp8 as well. Longest match wins.
PEAKS = {
    "H200": 989e12, "GH200": 989e12, "H100": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H800": 989e12,
    "B200": 2250e12, "GB200": 2500e12, "B300": 2250e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L4": 121e12,
    "RTX PRO 6000 Blackwell": 503e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12,
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A device's data sheet: dense peaks in FLOP/s, bytes, bytes/s."""

    name: str
    bf16: float
    fp8: float | None
    memory: float
    bandwidth: float
    link: float  # bytes/s per GPU that collectives reach inside a node
    net: float = 40e9  # the same between nodes: 400 Gbit/s per GPU at 0.8


GPUS = {
    "h200": Gpu("H200 SXM", PEAKS["H200"], 1979e12, 150.1e9, 4.8e12, 360e9),
    "h100": Gpu("H100 SXM", PEAKS["H100"], 1979e12, 85.0e9, 3.35e12, 360e9),
    "b200": Gpu("B200", PEAKS["B200"], 4500e12, 192.0e9, 8.0e12, 720e9),
    "a100": Gpu("A100 80GB SXM", PEAKS["A100"], None, 85.0e9, 2.0e12, 240e9, 20e9),
    "cpu": Gpu("CPU core", 0.15e12, None, 0.0, 10e9, 2e9, 1e9),  # memory: this machine's
}


def device_peak(device) -> tuple[float | None, str]:
    """(dense bf16 FLOP/s or None, how that is known). On a CPU it is measured: 0.2 s of matmuls per dtype."""
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [n for n in PEAKS if n in name]
        return (PEAKS[max(known, key=len)], name) if known else (None, f"{name}: peak unknown, MFU n/a")
    threads = torch.get_num_threads()
    return cpu_peak(threads), f"CPU, {threads} threads, fastest matmul measured"


@functools.cache
def cpu_peak(threads: int) -> float:
    """FLOP/s of the fastest 768-wide matmul, bf16 or fp32, in 0.2 s of each."""
    best = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.ones(768, 768, dtype=dtype)
        a @ a
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            t0 = time.perf_counter()
            a @ a
            best = max(best, 2 * 768**3 / (time.perf_counter() - t0))
    return best


# of a container: cgroup v2, v1
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> float:
    """Bytes that the processes of this machine, or of this container, may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in LIMITS:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as f:
            limits.append(int(f.read()))  # another version's is missing; "max" is no number
    return float(min(limits))
