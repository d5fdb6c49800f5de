"""Kernels that follow each other in one parallel region.

A region for each kernel costs its start and end on all threads and, between two, the interpreter,
whose own memory the kernels have pushed out of the caches. Here threads only meet between two
kernels. This file knows nothing about what they do.
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpace.cpu import chain_kernel as kernel
from dualpace.cpu.openmp import address_of


class Step(NamedTuple):
    """A kernel by its address, its argument block, and how many counters that begins with: zeros
    when the kernel starts.
    """

    function: int
    block: NDArray[np.int64]
    counters: int


class Chain:
    """`run` runs the steps in order, each on all of `num_threads` threads. Each has a block of its
    own, whose other fields the caller may change between runs. A `timed` one keeps the `seconds`
    that each step took.
    """

    def __init__(self, steps: Iterable[Step], num_threads: int, timed: bool = False) -> None:
        self._steps = tuple(steps)
        places = [step.block.ctypes.data for step in self._steps]
        assert len(set(places)) == len(places)
        rows = [(s.function, at, s.counters) for s, at in zip(self._steps, places, strict=True)]
        self._table = np.array(rows, np.int64).reshape(-1, 3)
        self._block = np.zeros(kernel.NUM_FIELDS, np.int64)
        self._block[kernel.NUM_STEPS] = len(rows)
        self._block[kernel.STEPS] = self._table.ctypes.data
        self._block[kernel.NUM_THREADS] = num_threads
        self._block[kernel.MEMBER] = kernel.member_kernel()
        self._block[kernel.PARALLEL] = address_of("GOMP_parallel")
        self._block[kernel.BARRIER] = address_of("GOMP_barrier")
        self._stamps = np.zeros((len(rows) + 1, 3), np.int64)
        if timed:
            self._block[kernel.STAMPS] = self._stamps.ctypes.data
            self._block[kernel.CLOCK] = _clock()
        self._address = self._block.ctypes.data

    def run(self) -> None:
        """Returns when all have run; the GIL is free meanwhile."""
        _start()(self._address)

    def seconds(self) -> NDArray[np.float64]:
        """Of each step of the last run, until its last thread had ended."""
        return np.diff(self._stamps @ np.array([0, 10**9, 1])) / 1e9


def warm_up() -> None:
    """Compile or load what all chains run on."""
    kernel.member_kernel()
    kernel.start_kernel()


def _clock() -> int:
    address = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value
    assert address is not None
    return address


@functools.cache
def _start() -> "ctypes._FuncPointer":
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.start_kernel())
