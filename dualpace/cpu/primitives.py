# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""What Numba lacks for kernels over raw addresses: typed pointers, atomics, bit casts, bf16
scalars.

Kernels get one block of integers (addresses, strides, sizes) and turn the addresses into arrays
with these.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from dualpace.cpu.vector_ir import declare

_I32 = ir.IntType(32)


def _pointer_to(element: types.Type) -> Any:
    @intrinsic
    def pointer(_context: Any, address: Any) -> Any:
        def codegen(_ctx: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], _ctx.get_value_type(signature.return_type))

        return types.CPointer(element)(types.intp), codegen

    return pointer


float32_at = _pointer_to(types.float32)
uint16_at = _pointer_to(types.uint16)
int32_at = _pointer_to(types.int32)
int64_at = _pointer_to(types.int64)


@intrinsic
def fetch_add(_context: Any, address: Any, value: Any) -> Any:
    """Add `value` to the int64 at `address` as one atomic step; returns what stood there before."""

    def codegen(_ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def load_shared(_context: Any, address: Any) -> Any:
    """The int64 at `address` as other threads' fetch_add has left it, for waiting in a loop."""

    def codegen(ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType())
        builder.call(declare(builder.module, "llvm.x86.sse2.pause", ir.VoidType()), [])
        return builder.load_atomic(pointer, "acquire", 8, typ=ir.IntType(64))

    return types.int64(types.intp), codegen


@intrinsic
def float_of_bits(_context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def codegen(_ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of_float(_context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def codegen(_ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@numba.njit(inline="always")
def widen(bits: Any) -> Any:
    """bf16 bits to float32."""
    return float_of_bits(np.uint32(bits) << np.uint32(16))


@numba.njit(inline="always")
def narrow(value: Any) -> Any:
    """float32 to bf16 bits, round to nearest even."""
    bits = bits_of_float(value)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16((bits + rounding) >> np.uint32(16))


@intrinsic
def copy_bytes(_context: Any, target: Any, source: Any, size: Any) -> Any:
    """`size` bytes from the address `source` to `target`; they do not overlap."""

    def codegen(ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        pointers = [builder.inttoptr(a, ir.PointerType()) for a in args[:2]]
        kinds = [ir.PointerType(), ir.PointerType(), ir.IntType(64), ir.IntType(1)]
        copy = declare(builder.module, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *kinds)
        builder.call(copy, [*pointers, args[2], ir.IntType(1)(0)])
        return ctx.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen
