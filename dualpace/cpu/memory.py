"""Large host buffers in huge pages where the kernel allows them, and scratch that is kept between
calls. Knows nothing about their use.
"""

import mmap
import os

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20


def huge_empty(num_bytes: int) -> Tensor:
    """Zeroed private memory, uint8 [num_bytes], which the kernel may back with huge pages.

    Its pages are taken when first written, on the NUMA node of the writer.
    """
    size = -(-max(num_bytes, 1) // _HUGE_PAGE) * _HUGE_PAGE
    # A huge page needs an aligned address, which an anonymous map has only by chance.
    area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)  # keeps the map alive
    skip = -whole.data_ptr() % _HUGE_PAGE
    return whole[skip : skip + num_bytes]


def shared_empty(num_bytes: int) -> Tensor:
    """Zeroed memory, uint8 [num_bytes], that processes could share, as the engine's host pool is:
    in pages of 4 KiB where the kernel keeps huge ones from shared memory.
    """
    file = os.memfd_create("kv")
    os.ftruncate(file, num_bytes)
    area = mmap.mmap(file, num_bytes)
    os.close(file)
    return torch.frombuffer(area, dtype=torch.uint8)


class Scratch:
    """One buffer that calls after each other share; it grows. Not for two threads."""

    def __init__(self) -> None:
        self._buffer = huge_empty(0)

    def take(self, *sizes: int) -> list[int]:
        """Addresses of pieces of at least `sizes` bytes, valid until the next call of `take`."""
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // 64) * 64
        if self._buffer.numel() < end:
            self._buffer = huge_empty(end)
        return [self._buffer.data_ptr() + start for start in starts]

    @property
    def address(self) -> int:
        """Of the buffer, until it grows."""
        return self._buffer.data_ptr()
