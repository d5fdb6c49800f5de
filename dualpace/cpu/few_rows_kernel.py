# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The kernel behind `few_rows`: threads take ranges of outputs, whose weights they read once, from
the first to the last. It knows addresses and strides, and nothing about tensors.
"""

import functools
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from dualpace.cpu.callback import callback
from dualpace.cpu.few_rows_ir import rows_function
from dualpace.cpu.primitives import fetch_add, int64_at
from dualpace.cpu.version import source_version

# Fields of the argument block. Strides are in bytes.
(
    NEXT_OUTPUT,  # atomic; the caller sets it to 0
    NUM_ROWS,
    INPUTS,
    OUTPUTS,
    AT_ONCE,  # outputs that a thread takes
    INPUT,
    INPUT_STRIDE,
    WEIGHT,
    WEIGHT_STRIDE,
    BIAS,  # float32 [OUTPUTS]
    OUT,
    OUT_STRIDE,
    NUM_FIELDS,
) = range(13)


@intrinsic(prefer_literal=True)
def multiply_rows(
    _context,
    lanes,
    version,
    rows,
    x,
    weight,
    bias,
    out,
    inputs,
    x_stride,
    weight_stride,
    out_stride,
    more_rows,
    more_outputs,
):
    """few_rows_ir.rows_function; the first two arguments are constants."""

    def codegen(ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        function = rows_function(builder.module, lanes.literal_value)
        pointers = [builder.inttoptr(a, ir.PointerType()) for a in args[3:7]]
        builder.call(function, [args[2], *pointers, *args[7:]])
        return ctx.get_dummy_value()

    return types.void(lanes, version, *[types.intp] * 11), codegen


@functools.cache
def rows_kernel(lanes: int) -> int:
    """Address of the kernel `void f(int64 *block)`; one serves every shape."""
    version = source_version()

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        rows, outputs, at_once = a[NUM_ROWS], a[OUTPUTS], a[AT_ONCE]
        together = 4 if rows > 2 else rows
        width = lanes // together
        begin = fetch_add(block + NEXT_OUTPUT * 8, at_once)
        while begin < outputs:
            end = min(begin + at_once, outputs)
            for output in range(begin, end, width):
                for row in range(0, rows, together):
                    multiply_rows(
                        lanes,
                        version,
                        together,
                        a[INPUT] + row * a[INPUT_STRIDE],
                        a[WEIGHT] + output * a[WEIGHT_STRIDE],
                        a[BIAS] + output * 4,
                        a[OUT] + row * a[OUT_STRIDE] + output * 4,
                        a[INPUTS],
                        a[INPUT_STRIDE],
                        a[WEIGHT_STRIDE],
                        a[OUT_STRIDE],
                        rows - row,
                        end - output,
                    )
            begin = fetch_add(block + NEXT_OUTPUT * 8, at_once)

    return callback(kernel)
