"""What a machine computes with.

    attention.py   causal attention; which kernel of a GPU is pinned
    precision.py   float8 and torch.compile: what "auto" means here, and how each is applied
    cpu.py         norm, rotation and block attention for a CPU
    sharded.py     a sharded parameter as optimizers see it; how rows travel
    adamw8bit.py   bitsandbytes' AdamW on each rank's own rows
    devices.py     data sheets of devices; this host's memory and peak

The invariant: what was asked for and cannot be had is an error that names the setting; only "auto" chooses, and says what.
"""

from .adamw8bit import AdamW8bit
from .attention import choose_attention, sdpa
from .cpu import BLOCK, BlockAttention, rms_norm, rotate
from .devices import GPUS, Gpu, device_peak, host_memory
from .precision import ModelError, bad, choose, compile_blocks, convert_fp8
from .sharded import Layout, MuonError, exchange, local, pack, unpack, zeros_like

__all__ = [
    "AdamW8bit", "BLOCK", "BlockAttention", "GPUS", "Gpu", "Layout", "ModelError", "MuonError", "bad", "choose",
    "choose_attention", "compile_blocks", "convert_fp8", "device_peak", "exchange", "host_memory", "local",
    "pack", "rms_norm", "rotate", "sdpa", "unpack", "zeros_like",
]  # fmt: skip
