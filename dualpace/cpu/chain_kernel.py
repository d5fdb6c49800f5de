# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""Kernels one after the other in one parallel region: what each thread does, and who starts them.

Functions and barriers are called by their addresses. This file knows nothing about what they do.
"""

import functools
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from dualpace.cpu.callback import callback
from dualpace.cpu.primitives import fetch_add, int64_at

# Fields of the argument block.
(
    NUM_STEPS,
    STEPS,  # int64 [steps, 3]: a kernel, its argument block, and how many counters that begins with
    NUM_THREADS,
    MEMBER,  # the address of member_kernel
    PARALLEL,  # of the runtime's GOMP_parallel
    BARRIER,  # of its GOMP_barrier
    STAMPS,  # int64 [steps + 1, 3]: threads that looked at the clock before a step, or behind all,
    # and the seconds and nanoseconds that the first of them saw; 0: nobody looks
    CLOCK,  # of the C library's clock_gettime
    NUM_FIELDS,
) = range(9)
_MONOTONIC = 1
_POINTER = ir.PointerType()


def _call(builder: ir.IRBuilder, address: ir.Value, *args: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.inttoptr(address, kind.as_pointer()), args)


@intrinsic
def run_kernel(_context: Any, kernel: Any, block: Any) -> Any:
    """kernel(block), by its address."""

    def codegen(ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        _call(builder, args[0], builder.inttoptr(args[1], _POINTER))
        return ctx.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def meet(_context: Any, barrier: Any) -> Any:
    """Wait until all threads of the region have come here."""

    def codegen(ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        _call(builder, args[0])
        return ctx.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def look_at_clock(_context: Any, clock: Any, stamp: Any) -> Any:
    """The time, into the two int64 at `stamp`."""

    def codegen(ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        _call(builder, args[0], ir.IntType(32)(_MONOTONIC), builder.inttoptr(args[1], _POINTER))
        return ctx.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def start_region(_context: Any, parallel: Any, kernel: Any, block: Any, threads: Any) -> Any:
    """kernel(block) on so many threads at once."""

    def codegen(ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        pointers = [builder.inttoptr(arg, _POINTER) for arg in args[1:3]]
        count = builder.trunc(args[3], ir.IntType(32))
        _call(builder, args[0], *pointers, count, ir.IntType(32)(0))
        return ctx.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), codegen


@functools.cache
def member_kernel() -> int:
    """Address of `void f(int64 *block)`, which every thread of the region runs."""

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        steps = carray(int64_at(a[STEPS]), (a[NUM_STEPS], 3))
        for i in range(a[NUM_STEPS] + 1):
            stamp = a[STAMPS] + i * 24
            if a[STAMPS] and fetch_add(stamp, 1) == 0:
                look_at_clock(a[CLOCK], stamp + 8)
            if i < a[NUM_STEPS]:
                run_kernel(steps[i, 0], steps[i, 1])
                meet(a[BARRIER])

    return callback(kernel)


@functools.cache
def start_kernel() -> int:
    """Address of `void f(int64 *block)`, which sets all counters to 0 and runs the region."""

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        steps = carray(int64_at(a[STEPS]), (a[NUM_STEPS], 3))
        for i in range(a[NUM_STEPS] + 1):
            if a[STAMPS]:
                int64_at(a[STAMPS])[i * 3] = 0
        for i in range(a[NUM_STEPS]):
            counters = int64_at(steps[i, 1])
            for j in range(steps[i, 2]):
                counters[j] = 0
        start_region(a[PARALLEL], a[MEMBER], block, a[NUM_THREADS])

    return callback(kernel)
