"""Paged decode attention against float64, over shapes, block tables, layouts and extreme scores."""

import math
import threading

import pytest
import torch
from torch import Tensor

from dualpace.cpu.append import kv_append
from dualpace.cpu.attention import (
    PagedDecoder,
    num_compiles,
    paged_decode,
    plan_decode,
    warm_up,
)
from dualpace.cpu.block_ir import BlockShape
from tests.cpu.threads import each_thread

BF16, F32 = torch.bfloat16, torch.float32
# Worst error against float64 of the same stored inputs, times the largest |V| that is attended
# to: half a bf16 ulp of the output, and the weights' own rounding where the ISA multiplies in
# bf16.
TOLERANCE = {BF16: 2**-7, F32: 2**-20}


def make_batch(
    lens: list[int], q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, kv_cache, block_tables (shuffled, block 0 left out, poison behind each row's
    end), context_lens.
    """
    width = max(-(-n // 16) for n in lens)
    blocks = torch.randperm(len(lens) * width, dtype=torch.int32).reshape(len(lens), width) + 1
    for row, n in enumerate(lens):
        blocks[row, -(-n // 16) :] = 2**31 - 1  # reading this would crash
    cache = torch.randn(len(lens) * width + 1, 2, kv_heads, 16, dim).to(dtype)
    q = torch.randn(len(lens), q_heads, dim).to(dtype)
    return q, cache, blocks, torch.tensor(lens, dtype=torch.int32)


def reference(q: Tensor, cache: Tensor, tables: Tensor, lens: Tensor, scale: float) -> Tensor:
    """The same in float64, one row at a time."""
    out = torch.empty(q.shape, dtype=torch.float64)
    kv_heads, dim = cache.shape[2], cache.shape[4]
    for row, n in enumerate(lens.tolist()):
        blocks = cache[tables[row, : -(-n // 16)].long()].double()  # [b, 2, H, 16, d]
        k, v = blocks.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :n]
        queries = q[row].double().reshape(kv_heads, -1, dim)
        weights = (queries @ k.transpose(1, 2) * scale).softmax(-1)
        out[row] = (weights @ v).reshape(-1, dim)
    return out


def check(
    q: Tensor, cache: Tensor, tables: Tensor, lens: Tensor, scale: float | None = None
) -> None:
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out = torch.full_like(q, math.nan)
    paged_decode(q, cache, tables, lens, scale, out)
    assert out.isfinite().all()
    bound = TOLERANCE[q.dtype] * cache[:, 1].abs().max().item()
    assert (out.double() - reference(q, cache, tables, lens, scale)).abs().max().item() < bound


SMALL, LARGE, MANY = (9, 3, 64), (32, 8, 128), (2, 2, 80)
# Kernels of other CPUs run here through stand-ins; test_block has all head sizes and groups.
DOT = BlockShape(64, 3, 16, bf16=True, dot=True, native=False)
TILES = BlockShape(64, 3, 16, bf16=True, dot=True, native=False, tiles=True)


@pytest.mark.parametrize(
    ("heads", "dtype"), [(SMALL, BF16), (SMALL, F32), (LARGE, BF16), (MANY, BF16)]
)
def test_matches_float64(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(*make_batch([1, 16, 17, 333, 40], *heads, dtype))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [None, DOT, TILES])
def test_long_contexts_are_cut_and_merged(threads: int, shape: BlockShape | None) -> None:
    q, cache, tables, lens = make_batch([5000, 1, 700], *SMALL, BF16)
    decoder = PagedDecoder(9, 3, 64, BF16, shape)
    plan = plan_decode(lens.numpy(), 3, threads, chunks_per_thread=2)
    assert threads == 1 or plan.num_slots > 0
    decoder.begin(plan, tables)
    expected = reference(q, cache, tables, lens, 0.125)
    for _ in range(3):  # counters are left as they were found
        out = torch.full_like(q, math.nan)
        decoder.run(q, cache, 0.125, out)
        assert (out.double() - expected).abs().max() < 2**-7


def test_heads_walked_together_give_the_same() -> None:
    q, cache, tables, lens = make_batch([900, 31], *LARGE, BF16)
    results = []
    for heads in (1, 4):
        decoder = PagedDecoder(*LARGE, BF16)
        decoder.begin(plan_decode(lens.numpy(), 8, 2, heads_per_item=heads), tables)
        results.append(torch.empty_like(q))
        decoder.run(q, cache, 0.09, results[-1])
    torch.testing.assert_close(*results, rtol=2**-7, atol=2**-9)


def test_shared_and_repeated_blocks() -> None:
    q, cache, tables, lens = make_batch([100, 100, 64], *SMALL, BF16)
    tables[1] = tables[0]  # a shared prefix that is the whole context
    tables[2, :4] = tables[0, 2]  # one block four times
    check(q, cache, tables, lens)


def test_longest_context() -> None:
    n = 131072
    cache = torch.randn(64, 2, 3, 16, 64).to(BF16)
    tables = torch.randint(0, 64, (1, n // 16), dtype=torch.int32)
    check(torch.randn(1, 9, 64).to(BF16), cache, tables, torch.tensor([n], dtype=torch.int32))


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_extreme_scores_give_numbers(size: float) -> None:
    q, cache, tables, lens = make_batch([40, 333], *SMALL, BF16)
    check(q * size, cache, tables, lens)
    check(q, cache, tables, lens, scale=-size)


def test_block_major_pool_and_strided_rows() -> None:
    q, cache, tables, lens = make_batch([40, 100], *SMALL, BF16)
    pool = torch.randn(cache.shape[0], 5, *cache.shape[1:]).to(BF16)
    pool[:, 3] = cache
    wide = torch.full((2, 30, 64), math.nan, dtype=BF16)  # q as a slice of packed QKV
    wide[:, :9] = q
    out = torch.full((2, 2, 9, 64), math.nan, dtype=BF16)
    paged_decode(wide[:, :9], pool[:, 3], tables, lens, 0.125, out[:, 1])
    assert out[:, 0].isnan().all()
    expected = reference(q, cache, tables, lens, 0.125)
    assert (out[:, 1].double() - expected).abs().max() < 2**-7


def test_padding_rows_in_scratch_block() -> None:
    q, cache, tables, lens = make_batch([40, 1, 1], *SMALL, BF16)
    tables[1:, 0] = 0
    check(q, cache, tables, lens)


def test_misfits_are_refused() -> None:
    q, cache, tables, lens = make_batch([40, 20], *SMALL, BF16)
    out = torch.empty_like(q)
    with pytest.raises(ValueError, match="block_tables"):
        paged_decode(q, cache, tables[:, :1], lens, 1.0, out)
    with pytest.raises(ValueError, match="kv_cache"):
        paged_decode(q, cache.float(), tables, lens, 1.0, out)
    with pytest.raises(ValueError, match="at least one token"):
        paged_decode(q, cache, tables, lens * 0, 1.0, out)
    with pytest.raises(ValueError, match="out"):
        paged_decode(q, cache, tables, lens, 1.0, out[:1])
    with pytest.raises(ValueError, match="multiples of 16"):
        PagedDecoder(4, 2, 72, BF16)
    with pytest.raises(ValueError, match="do not divide"):
        PagedDecoder(9, 2, 64, BF16)


def test_nothing_compiles_once_warm() -> None:
    warm_up(*SMALL, BF16)
    before = num_compiles()
    for lens in ([3], [700, 5], [16] * 30):
        q, cache, tables, context = make_batch(lens, *SMALL, BF16)
        paged_decode(q, cache, tables, context, 1.0, torch.empty_like(q))
    assert num_compiles() == before


def test_threads_live_on_between_small_and_large_batches() -> None:
    def threads() -> set[int]:
        seen: list[int] = []
        each_thread(lambda: seen.append(threading.get_native_id()), 4)
        return set(seen)

    before = threads()
    for lens in ([3], [40] * 3, [900] * 9):
        q, cache, tables, context = make_batch(lens, *SMALL, BF16)
        decoder = PagedDecoder(*SMALL, BF16)
        decoder.begin(plan_decode(context.numpy(), 3, 4), tables)
        decoder.run(q, cache, 1.0, torch.empty_like(q))
        assert threads() == before


def test_append_then_attend() -> None:
    q, cache, tables, lens = make_batch([5, 16, 33], 9, 3, 64, BF16)
    k, v = torch.randn(2, 3, 3, 64).to(BF16)
    before = cache.clone()
    last = lens.long() - 1
    slots = tables.long().gather(1, (last // 16).unsqueeze(1)).squeeze(1) * 16 + last % 16
    kv_append(k, v, cache, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(cache[slot // 16, 0, :, slot % 16], k[row])
        assert torch.equal(cache[slot // 16, 1, :, slot % 16], v[row])
        before[slot // 16, :, :, slot % 16] = cache[slot // 16, :, :, slot % 16]
    assert torch.equal(cache, before)
    check(q, cache, tables, lens)


def test_plan_is_shared_by_layers() -> None:
    q, _, tables, lens = make_batch([40, 7], 9, 3, 64, BF16)
    pool = torch.randn(int(tables[tables < 2**31 - 1].max()) + 1, 4, 2, 3, 16, 64).to(BF16)
    decoder = PagedDecoder(9, 3, 64, BF16)
    decoder.begin(plan_decode(lens.numpy(), 3, 2), tables)
    for layer in range(4):
        out = torch.full_like(q, math.nan)
        decoder.run(q, pool[:, layer], 0.125, out)
        expected = reference(q, pool[:, layer], tables, lens, 0.125)
        assert (out.double() - expected).abs().max() < 0.05
