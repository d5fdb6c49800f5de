"""A collective over memory that all ranks of one machine map: no sockets, no system call a sum.

Layout, in bytes: a line of 64 a rank with the number of its last published piece (int64), then two
sets of slots, one slot of `max_bytes` a rank and set. Rank r writes piece n to its slot of set
n % 2, publishes n, waits until every rank has, and reads their slots. It comes to piece n + 2,
which overwrites piece n, only after every rank has published n + 1, so nobody reads piece n any
more. Longer tensors go in pieces.

Publishing relies on what x86 promises: stores become visible in the order in which they were made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dualpace.graphs.collective import PeerLost

# Of a slot, where nobody says otherwise: 256 rows of 4096 in float32, for each piece is a wait.
MAX_BYTES = 4 << 20
_LINE = 64
_SPINS = 2000  # looks at a peer's number, some 0.1 ms, before the core is offered to others
_YIELDS = 200  # offers before sleeping
_SLEEP_S = 50e-6


class SharedMemoryCollective:
    """Rank `rank` of `size` over `view`, which every rank maps and which was zeroed before any
    rank began. One thread at a time calls it.
    """

    def __init__(
        self,
        view: Any,
        rank: int,
        size: int,
        max_bytes: int = MAX_BYTES,
        alive: Callable[[], bool] = lambda: True,
        timeout_s: float = 60.0,
    ) -> None:
        """view: a writable buffer (mmap, memoryview, bytearray) of `num_bytes(size, max_bytes)`.

        PeerLost is raised out of a call when a peer is waited for and `alive()` is false, or it has
        not come for `timeout_s` seconds.
        """
        assert 0 <= rank < size
        self.rank, self.size = rank, size
        self._max_bytes = _rounded(max_bytes)
        self._alive, self._timeout_s = alive, timeout_s
        whole = memoryview(view).cast("B")
        assert len(whole) >= self.num_bytes(size, max_bytes)
        self._numbers = whole[: size * _LINE].cast("q")
        self._words = [peer * (_LINE // 8) for peer in range(size) if peer != rank]
        self._own_word = rank * (_LINE // 8)
        slots = torch.frombuffer(whole, dtype=torch.uint8, offset=size * _LINE)
        slots = slots[: 2 * size * self._max_bytes].view(2, size, self._max_bytes)
        kinds = (torch.float32, torch.bfloat16, torch.uint8)
        self._sets = {kind: (slots[0].view(kind), slots[1].view(kind)) for kind in kinds}
        self._piece = 0

    @staticmethod
    def num_bytes(size: int, max_bytes: int = MAX_BYTES) -> int:
        """Bytes of shared memory for a group."""
        return size * (_LINE + 2 * _rounded(max_bytes))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums in the order of the ranks, bf16 in float32 and rounded once."""
        assert x.is_contiguous()
        flat, per_piece = x.view(-1), self._max_bytes // x.element_size()
        for start in range(0, flat.numel(), per_piece):
            part = flat[start : start + per_piece]
            slots = self._exchange(part)
            if self.size == 2:  # a sum of two is the same in either order
                part.add_(slots[1 - self.rank])
            else:
                torch.sum(slots, 0, out=part)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        source, target = x.contiguous().view(-1).view(torch.uint8), parts.view(self.size, -1)
        target = target.view(torch.uint8)
        for start in range(0, len(source), self._max_bytes):
            piece = slice(start, start + self._max_bytes)
            target[:, piece] = self._exchange(source[piece])
        return parts.movedim(0, -2).flatten(-2)

    def barrier(self) -> None:
        self._publish()

    def _exchange(self, part: Tensor) -> Tensor:
        """Every rank's `part`, [size, len(part)], valid until the next exchange."""
        slots = self._sets[part.dtype][(self._piece + 1) % 2][:, : len(part)]
        slots[self.rank].copy_(part)
        self._publish()
        return slots

    def _publish(self) -> None:
        """Say that the next piece is there, and wait for everybody's."""
        self._piece = piece = self._piece + 1
        self._numbers[self._own_word] = piece
        numbers = self._numbers
        for word in self._words:
            for _ in range(_SPINS):
                if numbers[word] >= piece:
                    break
            else:
                self._wait(word, piece)

    def _wait(self, word: int, piece: int) -> None:
        for _ in range(_YIELDS):
            if self._numbers[word] >= piece:
                return
            os.sched_yield()
        deadline = time.monotonic() + self._timeout_s
        while self._numbers[word] < piece:
            if not self._alive() or time.monotonic() > deadline:
                peer = word // (_LINE // 8)
                raise PeerLost(f"rank {peer} of {self.size} is gone or silent")
            time.sleep(_SLEEP_S)


def _rounded(max_bytes: int) -> int:
    return -(-max_bytes // _LINE) * _LINE
