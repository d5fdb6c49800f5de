"""Attention without FlashInfer: paged decode in Triton, each context in splits; prompts by SDPA.

Any dtype; float32 is multiplied in float32. Grids depend on the bucket alone, so runs may be
captured.

Shape suffixes: B rows, N and K query and key heads, G = N / K, D head size, S splits.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# Kernels are typed by Triton, at their launch.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dualpace.graphs.attention import Context, causal_prefill, gather_context
from dualpace.graphs.gpu.attention import Heads, PagedRows
from dualpace.graphs.gpu.device import launch_options, num_sms
from dualpace.graphs.gpu.planned import PackedInputs

_MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Cut:
    """How contexts are cut and read."""

    tile: int = 64  # tokens of a step in 16-bit elements; half as many in float32
    warps: int = 4
    stages: int = 3  # steps in flight
    programs: int = 4  # at least, of a multiprocessor, by splitting contexts


# What is worth timing on a device (tune_attention.py), the default first.
CUTS = (
    Cut(),
    Cut(programs=8),
    Cut(tile=32, stages=4, programs=8),
    Cut(tile=128, stages=2),
    Cut(tile=64, warps=8, programs=8),
    Cut(tile=32, warps=2, stages=5, programs=8),
)


class TritonDecode:
    """Decode of one bucket."""

    def __init__(
        self, heads: Heads, bucket: int, max_blocks: int, device: torch.device, cut: Cut
    ) -> None:
        self._heads, self._cut = heads, cut
        wanted = cut.programs * num_sms(device) // (bucket * heads.kv)
        self.splits = max(1, min(_MAX_SPLITS, triton.next_power_of_2(max(1, wanted))))
        sizes = {"indptr": bucket + 1, "last_lens": bucket, "indices": max_blocks}
        self._inputs = PackedInputs(
            {name: (torch.int32, size) for name, size in sizes.items()}, device
        )
        shape = (bucket, heads.query, self.splits)
        self._partial = torch.empty(*shape, heads.dim, dtype=torch.float32, device=device)
        self._lse = torch.empty(shape, dtype=torch.float32, device=device)

    def plan(self, rows: PagedRows) -> None:
        arrays = {
            "indptr": rows.indptr.numpy(),
            "last_lens": rows.last_lens.numpy(),
            "indices": rows.indices.numpy(),
        }
        self._inputs.send(arrays, "indices")
        self._inputs.sent()

    def run(self, q_BND: Tensor, cache: Tensor, out_BND: Tensor) -> None:
        B, N, D = q_BND.shape
        K, views = self._heads.kv, self._inputs.views
        _decode[(B, K, self.splits)](
            q_BND,
            cache,
            views["indptr"],
            views["indices"],
            views["last_lens"],
            self._partial,
            self._lse,
            cache.stride(0),
            D**-0.5,
            **_constants(self._heads, q_BND.dtype, self._cut, self.splits),
            **launch_options(q_BND.device),
        )
        _merge[(B, N)](
            self._partial,
            self._lse,
            out_BND,
            D=D,
            WIDTH=triton.next_power_of_2(D),
            SPLITS=self.splits,
            num_warps=2,
            **launch_options(q_BND.device),
        )


def compile_decode(job: tuple[Heads, torch.dtype, Cut, int]) -> None:
    """The decode kernel for arguments like those of a real launch: heads, dtype, cut, splits."""
    heads, dtype, cut, splits = job
    _decode.warmup(
        dtype,
        dtype,
        torch.int32,
        torch.int32,
        torch.int32,
        torch.float32,
        torch.float32,
        2 * heads.kv * 16 * heads.dim,
        heads.dim**-0.5,
        **_constants(heads, dtype, cut, splits),
        grid=(1,),
        **launch_options(torch.device("cuda", torch.cuda.current_device())),
    )


def _constants(heads: Heads, dtype: torch.dtype, cut: Cut, splits: int) -> dict[str, Any]:
    return {
        "N": heads.query,
        "K": heads.kv,
        "D": heads.dim,
        "GROUP": max(16, triton.next_power_of_2(heads.query // heads.kv)),
        "WIDTH": triton.next_power_of_2(heads.dim),
        "TILE": cut.tile * 2 // dtype.itemsize,
        "SPLITS": splits,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }


class SdpaPrefill:
    """Prompts by torch's scaled_dot_product_attention, one after another."""

    def __init__(self) -> None:
        self._lens: Sequence[int] = ()
        self._context: PagedRows | None = None

    def plan(self, query_lens: Sequence[int], context: PagedRows | None = None) -> None:
        self._lens, self._context = query_lens, context

    def run(
        self,
        q_TND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_TND: Tensor,
        cache: Tensor | None = None,
    ) -> None:
        contexts = None
        if self._context is not None:
            assert cache is not None
            contexts = [self._earlier(i, cache) for i in range(len(self._lens))]
        out_TND.copy_(causal_prefill(q_TND, k_TKD, v_TKD, self._lens, contexts))

    def _earlier(self, row: int, cache: Tensor) -> Context | None:
        """K and V of the tokens before this chunk."""
        assert self._context is not None
        start, end = self._context.indptr[row : row + 2].tolist()
        blocks = self._context.indices[start:end].long().to(cache.device)
        length = int(self._context.context_lens()[row]) - self._lens[row]
        return gather_context(cache, blocks, length) if length else None


