"""Pre-attention on AMX tiles: RMSNorm, QKV, rotary embedding, and K and V into their blocks.

The product's epilogue rotates queries and keys while they are still on the core that summed them,
and writes keys and values straight into the paged cache, so that neither passes through a tensor of
its own. This file knows nothing about models or who owns the blocks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualpace.cpu import gemm_kernel as kernel
from dualpace.cpu.dense_stage import Rooms, norm_rows
from dualpace.cpu.gemm import MAX_ROWS, Epilogue, TileLinear
from dualpace.cpu.plan import BLOCK_TOKENS


@dataclass(frozen=True)
class Places:
    """Where the tokens of a round stand, for all layers.

    cos, sin  float32 [rows, head_dim / 2]: of each row's position
    slots     int64 [rows]: `block * 16 + offset` in every layer's cache
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor


class PreAttention:
    """x [rows, H] -> q [rows, q_heads, d], all bf16, with K and V written to a cache.

    norm [H] and qkv [(q_heads + 2 kv_heads) d, H], without biases; qkv is copied. native=False
    computes the same without a tile unit, slowly (tests). Raises ValueError for sizes that do not
    fit (d and H must be multiples of 32), RuntimeError where there is no tile unit.
    """

    def __init__(
        self,
        norm: Tensor,
        qkv: Tensor,
        heads: tuple[int, int, int],
        eps: float,
        rooms: Rooms | None = None,
        native: bool = True,
    ) -> None:
        self._q_heads, self._kv_heads, self._dim = heads
        if self._dim % 32 or qkv.shape[0] != (self._q_heads + 2 * self._kv_heads) * self._dim:
            raise ValueError(f"qkv {tuple(qkv.shape)} does not fit heads {heads} of 32 n elements")
        if norm.dtype != torch.bfloat16 or norm.shape != qkv.shape[1:]:
            raise ValueError(f"norm must be bf16 [{qkv.shape[1]}], not {tuple(norm.shape)}")
        self._rooms = rooms or Rooms()
        self._norm, self._eps = norm.contiguous(), eps
        self._qkv = _Product(qkv, Epilogue.ROPE, native, self._rooms.tiles, self._dim)

    def __call__(self, x: Tensor, places: Places, cache: Tensor) -> Tensor:
        """cache [blocks, 2, kv_heads, 16, d]: block and head strides free; written in place.

        Raises ValueError for a cache, angles or slots that do not fit.
        """
        rows = x.shape[0]
        self._check(rows, places, cache)
        (normal,) = self._rooms.rows.tensors((rows, x.shape[1]))
        norm_rows(x, self._norm, self._eps, normal)
        q = x.new_empty(rows, self._q_heads, self._dim)
        slots = places.slots.numpy()
        block, offset = np.divmod(slots, BLOCK_TOKENS)
        to_cache = (block * cache.stride(0) + offset * self._dim) * 2
        to_q = np.arange(rows) * (q.stride(0) * 2)
        for first in range(0, rows, MAX_ROWS):
            self._qkv.run(
                normal[first : first + MAX_ROWS],
                {
                    kernel.HEAD_DIM: self._dim,
                    kernel.Q_HEADS: self._q_heads,
                    kernel.KV_HEADS: self._kv_heads,
                    kernel.COS: places.cos[first:].data_ptr(),
                    kernel.SIN: places.sin[first:].data_ptr(),
                    kernel.TABLE_STRIDE: self._dim // 2 * 4,
                    kernel.OUT: q.data_ptr(),
                    kernel.OUT_OFFSETS: to_q[first:].ctypes.data,
                    kernel.CACHE: cache.data_ptr(),
                    kernel.CACHE_OFFSETS: to_cache[first:].ctypes.data,
                    kernel.HEAD_STRIDE: cache.stride(2) * 2,
                    kernel.VALUE_STRIDE: cache.stride(1) * 2,
                },
            )
        return q

    def _check(self, rows: int, places: Places, cache: Tensor) -> None:
        if cache.shape[1:] != (2, self._kv_heads, BLOCK_TOKENS, self._dim) or (
            cache.dtype != torch.bfloat16 or cache.stride()[3:] != (self._dim, 1)
        ):
            raise ValueError(
                f"the cache must be bf16 [blocks, 2, {self._kv_heads}, {BLOCK_TOKENS}, "
                f"{self._dim}] with contiguous rows"
            )
        for angles in (places.cos, places.sin):
            shaped = angles.shape == (rows, self._dim // 2) and angles.is_contiguous()
            if not shaped or angles.dtype != torch.float32:
                raise ValueError(f"cos and sin must be float32 [{rows}, {self._dim // 2}]")
        slots = places.slots
        if slots.shape != (rows,) or slots.dtype != torch.int64:
            raise ValueError(f"slots must be int64 [{rows}]")
        low, high = slots.aminmax()
        if low < 0 or high >= cache.shape[0] * BLOCK_TOKENS:
            raise ValueError(f"a slot lies outside the cache's {cache.shape[0]} blocks")


class _Product(TileLinear):
    """The product alone, with the fields of its epilogue."""

    def run(self, x: Tensor, ends: dict[int, int]) -> None:
        self._run(x, ends)
