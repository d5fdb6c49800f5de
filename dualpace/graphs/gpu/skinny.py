"""x times a weight transposed for few rows: the weight streams through once, split along K.

The weight tile is the tall operand of the tensor cores and the rows are the narrow one, so that 16
rows cost what 1 does. Partial sums go out in float32; the kernel that reads them next adds them
up (fused.py), so a split costs no kernel of its own. Two epilogues end in the kernel: SiLU times up
for a packed gate-and-up weight, and the best column of every tile for greedy sampling.

Shape suffixes: M rows, N columns (out_features), K in_features, S splits, T tiles of columns.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# Kernels are typed by Triton, at their launch.

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dualpace.graphs.gpu.device import launch_options

PARTIAL, SILU, BEST = 0, 1, 2
MAX_ROWS = 64
MAX_SPLIT = 16
_PREFETCHED_ELEMENTS = 512  # along K, asked for before the predecessor has ended


@dataclass(frozen=True, slots=True)
class Skinny:
    """How one product is cut: tile of the weight, pipeline depth, warps, splits along K."""

    block_n: int  # columns of the compiled tile, a power of two
    block_k: int
    stages: int
    warps: int
    split: int = 1  # parts of K, as even as whole steps allow
    width: int = 0  # columns of a program where fewer than block_n: they fill the device better

    @property
    def columns(self) -> int:
        return self.width or self.block_n

    def fits(self, columns: int, depth: int) -> bool:
        """Whether a weight of `columns` x `depth` is cut without a rest."""
        whole = columns % self.columns == 0 and depth % self.block_k == 0
        return whole and self.split <= depth // self.block_k


def block_rows(num_rows: int) -> int:
    """Rows of the compiled tile: a power of two, at least 16."""
    assert num_rows <= MAX_ROWS
    return max(16, triton.next_power_of_2(num_rows))


def prefetched(depth: int, how: Skinny) -> int:
    """Steps along K whose weights are asked for before the predecessor has ended."""
    return min(_PREFETCHED_ELEMENTS // how.block_k, depth // how.block_k // how.split)


def partials(x_MK: Tensor, w_NK: Tensor, out_SMN: Tensor, how: Skinny) -> None:
    """out[s] = x times w transposed over the s-th part of K: float32 [S, M, N]."""
    tiles = w_NK.shape[0] // how.columns
    _launch(x_MK, w_NK, out_SMN, out_SMN, how, (tiles, how.split), PARTIAL, w_NK.shape[0])


def silu_gate_up(x_MK: Tensor, w_NK: Tensor, out_MI: Tensor, how: Skinny) -> None:
    """out = silu(gate) * up for w = [gate; up]: [M, N / 2] in x's dtype."""
    half = w_NK.shape[0] // 2
    _launch(x_MK, w_NK, out_MI, out_MI, how, (half // how.columns, 1), SILU, half)


def best_of_tiles(
    x_MK: Tensor, w_NK: Tensor, value_TM: Tensor, index_TM: Tensor, how: Skinny
) -> None:
    """The largest product of each row within every tile of columns, and its column."""
    tiles = w_NK.shape[0] // how.columns
    _launch(x_MK, w_NK, value_TM, index_TM, how, (tiles, 1), BEST, w_NK.shape[0])


def _launch(
    x_MK: Tensor,
    w_NK: Tensor,
    out: Tensor,
    index: Tensor,
    how: Skinny,
    grid: tuple[int, int],
    epilogue: int,
    columns: int,
) -> None:
    M, K = x_MK.shape
    assert how.fits(columns, K), f"{how} does not divide {columns} x {K}"
    skinny_kernel[grid](
        x_MK,
        w_NK,
        out,
        index,
        M,
        columns,
        K,
        BLOCK_M=block_rows(M),
        BLOCK_N=how.block_n,
        BLOCK_K=how.block_k,
        WIDTH=how.columns,
        EPILOGUE=epilogue,
        PREFETCHED=prefetched(K, how),
        num_warps=how.warps,
        num_stages=how.stages,
        **launch_options(x_MK.device),
    )


@triton.jit
def prefetch(addresses):
    """Asks the L2 for the lines of `addresses` and waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["M"])
def skinny_kernel(
    x,
    w,
    out,
    index,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PREFETCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    steps = K // BLOCK_K
    begin = part * steps // tl.num_programs(1) * BLOCK_K
    end = (part + 1) * steps // tl.num_programs(1) * BLOCK_K
    m, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    n = tile * WIDTH + c
    k = begin + tl.arange(0, BLOCK_K)
    row_starts = w + n.to(tl.int64) * K
    up_rows = N.to(tl.int64) * K  # SILU: from a row of gate to its row of up
    if PDL:
        gdc_launch_dependents()
        # 64 elements are a line of 128 bytes. Weights depend on nobody.
        rows = w + (tile * WIDTH + c % WIDTH).to(tl.int64) * K
        lines = rows[:, None] + begin + tl.arange(0, BLOCK_K // 64)[None, :] * 64
        for step in tl.static_range(PREFETCHED):
            prefetch(lines + step * BLOCK_K)
            if EPILOGUE == 1:
                prefetch(lines + up_rows + step * BLOCK_K)
        gdc_wait()
    w_ptrs = row_starts[:, None] + k[None, :]
    x_ptrs = x + m[None, :] * K + k[:, None]
    is_row = m[None, :] < M
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in tl.range(begin, end, BLOCK_K):
        x_tile = tl.load(x_ptrs, mask=is_row, other=0.0)
        if WIDTH == BLOCK_N:
            w_tile = tl.load(w_ptrs)
        else:
            w_tile = tl.load(w_ptrs, mask=(c < WIDTH)[:, None], other=0.0)
        acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
        if EPILOGUE == 1:
            if WIDTH == BLOCK_N:
                up_tile = tl.load(w_ptrs + up_rows)
            else:
                up_tile = tl.load(w_ptrs + up_rows, mask=(c < WIDTH)[:, None], other=0.0)
            up = tl.dot(up_tile, x_tile, up, input_precision="ieee")
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    if EPILOGUE == 2:
        value, where = tl.max(acc, axis=0, return_indices=True)
        tl.store(out + tile * M + m, value, mask=m < M)
        tl.store(index + tile * M + m, where.to(tl.int32) + tile * WIDTH, mask=m < M)
    else:
        if EPILOGUE == 1:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        place = (part * M + m)[None, :] * N + n[:, None]
        is_out = is_row & (c < WIDTH)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_out)
