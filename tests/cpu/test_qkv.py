"""Pre-attention as a whole: queries, and what it leaves in the cache, against float64."""

import pytest
import torch
import torch.nn.functional as F

from dualpace.cpu.dense_stage import Rooms
from dualpace.cpu.gemm import Unit
from dualpace.cpu.isa import Level, detected
from dualpace.cpu.qkv import Places, PreAttention

UNIT = Unit(True, detected().has(Level.AMX))
HIDDEN, EPS = 96, 1e-5


def bf16(*size: int) -> torch.Tensor:
    return torch.randn(*size).to(torch.bfloat16)


def rotated(x: torch.Tensor, places: Places) -> torch.Tensor:
    cos, sin = places.cos.double()[:, None], places.sin.double()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


CASES = [((3, 1, 64), 1), ((4, 2, 32), 37), ((2, 2, 96), 520)]


@pytest.mark.parametrize("kind", ["plain", "bias", "norms", "both"])
@pytest.mark.parametrize(("heads", "rows"), CASES)
def test_queries_are_returned_and_keys_and_values_stored(
    heads: tuple[int, int, int], rows: int, kind: str
) -> None:
    q_heads, kv_heads, dim = heads
    norm, x = bf16(HIDDEN), bf16(rows, HIDDEN)
    qkv = bf16((q_heads + 2 * kv_heads) * dim, HIDDEN) / HIDDEN**0.5
    angles = torch.rand(rows, dim // 2) * 6
    slots = torch.randperm(rows + 40)[:rows]
    places = Places(angles.cos(), angles.sin(), slots)
    pool = bf16(-(-(rows + 40) // 16), 3, 2, kv_heads, 16, dim)  # block-major over layers
    before = pool.clone()
    bias = bf16(len(qkv)) if kind in ("bias", "both") else None
    head_norms = (bf16(dim), bf16(dim)) if kind in ("norms", "both") else None
    stage = PreAttention(norm, qkv, heads, EPS, Rooms(), UNIT, bias, head_norms)
    q = stage(x, places, pool[:, 1])

    y = F.rms_norm(x.double(), (HIDDEN,), norm.double(), EPS) @ qkv.double().T
    y = y if bias is None else y + bias.double()
    exact_q, exact_k, v = y.view(rows, -1, dim).split([q_heads, kv_heads, kv_heads], 1)
    if head_norms is not None:
        both = zip((exact_q, exact_k), head_norms, strict=True)
        exact_q, exact_k = (F.rms_norm(part, (dim,), w.double(), EPS) for part, w in both)
    for result, exact in (
        (q, rotated(exact_q, places)),
        (pool[slots // 16, 1, 0, :, slots % 16], rotated(exact_k, places)),
        (pool[slots // 16, 1, 1, :, slots % 16], v),
    ):
        assert (result.double() - exact).norm() < 0.01 * exact.norm()
        assert (result.double() - exact).abs().max() < 0.01 * exact.abs().max()
    pool[slots // 16, 1, :, :, slots % 16] = before[slots // 16, 1, :, :, slots % 16]
    assert torch.equal(pool, before)


def test_misfits_are_refused() -> None:
    stage = PreAttention(bf16(HIDDEN), bf16(160, HIDDEN), (3, 1, 32), EPS, None, UNIT)
    places = Places(torch.ones(2, 16), torch.zeros(2, 16), torch.tensor([3, 32]))
    with pytest.raises(ValueError, match="slot"):
        stage(bf16(2, HIDDEN), places, bf16(2, 2, 1, 16, 32))
    with pytest.raises(ValueError, match="cache"):
        stage(bf16(2, HIDDEN), places, bf16(3, 2, 2, 16, 32))
    with pytest.raises(ValueError, match="cos"):
        stage(bf16(3, HIDDEN), places, bf16(3, 2, 1, 16, 32))
    with pytest.raises(ValueError, match="norms of heads"):
        norms = (bf16(32), bf16(64))
        PreAttention(bf16(HIDDEN), bf16(160, HIDDEN), (3, 1, 32), EPS, unit=UNIT, head_norms=norms)
    with pytest.raises(ValueError, match="heads"):
        PreAttention(bf16(HIDDEN), bf16(96, HIDDEN), (3, 1, 32), EPS, None, UNIT)
