# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The tile GEMM's kernel: threads copy activations into tiles, then take groups of output columns.

One C callback for all sizes. A group's columns stay with one thread for all inputs and rows: sums
rest in its second-level cache, weights are read once, the next piece of weights is asked for while
the tile unit works on this one. This file knows nothing about tensors.
"""

import functools
from typing import Any

from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic

from dualpace.cpu import amx_ir
from dualpace.cpu.primitives import copy_bytes, fetch_add, int64_at, load_shared
from dualpace.cpu.version import source_version

# Fields of the argument block. Strides are in bytes.
(
    NEXT_COPY,  # atomic; the caller sets these four to 0
    COPIED,
    NEXT_GROUP,
    NEXT_THREAD,
    CONFIG,  # the 64 bytes of amx_probe.tile_config
    NUM_ROWS,
    K_TILES,
    K_BLOCK,  # tiles of inputs that are worked on at a time
    NUM_GROUPS,
    GROUP_PAIRS,  # pairs of output tiles in a group
    INPUT,
    INPUT_STRIDE,
    INPUT_TILES,  # room for the activations as tiles: ceil(rows / 16) * K_TILES tiles
    WEIGHT,  # tiles [outputs / 32, K_TILES, 2]
    OUT,
    OUT_STRIDE,
    OTHER,  # what ADD adds
    OTHER_STRIDE,
    SUMS,  # float32 tiles, one piece a thread
    SUMS_STRIDE,
    EPILOGUE,
    NUM_FIELDS,
) = range(22)

_TILE, _ROWS = amx_ir.TILE, amx_ir.ROWS
_COPY_TILES = 16


def _caller(build: Any, num_constants: int, num_args: int) -> Any:
    """A Numba function that calls what `build(module, *constants)` makes with integer arguments."""

    def typing(constants: Any) -> Any:
        values = [constant.literal_value for constant in constants[:-1]]  # the last is a version

        def codegen(_ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            function = build(builder.module, *values)
            kinds = function.function_type.args
            numbers = zip(args[num_constants + 1 :], kinds, strict=True)
            builder.call(
                function,
                [
                    builder.inttoptr(a, k) if isinstance(k, ir.PointerType) else a
                    for a, k in numbers
                ],
            )
            return _ctx.get_dummy_value()

        return types.void(*constants, *[types.intp] * num_args), codegen

    return typing


@intrinsic(prefer_literal=True)
def multiply_tiles(
    _context, row_tiles, native, version, a, a_stride, b, c, steps, go_on, ahead, lines
):
    """amx_ir.tile_function; the first three arguments are constants."""
    return _caller(amx_ir.tile_function, 2, 8)((row_tiles, native, version))


@intrinsic(prefer_literal=True)
def end_tiles(_context, kind, native, version, c, rows, out, out_stride, other, other_stride):
    """amx_ir.epilogue_function; the first three arguments are constants."""
    return _caller(amx_ir.epilogue_function, 2, 6)((kind, native, version))


@intrinsic(prefer_literal=True)
def begin_amx(_context, native, config):
    """Set up this thread's tile registers."""

    def codegen(ctx, builder, _signature, args):
        amx_ir.configure(builder, builder.inttoptr(args[1], ir.PointerType()), native.literal_value)
        return ctx.get_dummy_value()

    return types.void(native, types.intp), codegen


@intrinsic(prefer_literal=True)
def end_amx(_context, native):
    """Release this thread's tile registers."""

    def codegen(ctx, builder, _signature, _args):
        amx_ir.release(builder, native.literal_value)
        return ctx.get_dummy_value()

    return types.void(native), codegen


