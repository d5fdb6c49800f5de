"""Host memory that the device reads and writes directly: registered in chunks, with progress.

One registration of everything has limits and is slow to fail; chunks end between pieces, so that
no copy of a piece ever spans two registrations. Knows nothing about KV.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from dualpace.errors import ConfigError

_CHUNK_BYTES = 1 << 30
_PORTABLE_AND_MAPPED = 3


class HostMemory:
    """Registers a tensor's memory for the life of this object; `close` undoes it."""

    def __init__(
        self,
        tensor: Tensor,
        piece_bytes: int,
        chunk_bytes: int = _CHUNK_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`tensor` is contiguous, page-aligned, on the CPU; `progress(done, total)` counts bytes.

        ConfigError where the driver refuses, as it does above a limit of locked memory.
        """
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        assert tensor.data_ptr() % mmap.PAGESIZE == 0, "host memory must begin on a page"
        self._tensor = tensor
        self._registered: list[int] = []
        # The addresses may be mapped again once the memory has gone.
        self._end = weakref.finalize(self, _unregister, self._registered, tensor)
        chunks = chunks_of(tensor.nbytes, piece_bytes, chunk_bytes)
        self.chunk_pieces = max(1, chunks[0][1] // piece_bytes)  # in each chunk but the last
        for start, count in chunks:
            self._register(tensor.data_ptr() + start, count, start)
            if progress is not None:
                progress(start + count, tensor.nbytes)

    def _register(self, address: int, count: int, done: int) -> None:
        error = int(torch.cuda.cudart().cudaHostRegister(address, count, _PORTABLE_AND_MAPPED))
        if error:
            self.close()
            raise ConfigError(
                f"the CUDA driver refused to register host memory after {done / 2**30:.1f} GiB "
                f"of {self._tensor.nbytes / 2**30:.1f} GiB (error {error}); lower kv.host_gib or "
                "raise the limit of locked memory"
            )
        self._registered.append(address)

    def close(self) -> None:
        """Every copy from or to the memory must have ended."""
        _unregister(self._registered, self._tensor)


def _unregister(addresses: list[int], memory: Tensor) -> None:
    """`memory` is held until here."""
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def chunks_of(total: int, piece: int, chunk: int) -> list[tuple[int, int]]:
    """(start, bytes) of chunks of about `chunk` bytes that end between pieces and between pages."""
    unit = math.lcm(piece, mmap.PAGESIZE)
    size = max(1, chunk // unit) * unit
    return [(start, min(size, total - start)) for start in range(0, total, size)]
