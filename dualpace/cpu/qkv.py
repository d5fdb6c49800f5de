"""Pre-attention on tiles: RMSNorm, QKV, norms of heads, rotary embedding, and K and V into their
blocks.

The product's epilogue rotates queries and keys while they are still on the core that summed them,
and writes keys and values straight into the paged cache, so that neither passes through a tensor of
its own. This file knows nothing about models or who owns the blocks.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualpace.block import BLOCK_TOKENS
from dualpace.cpu import amx_ir
from dualpace.cpu import gemm_kernel as kernel
from dualpace.cpu import norm_kernel as norms
from dualpace.cpu.dense_stage import Rooms, float_bits, norm_call
from dualpace.cpu.gemm import (
    MAX_ROWS,
    TILES,
    Block,
    Call,
    Epilogue,
    TileLinear,
    Unit,
    count_tiles,
    fits,
    input_block,
)


class Places:
    """Where the tokens of a round stand, for all layers.

    cos, sin  float32 [rows, head_dim / 2]: of each row's position
    slots     int64 [rows]: `block * 16 + offset` in every layer's cache
    """

    def __init__(self, cos: Tensor, sin: Tensor, slots: Tensor) -> None:
        shaped = cos.shape == sin.shape == (len(slots), cos.shape[1])
        if not shaped or not cos.is_contiguous() or not sin.is_contiguous():
            raise ValueError("cos and sin must be [rows, head_dim / 2] with one row a slot")
        if cos.dtype != torch.float32 or sin.dtype != torch.float32 or slots.dtype != torch.int64:
            raise ValueError("cos and sin must be float32, and slots int64")
        self.cos, self.sin, self.slots = cos, sin, slots
        self._highest, self._lowest = int(slots.max()), int(slots.min())
        self._offsets: dict[int, NDArray[np.int64]] = {}

    def offsets(self, cache: Tensor) -> NDArray[np.int64]:
        """int64 [rows]: bytes from a layer's cache to each row. ValueError if a slot is outside."""
        if self._lowest < 0 or self._highest >= len(cache) * BLOCK_TOKENS:
            raise ValueError(f"a slot lies outside the cache's {len(cache)} blocks")
        stride = cache.stride(0)
        if stride not in self._offsets:
            block, offset = np.divmod(self.slots.numpy(), BLOCK_TOKENS)
            self._offsets[stride] = (block * stride + offset * cache.stride(3)) * 2
        return self._offsets[stride]


