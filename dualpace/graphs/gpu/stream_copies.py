"""Copies between a device and registered host memory, one call of the driver each.

What stands in a stream is what torch would queue. A thread that queues eight small copies a layer
has no time for all that torch does around one, though: views, checks and a current stream. Knows
nothing about what is copied.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from ctypes import CDLL, c_size_t, c_void_p

import torch
from torch import Tensor


class StreamCopies:
    """Contiguous tensors on the device, addresses on the host, which does not wait. Whoever calls
    keeps both until the stream has passed."""

    def __init__(self) -> None:
        driver = CDLL("libcuda.so.1")
        self._out, self._in = driver.cuMemcpyDtoHAsync_v2, driver.cuMemcpyHtoDAsync_v2
        for function in (self._out, self._in):
            function.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p)

    def out(self, stream: torch.cuda.Stream, address: int, tensor: Tensor) -> None:
        """To the host."""
        assert tensor.is_contiguous()
        _check(self._out(address, tensor.data_ptr(), tensor.nbytes, stream.cuda_stream))

    def into(self, stream: torch.cuda.Stream, tensor: Tensor, address: int) -> None:
        """From the host."""
        assert tensor.is_contiguous()
        _check(self._in(tensor.data_ptr(), address, tensor.nbytes, stream.cuda_stream))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver refused to copy in a stream (error {error})")
