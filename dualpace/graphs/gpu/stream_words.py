"""Words in registered host memory that a stream writes, and waits for, in its order.

So a device and a process hand work to and fro without a host thread of the device's: what a stream
is given after a wait starts within microseconds of the word's change. Knows nothing about what the
words mean.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from ctypes import c_uint, c_uint64, c_void_p

import torch

_AT_LEAST = 0  # a wait's condition
_AFTER_ALL = 0  # a write: what the stream was given before is visible to the host first


class StreamWords:
    """64-bit words that only grow, by address (registered, 8-byte aligned)."""

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = driver.cuStreamWriteValue64_v2, driver.cuStreamWaitValue64_v2
        for function in (self._write, self._wait):
            function.argtypes = (c_void_p, c_void_p, c_uint64, c_uint)

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """When all before it in `stream` has ended."""
        _check("write", self._write(stream.cuda_stream, address, value, _AFTER_ALL))

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Holds `stream` until the word is at least `value`."""
        _check("wait for", self._wait(stream.cuda_stream, address, value, _AT_LEAST))


def _check(what: str, error: int) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver refused to {what} a word in a stream (error {error})")
