"""This worker's place in its group: which part of the model and of the pools it has, and what joins
it to the other ranks.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from dualpace.graphs.collective import Collective, TorchCollective
from dualpace.graphs.shard import WHOLE, Shard
from dualpace.graphs.shared_memory_collective import SharedMemoryCollective
from dualpace.graphs.weights import DTYPES
from dualpace.runtime.kv.overlaps import Overlap, overlaps
from dualpace.runtime.order import Order, OrderFollower, OrderLeader
from dualpace.runtime.plan import Plan
from dualpace.runtime.wiring import COLLECTIVE_SLOT_BYTES, host_shard_bytes, kv_layout
from dualpace.runtime.worker.accelerator import (
    AcceleratorWorker,
    Assists,
    FollowerWorker,
    Rounds,
    Transfers,
)
from dualpace.runtime.worker.exchange import Exchange
from dualpace.runtime.worker.kv_pools import HostPart, HostPool
from dualpace.runtime.worker.link import Link, Peers

_JOIN_S = 600.0  # until all ranks have started; after that a lost peer is the engine's to notice


@dataclass(frozen=True, slots=True)
class Ranks:
    """The whole model and no collective in a group of one."""

    shard: Shard = WHOLE
    collective: Collective | None = None


ALONE = Ranks()


def join(plan: Plan, role: str, link: Link) -> Ranks:
    """Waits for the others where they meet through torch. PeerLost if they do not come."""
    peers = link.peers
    if peers is None:
        return ALONE
    return Ranks(Shard(peers.rank, peers.size), _collective(plan, role, link, peers))


def _collective(plan: Plan, role: str, link: Link, peers: Peers) -> Collective:
    is_gpu = role == "gpu" and plan.gpu.device == "cuda"
    device = torch.device("cuda", peers.rank) if is_gpu else None
    if device is None and (role == "gpu" or plan.cpu.all_reduce == "shared_memory"):
        return SharedMemoryCollective(
            peers.collective,
            peers.rank,
            peers.size,
            COLLECTIVE_SLOT_BYTES,
            alive=link.is_alive,
            timeout_s=math.inf,  # a rank may build longer than another, or wait for an assist
        )
    backend = "gloo" if device is None else "nccl"
    meeting = Path(f"/proc/self/fd/{peers.meeting}")  # it has no name
    return TorchCollective.join(backend, peers.rank, peers.size, meeting, _JOIN_S, device)


def make_worker(
    link: Link, rounds: Rounds, transfers: Transfers, assists: Assists | None
) -> AcceleratorWorker:
    """Where assists are served the first rank decides what comes next; else it is the next batch's
    next task for every rank."""
    order = None if assists is None else order_of(link)
    if isinstance(order, OrderFollower):
        assert assists is not None
        return FollowerWorker(link, rounds, transfers, assists, order)
    return AcceleratorWorker(link, rounds, transfers, assists, order)


def order_of(link: Link) -> OrderLeader | OrderFollower | None:
    """Of an accelerator's ranks that serve assists; None for one alone."""
    peers = link.peers
    if peers is None:
        return None
    order = Order(peers.order, peers.size)
    if peers.rank:
        return OrderFollower(order, peers.rank)
    return OrderLeader(order, peers.bells[1:], link.is_alive)


def exchange_of(plan: Plan, link: Link, rank: int) -> Exchange:
    """Accelerator rank `rank`'s part of what lockstep rounds hand to and fro."""
    assert link.lockstep is not None
    hosts = [part.other for part in _heads(plan, rank, plan.gpu.tp, plan.cpu.tp)]
    model = plan.model
    return Exchange(link.lockstep, model.head_dim, DTYPES[model.dtype], rank, hosts)


def common_heads(plan: Plan, link: Link) -> list[tuple[Exchange, Overlap]]:
    """The accelerator's parts that this CPU rank attends for, and which KV heads of each: `own` in
    this rank's pool, `theirs` in the part."""
    parts = _heads(plan, link.rank, plan.cpu.tp, plan.gpu.tp)
    return [(exchange_of(plan, link, part.other), part) for part in parts]


def _heads(plan: Plan, rank: int, size: int, other_size: int) -> tuple[Overlap, ...]:
    return overlaps(plan.model.num_kv_heads, rank, size, other_size)


def attention_columns(plan: Plan, shard: Shard) -> tuple[Overlap, ...]:
    """Where this accelerator rank's attention lies among the columns that CPU ranks write."""
    width = plan.model.num_q_heads * plan.model.head_dim
    return overlaps(width, shard.rank, shard.size, plan.cpu.tp)


def host_shard(plan: Plan, link: Link, rank: int) -> HostPool:
    """The host pool's part that CPU rank `rank` attends to."""
    nbytes = host_shard_bytes(plan)
    memory = link.host_pool[rank * nbytes : (rank + 1) * nbytes]
    layout = kv_layout(plan, plan.cpu.tp)
    return HostPool(memory, layout, plan.kv.host_pool_blocks, DTYPES[plan.model.dtype])


def host_parts(plan: Plan, link: Link, shard: Shard) -> list[HostPart]:
    """Where in the host pool the heads of this accelerator rank lie."""
    return [
        HostPart(host_shard(plan, link, part.other), part)
        for part in _heads(plan, shard.rank, shard.size, plan.cpu.tp)
    ]
