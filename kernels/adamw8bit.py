"""AdamW with 8-bit moments: bitsandbytes on each rank's own rows, with state that any world size can load.

A moment is stored as one byte an entry, an index into 256 values, and one scale per block of 256 entries (2110.02861).
Blocks run over the rank's local rows, so codes fit one world size; they are checkpointed twice, as they are (exact at
the same world size) and as fp32 tensors sharded like the parameter (any other, to the quantiser's error).
"""

import torch
from torch import Tensor, nn

from .sharded import MuonError, local, zeros_like

QUANT_BLOCK = 256  # entries that share one scale in bitsandbytes' 8-bit optimizers


class AdamW8bit(torch.optim.Optimizer):
    """bitsandbytes' AdamW with 8-bit moments, on each rank's own rows (it refuses DTensors). `moments` and `set_moments`
    translate to and from fp32 tensors. Local pieces below 4,096 entries keep 32-bit moments (bitsandbytes' own rule)."""

    def __init__(self, params, lr=2e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        bitsandbytes = import_bitsandbytes(self.param_groups[0]["params"][0].device)
        self.pieces = {}  # parameter -> this rank's rows as bitsandbytes' parameter; ranks without rows have none
        self.rowless = {}  # parameter without rows here -> its steps: a checkpoint may take them from any rank
        groups = []
        for group in self.param_groups:
            mine = {p: nn.Parameter(local(p)) for p in group["params"] if local(p).numel()}
            self.pieces.update(mine)
            self.rowless.update({p: 0 for p in group["params"] if p not in mine})
            groups.append(dict(params=list(mine.values()), lr=lr, weight_decay=group["weight_decay"]))
        self.inner = bitsandbytes.optim.AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
        for i, group in enumerate(self.inner.param_groups):
            for j, piece in enumerate(group["params"]):
                self.inner.init_state(group, piece, i, j)  # now: the same checkpoint keys at any step

    @torch.no_grad()
    def step(self):
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
        for p, piece in self.pieces.items():
            piece.data = local(p)  # FSDP may have moved the rows to padded storage since
            piece.grad = None if p.grad is None else local(p.grad)
        self.inner.step()
        self.inner.zero_grad()
        for p in self.rowless:
            self.rowless[p] += p.grad is not None

    def codes(self, p: Tensor) -> dict[str, Tensor]:
        """This rank's live 8-bit codes and scales of `p`; empty where moments are 32-bit."""
        state = self.inner.state[self.pieces[p]] if p in self.pieces else {}
        quantised = state and state["state1"].dtype == torch.uint8
        return {k: state[k] for k in ("state1", "state2", "absmax1", "absmax2")} if quantised else {}

    def moments(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """exp_avg and exp_avg_sq in fp32, sharded like `p`, and the step (0-dim)."""
        out = zeros_like(p), zeros_like(p)
        if p in self.rowless:
            return *out, torch.tensor(float(self.rowless[p]))
        state = self.inner.state[self.pieces[p]]
        for i, moment in enumerate(out, 1):
            values = state[f"state{i}"]
            if values.dtype == torch.uint8:
                values = dequantize(values, state[f"absmax{i}"], state[f"qmap{i}"])
            local(moment).copy_(values)
        return *out, torch.tensor(float(state["step"]))

    @torch.no_grad()
    def set_moments(self, p: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, codes: dict | None):
        """Restore: from `codes` (exact) where given, else from the fp32 moments (to the quantiser's error)."""
        if p in self.rowless:
            self.rowless[p] = int(step)
            return
        state = self.inner.state[self.pieces[p]]
        state["step"] = int(step)
        mine = self.codes(p)
        if mine and codes is not None:
            for key, tensor in mine.items():
                tensor.copy_(codes[key])
            return
        for i, moment in enumerate((exp_avg, exp_avg_sq), 1):
            values = local(moment)
            if mine:
                values, scales = quantize(values, state[f"qmap{i}"])
                state[f"absmax{i}"].copy_(scales)
            state[f"state{i}"].copy_(values)


def dequantize(codes: Tensor, scales: Tensor, code: Tensor) -> Tensor:
    """fp32 values of bitsandbytes' block-wise codes; `code` (256,) are the values of the codes, ascending."""
    values = code[codes.int()].flatten()
    return values.mul_(scales.repeat_interleave(QUANT_BLOCK)[: values.numel()]).view(codes.shape)


def quantize(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `dequantize`: the codes come back equal.   -> (codes, scales)

    bitsandbytes' own quantiser would not do: its signed code ends at -0.993 but it scales by the largest magnitude, so a
    block whose largest entry is negative would shrink by 0.7 % in each round trip.
    """
    n = values.numel()
    blocks = torch.nn.functional.pad(values.float().flatten(), (0, -n % QUANT_BLOCK)).view(-1, QUANT_BLOCK)
    scales = blocks.amax(1) / code[-1]
    if code[0] < 0:
        scales = torch.maximum(scales, blocks.amin(1) / code[0])
    scales = scales.clamp_min(0)
    middle = (code[1:] + code[:-1]) / 2
    codes = torch.bucketize(blocks / torch.where(scales > 0, scales, 1)[:, None], middle, out_int32=True)
    if code[0] == 0:  # a second moment must not round to 0: the next update would be exp_avg / eps
        codes = torch.maximum(codes, (blocks > 0).int())
    return codes.flatten()[:n].view(values.shape).to(torch.uint8), scales


def import_bitsandbytes(device: torch.device):
    """bitsandbytes, after one 8-bit step has worked on `device`."""
    try:
        import bitsandbytes

        probe = nn.Parameter(torch.ones(4096, device=device))
        probe.grad = torch.ones_like(probe)
        bitsandbytes.optim.AdamW8bit([probe], lr=0.5, weight_decay=0.0).step()
        moved = probe.detach().mean().item()
        if abs(moved - 0.5) > 0.1:
            raise RuntimeError(f"a test step moved a weight from 1 to {moved:.3f}, not to 0.5")
        return bitsandbytes
    except Exception as e:
        raise MuonError(
            f'adamw="8bit" needs bitsandbytes, which does not work here on {device}: {type(e).__name__}: {e}. '
            'Install it (pip install bitsandbytes), or set adamw="fp32"'
        ) from e
