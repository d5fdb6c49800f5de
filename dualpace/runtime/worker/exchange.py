"""What rounds with host rows (lockstep) hand to and fro, as tensors of one accelerator rank's
heads. Knows nothing about rounds or attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualpace.runtime.lockstep import SUB_BATCHES, LockstepBuffer


class Exchange:
    """Tensors of the shared buffer by sub-batch: q, out [rows, N, D], k, v [rows, K, D]."""

    def __init__(
        self,
        buffer: LockstepBuffer,
        head_dim: int,
        dtype: torch.dtype,
        rank: int = 0,
        hosts: Sequence[int] = (0,),
    ) -> None:
        """rank: the accelerator's, whose heads these are; hosts: the CPU ranks that have some of
        them, all of which answer.
        """
        self.buffer, self.rank, self.hosts = buffer, rank, hosts
        rows = buffer.layout.max_rows

        def views(name: str, width: int) -> list[Tensor]:
            count = rows * width
            return [
                torch.frombuffer(buffer.bytes_of(place, name, rank), dtype=dtype, count=count).view(
                    rows, -1, head_dim
                )
                for place in range(SUB_BATCHES)
            ]

        self.q, self.out = (views(name, buffer.layout.q_width) for name in ("q", "out"))
        self.k, self.v = (views(name, buffer.layout.kv_width) for name in ("k", "v"))
