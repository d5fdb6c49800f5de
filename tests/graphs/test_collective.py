"""Collectives: right sums with the same bits on every rank, in any size, and no endless wait."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualpace.graphs.collective import Alone, Collective, PeerLost
from dualpace.graphs.shared_memory_collective import SharedMemoryCollective
from tests.graphs.ranks import in_processes, in_threads


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduce_and_gather(collective: Collective) -> dict[str, Any]:
    """Sums of fewer and more elements than a slot holds, and gathers."""
    rank, found = collective.rank, {}
    for name, shape, dtype in (
        ("short", (3, 8), torch.float32),
        ("long", (37, 129), torch.float32),
        ("half", (5, 700), torch.bfloat16),
    ):
        x = of_rank(rank, *shape, dtype=dtype)
        assert collective.all_reduce(x) is x
        found[name] = x
    found["gathered"] = collective.all_gather(of_rank(rank, 4, 3))
    found["ids"] = collective.all_gather(torch.full((2, 900), rank, dtype=torch.int32))
    collective.barrier()
    return found


def work_and_lose_the_last(gloo: Collective, shared: SharedMemoryCollective) -> list[Any]:
    found = [reduce_and_gather(gloo), reduce_and_gather(shared)]
    if gloo.rank == gloo.size - 1:
        os._exit(1)
    shared._timeout_s = 0.2
    for collective in (gloo, shared):
        with pytest.raises(PeerLost):
            for _ in range(3):  # what a dead rank had sent before may still arrive
                collective.all_reduce(torch.zeros(4))
    return found


def test_three_processes_of_which_one_dies(tmp_path: Path) -> None:
    first, second, dead = in_processes(3, work_and_lose_the_last, tmp_path)
    assert dead is None
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        for name, shape in (("short", (3, 8)), ("long", (37, 129))):
            torch.testing.assert_close(mine[name], sum(of_rank(r, *shape) for r in range(3)))
        halves = sum(of_rank(r, 5, 700, dtype=torch.bfloat16).float() for r in range(3))
        torch.testing.assert_close(mine["half"].float(), halves, atol=0.05, rtol=0.02)
        assert torch.equal(mine["gathered"], torch.cat([of_rank(r, 4, 3) for r in range(3)], 1))
        assert mine["ids"][1, ::900].tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [2, 4])
def test_many_sums_in_a_row_never_mix(size: int) -> None:
    """Ranks of different pace: slots are written anew while the slowest still reads."""

    def work(collective: Collective) -> list[Tensor]:
        sums = []
        for turn in range(60):
            x = of_rank(100 * turn + collective.rank, turn % 5 + 1, 33)
            if turn % size == collective.rank:
                threading.Event().wait(0.001)
            sums.append(collective.all_reduce(x))
        return sums

    for rank_sums in zip(*in_threads(size, work, max_bytes=256), strict=True):
        assert all(torch.equal(rank_sums[0], x) for x in rank_sums[1:])
    wanted = sum(of_rank(5900 + rank, 60 % 5, 33) for rank in range(size))
    last = in_threads(size, lambda c: c.all_reduce(of_rank(5900 + c.rank, 60 % 5, 33)))[0]
    torch.testing.assert_close(last, wanted)


def test_bf16_is_added_in_float32_and_rounded_once() -> None:
    # In bf16 alone 1 + 2**-8 + 2**-8 stays 1.
    parts = (1.0, 2.0**-8, 2.0**-8, 0.0)

    def work(collective: Collective) -> Tensor:
        return collective.all_reduce(torch.full((9,), parts[collective.rank]).bfloat16())

    for x in in_threads(4, work):
        assert x.tolist() == [1 + 2.0**-7] * 9


def test_a_peer_that_is_gone_is_told_at_once_and_a_silent_one_in_time() -> None:
    buffer = bytearray(SharedMemoryCollective.num_bytes(2, 64))
    gone = SharedMemoryCollective(buffer, 0, 2, 64, alive=lambda: False)
    with pytest.raises(PeerLost, match="rank 1 of 2"):
        gone.barrier()
    silent = SharedMemoryCollective(bytearray(buffer), 1, 2, 64, timeout_s=0.01)
    silent.barrier()  # rank 0 had come
    with pytest.raises(PeerLost, match="rank 0 of 2"):
        silent.all_reduce(torch.ones(1))


def test_alone_changes_nothing() -> None:
    x = torch.ones(2)
    assert Alone().all_reduce(x) is x and Alone().all_gather(x) is x
