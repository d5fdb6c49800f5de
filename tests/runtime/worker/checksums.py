"""Numbers by which tests compare KV blocks that lie on different devices."""

import numpy as np
import torch
from torch import Tensor


def checksums(blocks: Tensor) -> list[int]:
    """A number a block that changes with any of its bits: [B, ...] of either pool."""
    words = blocks.contiguous().view(torch.uint8).cpu().numpy().reshape(len(blocks), -1)
    places = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return [int((row.astype(np.uint64) * places).sum(dtype=np.uint64)) for row in words]
