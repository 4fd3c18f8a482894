"""The loss on the held-out rows."""

import math

import torch
import torch.distributed as dist

from .meters import LossMeter


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
