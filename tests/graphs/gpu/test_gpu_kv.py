"""Blocks move bit by bit as they are, to where they belong, and nowhere else."""

import pytest
import torch

from dualpace.graphs.gpu import kv
from dualpace.graphs.gpu.host_memory import chunks_of
from dualpace.graphs.gpu.kv_heads import HeadMover

LAYERS, BLOCKS, HEADS, DIM = 3, 7, 2, 8


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def pools(
    request: pytest.FixtureRequest, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    pool = kv.make_pool(LAYERS, BLOCKS, HEADS, DIM, request.param, str(device))
    host = torch.randn(9, LAYERS, 2, HEADS, 16, DIM).to(request.param)
    if device.type == "cuda":
        host = host.pin_memory()
    return pool.normal_(), host


def test_gather_and_scatter_are_inverse(pools: tuple[torch.Tensor, torch.Tensor]) -> None:
    pool, _ = pools
    blocks = torch.tensor([4, 1], dtype=torch.int32, device=pool.device)
    staging = torch.empty(2, *pool[:, 0].shape, dtype=pool.dtype, device=pool.device)
    kv.gather(pool, blocks, staging)
    assert torch.equal(staging, pool[:, blocks.long()].transpose(0, 1))
    before = pool.clone()
    kv.scatter(staging.flip(0), blocks, pool)
    before[:, [4, 1]] = before[:, [1, 4]]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_swaps_move_blocks_between_the_pools(
    by_kernel: bool, pools: tuple[torch.Tensor, torch.Tensor]
) -> None:
    pool, host = pools
    mover = kv.BlockMover(pool, host, ring_blocks=2)
    swap_out = mover.swap_out_by_kernel if by_kernel else mover.swap_out
    swap_out([1, 5, 2], [7, 3, 4])
    if pool.is_cuda:
        torch.cuda.synchronize()
    for source, target in ((1, 7), (5, 3), (2, 4)):
        assert torch.equal(host[target], pool[:, source].cpu())
    moved = host[7].clone()
    mover.swap_in([7, 8, 0], [6, 3, 1])
    for source, target in ((7, 6), (8, 3), (0, 1)):
        assert torch.equal(host[source], pool[:, target].cpu())
    assert torch.equal(host[7], moved)


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_write_out_fills_the_prompts_blocks(
    tokens: int, pools: tuple[torch.Tensor, torch.Tensor]
) -> None:
    pool, host = pools
    k, v = (torch.randn(tokens, HEADS, DIM).to(pool.device, pool.dtype) for _ in range(2))
    blocks = [5, 2, 8][: -(-tokens // 16)]
    expected = host.clone()
    for t in range(tokens):
        expected[blocks[t // 16], 1, 0, :, t % 16] = k[t].cpu()
        expected[blocks[t // 16], 1, 1, :, t % 16] = v[t].cpu()
    ids = torch.tensor(blocks, dtype=torch.int32, device=pool.device)
    kv.write_out(k, v, host, 1, ids, programs=3)
    if pool.is_cuda:
        torch.cuda.synchronize()
    assert torch.equal(host, expected)


def test_some_heads_move_alone(pools: tuple[torch.Tensor, torch.Tensor]) -> None:
    """As between ranks of differently divided pools: the last head here is the first there."""
    pool, host = pools
    before, there = pool.clone(), host.clone()
    mover = HeadMover(pool[:, :, :, HEADS - 1 :], host[:, :, :, :1])
    mover.swap_out([1, 5], [7, 3])
    mover.swap_in([8], [2])
    k, v = (torch.randn(20, HEADS, DIM).to(pool.device, pool.dtype) for _ in range(2))
    ids = torch.tensor([5, 6], dtype=torch.int32, device=pool.device)
    kv.write_out(k[:, HEADS - 1 :], v[:, HEADS - 1 :], host[:, :, :, :1], 1, ids)
    if pool.is_cuda:
        torch.cuda.synchronize()
    expected = there.clone()
    expected[[7, 3], :, :, 0] = before[:, [1, 5], :, HEADS - 1].transpose(0, 1).cpu()
    for which, rows in enumerate((k, v)):
        expected[5, 1, which, 0] = rows[:16, HEADS - 1].cpu()
        expected[6, 1, which, 0, :4] = rows[16:, HEADS - 1].cpu()
    assert torch.equal(host, expected)
    before[:, 2, :, HEADS - 1] = there[8, :, :, 0].to(pool.device)
    assert torch.equal(pool, before)


def test_append_reads_strided_rows(pools: tuple[torch.Tensor, torch.Tensor]) -> None:
    pool, _ = pools
    both = torch.randn(3, 2, HEADS, DIM).to(pool.device, pool.dtype)
    slots = torch.tensor([16 * 3 + 2, -1, 16 * 6], device=pool.device)
    expected = pool[0].clone()
    for row, slot in ((0, 50), (2, 96)):
        expected[slot // 16, :, :, slot % 16] = both[row]
    kv.append(both[:, 0], both[:, 1], pool[0], slots)
    assert torch.equal(pool[0], expected)


def test_runs_join_consecutive_blocks() -> None:
    assert kv.runs([4, 5, 6, 2, 3, 9], 10) == [(0, 4, 3), (3, 2, 2), (5, 9, 1)]
    assert kv.runs([], 10) == []


def test_no_run_reaches_from_one_registration_into_the_next() -> None:
    assert kv.runs([2, 3, 4, 5, 6, 7, 8], 4) == [(0, 2, 2), (2, 4, 4), (6, 8, 1)]


def test_chunks_end_between_pieces_and_pages() -> None:
    chunks = chunks_of(total=10 * 6144, piece=6144, chunk=30_000)
    assert sum(count for _, count in chunks) == 10 * 6144
    assert all(start % 6144 == 0 and start % 4096 == 0 for start, _ in chunks)
    assert chunks_of(100 * 4096, 4096, 1) == [(i * 4096, 4096) for i in range(100)]