class PreAttention:
    """x [rows, H] -> q [rows, q_heads, d], all bf16, with K and V written to a cache.

    norm [H]; qkv [(q_heads + 2 kv_heads) d, H] and its bias, both copied; head_norms, of queries
    and of keys, [d] each, or None. Raises ValueError for sizes that do not fit (d and H must be
    multiples of 32), RuntimeError where the unit cannot be used.
    """

    def __init__(
        self,
        norm: Tensor,
        qkv: Tensor,
        heads: tuple[int, int, int],
        eps: float,
        rooms: Rooms | None = None,
        unit: Unit = TILES,
        bias: Tensor | None = None,
        head_norms: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.heads = self._q_heads, self._kv_heads, self._dim = heads
        if self._dim % 32 or qkv.shape[0] != (self._q_heads + 2 * self._kv_heads) * self._dim:
            raise ValueError(f"qkv {tuple(qkv.shape)} does not fit heads {heads} of 32 n elements")
        if norm.dtype != torch.bfloat16 or norm.shape != qkv.shape[1:]:
            raise ValueError(f"norm must be bf16 [{qkv.shape[1]}], not {tuple(norm.shape)}")
        self.rooms = rooms or Rooms()
        self._norm, self._bits = norm.contiguous(), float_bits(eps)
        self._head_norms = head_norms and [weight.contiguous() for weight in head_norms]
        if any(w.dtype != torch.bfloat16 or w.shape != (self._dim,) for w in head_norms or ()):
            raise ValueError(f"the norms of heads must be bf16 [{self._dim}]")
        self._qkv = TileLinear(
            qkv,
            Epilogue.ROPE,
            unit,
            self.rooms.tiles,
            self._dim,
            bias,
            whole_heads=head_norms is not None,
        )
        norms.norm_kernel()  # compiled now rather than in service
        self.calls(MAX_ROWS)  # room for all there will be

    @property
    def hidden(self) -> int:
        return self._qkv.inputs

    def __call__(self, x: Tensor, places: Places, cache: Tensor) -> Tensor:
        """cache [blocks, 2, kv_heads, 16, d]: block and head strides free; written in place.

        Raises ValueError for rows, a cache, angles or slots that do not fit.
        """
        rows = len(x)
        self.check(x, places, cache)
        q = x.new_empty(rows, self._q_heads, self._dim)
        for first in range(0, rows, MAX_ROWS):
            count = min(rows - first, MAX_ROWS)
            calls = self.rooms.calls(
                ("pre", count, x.shape[1], self.heads, self._head_norms is None),
                partial(self.calls, count),
            )
            self.fill([call.block for call in calls], x[first:], cache, q[first:])
            place(calls[1].block, places, cache, first)
            for call in calls:
                call()
        return q

    def fill(self, blocks: Sequence[Block], x: Tensor, cache: Tensor, q: Tensor) -> None:
        """Make the blocks of `calls` of any layer of equal sizes this layer's, but for `place`."""
        norm, qkv = blocks
        norm[norms.INPUT] = x.data_ptr()
        norm[norms.INPUT_STRIDE] = x.stride(0) * 2
        norm[norms.WEIGHT] = self._norm.data_ptr()
        norm[norms.EPSILON_BITS] = self._bits
        qkv[kernel.WEIGHT] = self._qkv.address
        qkv[kernel.BIAS] = self._qkv.bias_address
        if self._head_norms:
            q_norm, k_norm = (weight.data_ptr() for weight in self._head_norms)
            qkv[kernel.Q_NORM], qkv[kernel.K_NORM] = q_norm, k_norm
            qkv[kernel.EPSILON_BITS] = self._bits
        qkv[kernel.OUT] = q.data_ptr()
        qkv[kernel.CACHE] = cache.data_ptr()
        qkv[kernel.HEAD_STRIDE] = cache.stride(2) * 2
        qkv[kernel.VALUE_STRIDE] = cache.stride(1) * 2

    def calls(self, rows: int) -> tuple[Call, Call]:
        """Both kernels for up to MAX_ROWS rows, right while the rooms' state is what it is."""
        hidden = self._qkv.inputs
        (normal,) = self.rooms.rows.take(hidden // 32 * count_tiles(rows) * amx_ir.TILE)
        norm, qkv = norm_call(rows, hidden, self._bits), self._qkv.call(rows)
        norm.block[norms.OUT] = normal
        norm.block[norms.K_BLOCK] = input_block(count_tiles(rows))
        to_q = np.arange(rows) * (self._q_heads * self._dim * 2)
        qkv.kept += (to_q,)
        qkv.block[kernel.INPUT_TILES] = normal
        qkv.block[kernel.HEAD_DIM] = self._dim
        qkv.block[kernel.Q_HEADS] = self._q_heads
        qkv.block[kernel.KV_HEADS] = self._kv_heads
        qkv.block[kernel.TABLE_STRIDE] = self._dim // 2 * 4
        qkv.block[kernel.OUT_OFFSETS] = to_q.ctypes.data
        return norm, qkv

    def check(self, x: Tensor, places: Places, cache: Tensor) -> None:
        """ValueError for rows, a cache or angles that do not fit."""
        width = self._norm.shape[0]
        if x.shape[1:] != (width,) or x.dtype != torch.bfloat16 or x.stride(1) != 1:
            raise ValueError(f"x must be bf16 [rows, {width}] with whole rows")
        if cache.shape[1:] != (2, self._kv_heads, BLOCK_TOKENS, self._dim) or (
            cache.dtype != torch.bfloat16 or cache.stride()[3:] != (self._dim, 1)
        ):
            raise ValueError(
                f"the cache must be bf16 [blocks, 2, {self._kv_heads}, {BLOCK_TOKENS}, "
                f"{self._dim}] with contiguous rows"
            )
        if places.cos.shape != (len(x), self._dim // 2):
            raise ValueError(f"cos and sin must be [{len(x)}, {self._dim // 2}]")


def place(qkv: Block, places: Places, cache: Tensor, first: int = 0) -> None:
    """Have the block of a product, or the blocks of many over caches like this one, write the rows
    of a round from `first` on.
    """
    qkv[..., kernel.COS] = places.cos[first].data_ptr()
    qkv[..., kernel.SIN] = places.sin[first].data_ptr()
    qkv[..., kernel.CACHE_OFFSETS] = places.offsets(cache)[first:].ctypes.data


def takes(qkv: Tensor, head_dim: int) -> bool:
    """Whether PreAttention takes a matrix of this dtype and size."""
    return qkv.dtype == torch.bfloat16 and head_dim % 32 == 0 and fits(*qkv.shape)
