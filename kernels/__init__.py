"""What a machine computes with.

    choices.py   float8, torch.compile and the attention kernel: what is chosen here, and how each is applied
    cpu.py       norm, rotation and block attention for a CPU
    sharded.py   a sharded parameter as optimizers see it; how rows travel; bitsandbytes' AdamW on each rank's own rows
    devices.py   data sheets of devices; this host's memory and peak

The invariant: what was asked for and cannot be had is an error that names the setting; only "auto" chooses, and says what.
"""

from .choices import ModelError, bad, choose, choose_attention, compile_blocks, convert_fp8, sdpa
from .cpu import BLOCK, BlockAttention, rms_norm, rotate
from .devices import GPUS, Gpu, device_peak, host_memory
from .sharded import AdamW8bit, Layout, MuonError, exchange, local, pack, unpack, zeros_like

__all__ = [
    "BLOCK", "GPUS", "AdamW8bit", "BlockAttention", "Gpu", "Layout", "ModelError", "MuonError", "bad", "choose", "choose_attention",
    "compile_blocks", "convert_fp8", "device_peak", "exchange", "host_memory", "local", "pack", "rms_norm", "rotate", "sdpa", "unpack", "zeros_like",
]  # fmt: skip