@functools.cache
def gemm_kernel(native: bool) -> int:
    """Address of the kernel `void f(int64 *block)`; if not `native`, one for any CPU."""
    version = source_version()
    plain, add, silu_mul = amx_ir.PLAIN, amx_ir.ADD, amx_ir.SILU_MUL

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        rows, k_tiles, pairs = a[NUM_ROWS], a[K_TILES], a[GROUP_PAIRS]
        row_tiles = (rows + _ROWS - 1) // _ROWS
        row_stride = k_tiles * _TILE

        # Activations to tiles: a unit is a few tiles of 16 rows. Rows behind the last are zero.
        pieces = (k_tiles + _COPY_TILES - 1) // _COPY_TILES
        unit = fetch_add(block + NEXT_COPY * 8, 1)
        while unit < row_tiles * pieces:
            first = unit % pieces * _COPY_TILES
            for i in range(_ROWS):
                row = unit // pieces * _ROWS + i
                source = a[INPUT] + row * a[INPUT_STRIDE]
                to = a[INPUT_TILES] + unit // pieces * row_stride + i * 64
                for k in range(first, min(first + _COPY_TILES, k_tiles)):
                    if row < rows:
                        copy_bytes(to + k * _TILE, source + k * 64, 64)
                    else:
                        for j in range(8):
                            int64_at(to + k * _TILE)[j] = 0
            fetch_add(block + COPIED * 8, 1)
            unit = fetch_add(block + NEXT_COPY * 8, 1)
        while load_shared(block + COPIED * 8) < row_tiles * pieces:
            pass

        begin_amx(native, a[CONFIG])
        sums = a[SUMS] + fetch_add(block + NEXT_THREAD * 8, 1) * a[SUMS_STRIDE]
        row_pairs = (row_tiles + 1) // 2
        group = fetch_add(block + NEXT_GROUP * 8, 1)
        while group < a[NUM_GROUPS]:
            coming = fetch_add(block + NEXT_GROUP * 8, 1)
            for k0 in range(0, k_tiles, a[K_BLOCK]):
                steps = min(a[K_BLOCK], k_tiles - k0)
                for p in range(pairs):
                    pair = group * pairs + p
                    weight = a[WEIGHT] + (pair * k_tiles + k0) * 2 * _TILE
                    # Where the weights go on: next pair, next block of inputs, next group, or here.
                    ahead = weight
                    if p + 1 < pairs:
                        ahead = weight + k_tiles * 2 * _TILE
                    elif k0 + steps < k_tiles:
                        ahead = a[WEIGHT] + (group * pairs * k_tiles + k0 + steps) * 2 * _TILE
                    elif coming < a[NUM_GROUPS]:
                        ahead = a[WEIGHT] + coming * pairs * k_tiles * 2 * _TILE
                    lines = (32 + row_pairs - 1) // row_pairs
                    for r in range(row_pairs):
                        left = a[INPUT_TILES] + 2 * r * row_stride + k0 * _TILE
                        to = sums + (p * row_pairs + r) * 4 * _TILE
                        piece = ahead + r * steps * lines * 64
                        if 2 * r + 1 < row_tiles:
                            multiply_tiles(
                                2,
                                native,
                                version,
                                left,
                                row_stride,
                                weight,
                                to,
                                steps,
                                k0,
                                piece,
                                lines,
                            )
                        else:
                            multiply_tiles(
                                1,
                                native,
                                version,
                                left,
                                row_stride,
                                weight,
                                to,
                                steps,
                                k0,
                                piece,
                                lines,
                            )
                        if k0 + steps < k_tiles:
                            continue
                        for half in range(min(2, row_tiles - 2 * r)):
                            row = (2 * r + half) * _ROWS
                            count = min(_ROWS, rows - row)
                            tile = to + half * 2 * _TILE
                            out = a[OUT] + row * a[OUT_STRIDE] + pair * 64
                            other = a[OTHER] + row * a[OTHER_STRIDE] + pair * 64
                            if a[EPILOGUE] == plain:
                                end_tiles(
                                    plain,
                                    native,
                                    version,
                                    tile,
                                    count,
                                    out,
                                    a[OUT_STRIDE],
                                    other,
                                    0,
                                )
                            elif a[EPILOGUE] == add:
                                end_tiles(
                                    add,
                                    native,
                                    version,
                                    tile,
                                    count,
                                    out,
                                    a[OUT_STRIDE],
                                    other,
                                    a[OTHER_STRIDE],
                                )
                            else:
                                end_tiles(
                                    silu_mul,
                                    native,
                                    version,
                                    tile,
                                    count,
                                    out - pair * 32,
                                    a[OUT_STRIDE],
                                    other,
                                    0,
                                )
            group = coming
        end_amx(native)

    return int(cfunc(types.void(types.intp), cache=True)(kernel).address)
