"""A sharded parameter as the optimizers see it: this rank's rows, who has the others, and how rows travel.

FSDP2 leaves every parameter as a DTensor whose rows are cut as torch.chunk cuts them: rank r of W holds rows
[r * ceil(n / W), (r + 1) * ceil(n / W)), so the last ranks may hold fewer, or none. Under HSDP a second mesh dimension
holds copies. muon.py and adamw8bit.py work on plain local tensors and use what is here to get at them.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class MuonError(ValueError):
    """A parameter that no optimizer here can take, or optimizer state that does not fit the model."""

    exit_code = 64


def local(t: Tensor) -> Tensor:
    """This rank's rows, as a plain tensor that shares the storage."""
    t = t.detach()
    t = t.to_local() if isinstance(t, DTensor) else t
    return getattr(t, "_tensor", t)  # torchao wraps weights that are all-gathered in float8


def zeros_like(p: Tensor) -> Tensor:
    """Zeros, sharded like `p`."""
    zeros = torch.zeros_like(local(p))
    # from_local would move them to the mesh's device: under cpu_offload rows stay on the host
    return DTensor(zeros, p._spec, requires_grad=False) if isinstance(p, DTensor) else zeros


class Layout:
    """How parameters lie on the mesh: `size` ranks share the rows, `replicas` groups of them hold copies."""

    def __init__(self, p: Tensor, name: str = "parameter"):
        self.group, self.size, self.rank = None, 1, 0
        self.replica_group, self.replicas, self.replica = None, 1, 0
        self.device = p.device
        if not isinstance(p, DTensor):
            return
        mesh = p.device_mesh
        if (
            mesh.device_type != p.device.type
        ):  # cpu_offload: rows live on the host, matrices are worked on here
            self.device = torch.device(mesh.device_type, getattr(torch, mesh.device_type).current_device())
        for i, placement in enumerate(p.placements):
            if mesh.size(i) == 1:
                continue
            part = mesh.get_group(i), mesh.size(i), mesh.get_local_rank(i)
            if placement.is_replicate() and self.replicas == 1:
                self.replica_group, self.replicas, self.replica = part
            elif placement.is_shard(0) and self.size == 1:
                self.group, self.size, self.rank = part
            else:
                takes = "Muon takes what fully_shard makes of a 1-D or 2-D mesh: rows over one dimension"
                raise MuonError(f"{name}: placements {p.placements} on mesh {tuple(mesh.shape)}; {takes}")

    def heights(self, rows: int) -> list[int]:
        """Rows of a matrix on each rank, as torch.chunk deals them: the last ranks may hold fewer or none."""
        each = -(-rows // self.size)
        return [max(0, min(each, rows - each * r)) for r in range(self.size)]

    @property
    def alone(self) -> bool:
        return self.size == self.replicas == 1


def exchange(send: Tensor, there: list[int], here: list[int], group):
    """Start an all-to-all: `there[r]` elements go to, `here[r]` come from each rank r.   -> (received, wait)"""
    if group is None:
        return send, lambda: None
    received = send.new_empty(sum(here))
    return received, dist.all_to_all_single(received, send, here, there, group=group, async_op=True).wait


def pack(tensors: list[Tensor], dtype, device) -> Tensor:
    """One flat tensor, cast on the way."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=device)
    if tensors:
        parts = flat.split([t.numel() for t in tensors])
        torch._foreach_copy_([part.view(t.shape) for part, t in zip(parts, tensors, strict=True)], tensors)
    return flat


def unpack(received: Tensor, heights: list[list[int]], params: list[Tensor]) -> list[Tensor]:
    """Whole matrices from what the ranks sent: rank 0's rows of each matrix, rank 1's rows of each, …"""
    columns = [p.shape[1] for p in params]
    ranks = range(len(heights[0]) if heights else 0)
    parts = iter(received.split([h[r] * n for r in ranks for h, n in zip(heights, columns, strict=True)]))
    parts = [[next(parts).view(-1, n) for n in columns] for _ in ranks]
    return [torch.cat(rows) if len(rows) > 1 else rows[0] for rows in zip(*parts, strict=True)]
