"""Large host buffers in huge pages where the kernel allows them. Knows nothing about their use."""

import mmap

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
