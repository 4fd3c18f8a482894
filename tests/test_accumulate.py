"""Gradients of a step's micro-steps: the same numbers whenever they are reduced, on any mesh."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import tiny_settings
from workers import run

import data
import model
import train_nova
from launch import startup
from track import LossMeter


def gradients(rank, world, every: bool, shard: int | None):
    """({name: gradient}, all-reduces of replicas) of the second of two steps of the run's own `accumulate`."""
    s = tiny_settings(sequences_per_step=16, micro_batch=2, reduce_every_micro_step=every, shard_size=shard)
    device, calls, real = torch.device("cpu"), [], dist.all_reduce
    net = model.build_model(s, startup.make_mesh(s, world, device), device, log=lambda text: None)
    rows = torch.randint(257, (16, s.max_len + 1), generator=torch.Generator().manual_seed(0))
    rows = rows[rank * 16 // world : (rank + 1) * 16 // world]
    batch = data.Batch(
        rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.zeros(len(rows), dtype=torch.int64), []
    )
    dist.all_reduce = lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
    try:
        for _ in range(2):
            net.zero_grad(set_to_none=True)
            calls.clear()
            train_nova.accumulate(net, batch, LossMeter(["a"], device), s, world)
    finally:
        dist.all_reduce = real
    whole = {name: p.grad.full_tensor().numpy() for name, p in net.named_parameters()}
    return whole, len(calls)


@pytest.mark.parametrize(
    "world, every, shard",
    [(2, True, None), (2, False, None), pytest.param(4, True, 2, marks=pytest.mark.slow), (4, False, 2)],
)
def test_gradients_do_not_depend_on_when_they_are_reduced(world, every, shard):
    """The micro-batches are the same eight of two rows: sums of the same bf16 gradients in another order, in fp32.
    Replicas exchange theirs once a step, not once a micro-step, for each of two blocks and the root."""
    want, _ = run(gradients, 1, every=False, shard=None)[0]
    got, exchanges = run(gradients, world, every=every, shard=shard)[0]
    assert exchanges == (3 if shard else 0)
    for name, g in want.items():
        assert np.abs(got[name] - g).max() <= 1e-5 * np.abs(g).max(), name
