"""Both KV pools as tensors, and the stand-in's view of them as plain words for its copy thread.

How a pool lies in memory is `KvLayout`'s; who owns which block is the engine's business.
"""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from dualpace.runtime.kv.layout import KvLayout
from dualpace.runtime.kv.overlaps import Overlap

Words = npt.NDArray[Any]  # KV elements as integers of their size: copies move bits


class HostPool:
    """The shared host pool, or a rank's part of it: `blocks` [B, L, 2, K, 16, D]; `layers[l]` is
    the strided [B, 2, K, 16, D] of a layer.
    """

    def __init__(
        self, memory: memoryview, layout: KvLayout, num_blocks: int, dtype: torch.dtype
    ) -> None:
        count = layout.host_bytes(num_blocks) // layout.itemsize
        flat = torch.frombuffer(memory, dtype=dtype, count=count)
        self.blocks = flat.view(layout.host_shape(num_blocks))
        self.layers = list(self.blocks.unbind(1))

    def words(self) -> Words:
        return as_words(self.blocks)


@dataclass(frozen=True, slots=True)
class HostPart:
    """Heads that an accelerator rank has in common with a CPU rank, whose pool it is."""

    pool: HostPool
    common: Overlap

    @property
    def blocks(self) -> Tensor:
        """[B, L, 2, common heads, 16, D]."""
        return self.pool.blocks[:, :, :, self.common.theirs]

    def words(self) -> Words:
        """The same as words."""
        return self.pool.words()[:, :, :, self.common.theirs]


class AcceleratorPool:
    """The accelerator's own pool, zeroed: `blocks` [L, B, 2, K, 16, D], `layers[l]` one layer's."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (layout.num_layers, *layout.hbm_shape(num_blocks))
        self.blocks = torch.zeros(size, dtype=dtype, device=device)
        self.layers = list(self.blocks.unbind(0))

    def words(self) -> Words:
        return as_words(self.blocks)


def as_words(tensor: Tensor) -> Words:
    """A CPU tensor's memory as int16 or int32 words of the same shape."""
    words = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(words).numpy()
