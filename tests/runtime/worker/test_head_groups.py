"""Where ranks of both sides meet in rounds with host rows: every division of the heads attends as
one rank a side does, and writes the same K and V."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dualpace.runtime.lockstep import SUB_BATCHES, LockstepBuffer
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.batches import BatchMaker
from dualpace.runtime.routing import Route
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wiring import host_pool_bytes, lockstep_layout
from dualpace.runtime.worker.lockstep import HeadGroup
from dualpace.runtime.worker.ranks import common_heads, exchange_of, host_shard
from dualpace.runtime.worker.rows import CpuWork, cpu_work

ROWS, CONTEXT, BLOCKS = 5, 40, 16
Attended = tuple[Tensor, Tensor]  # what attention gave, and the pool after it


def attend(plan: Plan, work: CpuWork, pool: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Attended:
    """One layer of one sub-batch by all CPU ranks of `plan`; q, k, v and pool of all heads."""
    region = SharedRegion.create("lockstep", lockstep_layout(plan).nbytes)
    buffer = LockstepBuffer(region, lockstep_layout(plan))
    memory = SharedRegion.create("host pool", host_pool_bytes(plan))

    def link(rank: int) -> Any:
        return SimpleNamespace(rank=rank, lockstep=buffer, host_pool=memory.view)

    place, layer = SUB_BATCHES - 1, 1
    asking = [exchange_of(plan, link(rank), rank) for rank in range(plan.gpu.tp)]
    for name, whole in (("q", q), ("k", k), ("v", v)):
        for exchange, part in zip(asking, whole.chunk(plan.gpu.tp, dim=1), strict=True):
            getattr(exchange, name)[place][:ROWS] = part
    shards = [host_shard(plan, link(rank), rank) for rank in range(plan.cpu.tp)]
    for rank, part in enumerate(pool.chunk(plan.cpu.tp, dim=3)):
        shards[rank].blocks[: len(part)] = part
        for exchange, common in common_heads(plan, link(rank)):
            heads = HeadGroup(shards[rank], exchange, common, num_threads=1)
            heads.begin(place, work).run(layer)
    out = torch.cat([exchange.out[place][:ROWS] for exchange in asking], dim=1)
    return out, torch.cat([shard.blocks[: len(pool)] for shard in shards], dim=3)


def with_ranks(plan: Plan, gpu_ranks: int, cpu_ranks: int) -> Plan:
    """A model of more heads, divided among as many ranks."""
    return replace(
        plan,
        model=replace(plan.model, num_q_heads=8, num_kv_heads=4),
        gpu=replace(plan.gpu, tp=gpu_ranks),
        cpu=replace(plan.cpu, tp=cpu_ranks),
    )


@pytest.mark.parametrize(("gpu_ranks", "cpu_ranks"), [(2, 2), (1, 2), (2, 1), (4, 2), (2, 4)])
def test_every_division_of_the_heads_attends_alike(
    gpu_ranks: int, cpu_ranks: int, make_plan: Callable[..., Plan]
) -> None:
    torch.manual_seed(0)
    plan = make_plan("policy=neo")
    one, several = with_ranks(plan, 1, 1), with_ranks(plan, gpu_ranks, cpu_ranks)
    batch = BatchMaker(300, 2, BLOCKS, 0.0).host_decode(ROWS, CONTEXT, Route.FULL_CPU)
    work = cpu_work(batch)
    dim = one.model.head_dim
    pool = torch.randn(BLOCKS, one.model.num_layers, 2, 4, 16, dim)
    q, k, v = torch.randn(ROWS, 8, dim), *torch.randn(2, ROWS, 4, dim)
    wanted, got = (attend(plan, work, pool, q, k, v) for plan in (one, several))
    assert not torch.equal(wanted[1], pool)
    torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=1e-6)
    assert torch.equal(got[1], wanted[1])
