"""A Python function on each thread of the OpenMP pool."""

import ctypes
from collections.abc import Callable

from dualpace.cpu.openmp import parallel


def each_thread(action: Callable[[], None], num_threads: int) -> None:
    """Run `action` once on each of `num_threads` threads of the pool."""
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _block: action())
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    parallel(address, 0, num_threads)
