"""Paged decode attention against float64, over shapes, block tables, layouts and extreme scores."""

import math

import pytest
import torch
from torch import Tensor

from dualpace.cpu.append import kv_append, slots_of
from dualpace.cpu.attention import PagedDecoder, paged_decode, plan_decode

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


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(9, 3, 64), (32, 8, 128)])
def test_matches_float64(q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    check(*make_batch([1, 16, 17, 333, 40], q_heads, kv_heads, dim, dtype))


def test_append_then_attend() -> None:
    q, cache, tables, lens = make_batch([5, 16, 33], 9, 3, 64, BF16)
    k, v = torch.randn(2, 3, 3, 64).to(BF16)
    before = cache.clone()
    slots = slots_of(tables, lens - 1)
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
