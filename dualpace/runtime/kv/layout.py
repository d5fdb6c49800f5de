"""How a KV pool lies in memory, on either tier. Pure arithmetic: no torch, no allocation.

Legend: B blocks, L layers, 2 is K then V, K kv heads, 16 tokens of a block, D head dim.
"""

from dataclasses import dataclass
from math import prod

from dualpace.block import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shapes, strides and sizes of the HBM pool and of the host pool for one model and KV dtype.

    HBM: one pool a layer, `[B, 2, K, 16, D]`. Host: one pool block-major over layers,
    `[B, L, 2, K, 16, D]`, so that a block of all layers is one piece of `block_bytes`.
    `itemsize` is the KV dtype's size in bytes; heads are those of one rank.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def piece_shape(self) -> tuple[int, int, int, int]:
        """One block of one layer: `[2, K, 16, D]`."""
        return (2, self.num_kv_heads, BLOCK_TOKENS, self.head_dim)

    @property
    def piece_numel(self) -> int:
        return prod(self.piece_shape)

    @property
    def piece_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.piece_numel * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers: what a swap moves a block."""
        return self.piece_bytes * self.num_layers

    def hbm_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's HBM pool: `[B, 2, K, 16, D]`, contiguous."""
        return (num_blocks, *self.piece_shape)

    def host_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the host pool: `[B, L, 2, K, 16, D]`, contiguous."""
        return (num_blocks, self.num_layers, *self.piece_shape)

    def host_bytes(self, num_blocks: int) -> int:
        """Bytes of the host pool."""
        return num_blocks * self.block_bytes