class TritonAttention:
    """One model on one device."""

    def __init__(self, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
        self._heads, self._device = heads, device

    def decode(self, bucket: int, max_blocks: int, cut: Cut = CUTS[0]) -> TritonDecode:
        return TritonDecode(self._heads, bucket, max_blocks, self._device, cut)

    def prefill(self) -> SdpaPrefill:
        return SdpaPrefill()


make = TritonAttention


@triton.jit
def _decode(
    q,
    cache,
    indptr,
    indices,
    last_lens,
    partial,
    lse,
    block_stride,
    scale,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = N // K
    g, d = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(indptr + row)
    length = (tl.load(indptr + row + 1) - first - 1) * 16 + tl.load(last_lens + row)
    share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    start = split * share
    end = tl.minimum(start + share, length)
    heads = kv_head * G + g
    q_mask = (g[:, None] < G) & (d[None, :] < D)
    q_tile = tl.load(q + (row * N + heads[:, None]) * D + d[None, :], mask=q_mask, other=0.0)
    high = tl.full((GROUP,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, WIDTH), tl.float32)
    for begin in tl.range(start, end, TILE):
        t = begin + tl.arange(0, TILE)
        inside = t < end
        block = tl.load(indices + first + t // 16, mask=inside, other=0).to(tl.int64)
        place = cache + block * block_stride + (kv_head * 16 + t % 16) * D
        mask = inside[:, None] & (d[None, :] < D)
        k = tl.load(place[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(place[:, None] + K * 16 * D + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        high = higher
    place = (row * N + heads) * SPLITS + split
    safe = tl.where(total > 0.0, total, 1.0)  # an empty split weighs nothing
    tl.store(partial + place[:, None] * D + d[None, :], acc / safe[:, None], mask=q_mask)
    result = tl.where(total > 0.0, high + tl.log(safe), -float("inf"))
    tl.store(lse + place, result, mask=g < G)


@triton.jit
def _merge(
    partial,
    lse,
    out,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row_head = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    weights = tl.load(lse + row_head * SPLITS + s)
    weights = tl.exp(weights - tl.max(weights, 0))
    mask = d[None, :] < D
    parts = tl.load(
        partial + (row_head * SPLITS + s[:, None]) * D + d[None, :], mask=mask, other=0.0
    )
    value = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row_head * D + d, value.to(out.dtype.element_ty), mask=d < D)
