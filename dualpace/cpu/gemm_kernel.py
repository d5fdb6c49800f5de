# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The tile GEMM's kernel: threads copy activations into tiles, then take groups of output columns.

One C callback for all sizes of a Shape. A group's columns stay with one thread for all inputs and
rows: sums rest in its second-level cache, weights are read once, the next piece of weights is asked
for while this one is multiplied. Whether the tile unit or vectors multiply is the Shape's matter:
both take the same tiles. This file knows nothing about tensors.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from dualpace.cpu import amx_ir, amx_rope_ir, vector_gemm_ir
from dualpace.cpu.callback import callback
from dualpace.cpu.primitives import (
    copy_bytes,
    fetch_add,
    float32_at,
    int32_at,
    int64_at,
    load_shared,
)
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
    GROUPS,  # int32 [groups, 4]: first and end pair of output tiles, first and end tile of rows
    INPUT,  # 0: INPUT_TILES holds the activations already
    INPUT_STRIDE,
    INPUT_TILES,  # room for the activations as tiles: ceil(rows / 16) * K_TILES tiles, by K_BLOCK
    WEIGHT,  # tiles [outputs / 32, K_TILES, 2]
    BIAS,  # float32 [outputs], in the order of the weight's tiles; 0: none
    OUT,
    OUT_STRIDE,
    OUT_TILES,  # of SILU_MUL: K_TILES of a product that gets OUT as its INPUT_TILES; 0: rows
    OTHER,  # what ADD adds
    OTHER_STRIDE,
    SUMS,  # float32 tiles, one piece a thread
    SUMS_STRIDE,
    EPILOGUE,
    # Of ROPE, whose outputs are heads: queries to OUT, keys and values to a cache.
    HEAD_DIM,
    Q_HEADS,
    KV_HEADS,
    COS,  # float32, one a pair of elements and row
    SIN,
    TABLE_STRIDE,
    OUT_OFFSETS,  # int64 [rows]: bytes from OUT to a row
    CACHE,
    CACHE_OFFSETS,  # int64 [rows]: bytes from CACHE to a row of its first head's keys
    HEAD_STRIDE,
    VALUE_STRIDE,
    Q_NORM,  # bf16 [HEAD_DIM], of each head of queries; 0: none, else groups hold whole heads
    K_NORM,
    EPSILON_BITS,  # of both, a float32 as an integer
    NUM_FIELDS,
) = range(38)

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


def _multiplier(module, rows, columns, native):
    if rows:
        return amx_ir.tile_function(module, amx_ir.Shape(rows, columns), native)
    return vector_gemm_ir.product_function(module, native)


@intrinsic(prefer_literal=True)
def multiply_tiles(
    _context,
    rows,
    columns,
    native,
    version,
    count,
    a,
    a_stride,
    b,
    c,
    steps,
    go_on,
    ahead,
    lines,
):
    """amx_ir.tile_function or, for no rows of tiles, vector_gemm_ir.product_function; the arguments
    up to `version` are constants.
    """
    return _caller(_multiplier, 3, 9)((rows, columns, native, version))


@intrinsic(prefer_literal=True)
def end_tiles(_context, kind, native, version, c, rows, out, out_stride, other, other_stride):
    """amx_ir.epilogue_function; the first three arguments are constants."""
    return _caller(amx_ir.epilogue_function, 2, 6)((kind, native, version))


@intrinsic(prefer_literal=True)
def rope_tiles(
    _context, native, version, c, rows, to, offsets, half, cos, sin, table_stride, rotate
):
    """amx_rope_ir.rope_function; the first two arguments are constants."""
    return _caller(amx_rope_ir.rope_function, 1, 9)((native, version))


@intrinsic(prefer_literal=True)
def norm_tiles(_context, native, version, c, stride, pieces, rows, weight, epsilon):
    """amx_rope_ir.norm_function; the first two arguments are constants."""
    return _caller(amx_rope_ir.norm_function, 1, 6)((native, version))


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


@njit
def tile_place(tile: Any, row_tile: Any, row_tiles: Any, k_tiles: Any, k_block: Any) -> Any:
    """Where a tile of activations lies, in tiles: by block of inputs, then row of tiles."""
    begin = tile // k_block * k_block
    return begin * row_tiles + row_tile * min(k_block, k_tiles - begin) + tile - begin


@njit
def begin_sums(sums: Any, count: Any, bias: Any) -> None:
    """Set `count` pairs of tiles of sums to the 32 float32 at `bias` in every row."""
    values = float32_at(bias)
    for pair in range(count):
        for column in range(2):
            tile = float32_at(sums + (2 * pair + column) * _TILE)
            for i in range(_ROWS * 16):
                tile[i] = values[column * 16 + i % 16]


@functools.cache
def gemm_kernel(shape: amx_ir.Shape, native: bool) -> int:
    """Address of the kernel `void f(int64 *block)`; if not `native`, one for any CPU."""
    version = source_version()
    plain, add, silu_mul, rope = amx_ir.PLAIN, amx_ir.ADD, amx_ir.SILU_MUL, amx_ir.ROPE
    rows_at_once, columns, vectors = max(shape.rows, 1), shape.columns, shape.rows == 0
    product_rows, unit_here = shape.rows, native and not vectors

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        rows, k_tiles, k_block = a[NUM_ROWS], a[K_TILES], a[K_BLOCK]
        row_tiles = (rows + _ROWS - 1) // _ROWS

        # Activations to tiles, a block of inputs after the other, so that what is used together
        # lies together. A unit is a few tiles of 16 rows. Rows behind the last are zero.
        copies = (k_tiles + _COPY_TILES - 1) // _COPY_TILES
        units = row_tiles * copies if a[INPUT] else 0
        unit = fetch_add(block + NEXT_COPY * 8, 1)
        while unit < units:
            first = unit % copies * _COPY_TILES
            place = tile_place(first, unit // copies, row_tiles, k_tiles, k_block) - first
            for i in range(_ROWS):
                row = unit // copies * _ROWS + i
                source = a[INPUT] + row * a[INPUT_STRIDE]
                to = a[INPUT_TILES] + place * _TILE + i * 64
                for k in range(first, min(first + _COPY_TILES, k_tiles)):
                    if row < rows:
                        copy_bytes(to + k * _TILE, source + k * 64, 64)
                    else:
                        for j in range(8):
                            int64_at(to + k * _TILE)[j] = 0
            fetch_add(block + COPIED * 8, 1)
            unit = fetch_add(block + NEXT_COPY * 8, 1)
        while load_shared(block + COPIED * 8) < units:
            pass

        begin_amx(unit_here, a[CONFIG])
        sums = a[SUMS] + fetch_add(block + NEXT_THREAD * 8, 1) * a[SUMS_STRIDE]
        groups = carray(int32_at(a[GROUPS]), (a[NUM_GROUPS], 4))
        group = fetch_add(block + NEXT_GROUP * 8, 1)
        while group < a[NUM_GROUPS]:
            coming = a[NUM_GROUPS]
            begin, end = groups[group, 0], groups[group, 1]
            top, bottom = np.int64(groups[group, 2]), np.int64(groups[group, 3])
            row_blocks = (bottom - top + rows_at_once - 1) // rows_at_once
            lines = (32 // (2 // columns) + row_blocks - 1) // row_blocks
            for k0 in range(0, k_tiles, k_block):
                steps = min(k_block, k_tiles - k0)
                for pair in range(begin, end):
                    weight = a[WEIGHT] + (pair * k_tiles + k0) * 2 * _TILE
                    # Where the weights go on: next pair, next block of inputs, next group, or here.
                    ahead = weight
                    if pair + 1 < end:
                        ahead = weight + k_tiles * 2 * _TILE
                    elif k0 + steps < k_tiles:
                        ahead = a[WEIGHT] + (begin * k_tiles + k0 + steps) * 2 * _TILE
                    else:
                        # Taken no earlier than needed here: others may be free before.
                        coming = fetch_add(block + NEXT_GROUP * 8, 1)
                        if coming < a[NUM_GROUPS]:
                            ahead = a[WEIGHT] + groups[coming, 0] * k_tiles * 2 * _TILE
                    left = a[INPUT_TILES] + k0 * row_tiles * _TILE
                    to = sums + (pair - begin) * row_tiles * 2 * _TILE
                    if a[BIAS] and k0 == 0:
                        first = to + 2 * top * _TILE
                        begin_sums(first, bottom - top, a[BIAS] + pair * 128)
                    for column in range(0, 2, columns):
                        for r in range(top, bottom, rows_at_once):
                            count = min(rows_at_once, bottom - r)
                            if vectors:  # which skip the rows that are not there
                                count = min(_ROWS, rows - r * _ROWS)
                            multiply_tiles(
                                product_rows,
                                columns,
                                native,
                                version,
                                count,
                                left + r * steps * _TILE,
                                steps * _TILE,
                                weight + column * _TILE,
                                to + (2 * r + column) * _TILE,
                                steps,
                                k0 + a[BIAS],
                                ahead,
                                lines,
                            )
                            ahead += steps * lines * 64
                    if k0 + steps < k_tiles:
                        continue
                    for r in range(top, bottom):
                        row = r * _ROWS
                        count = min(_ROWS, rows - row)
                        tile = to + 2 * r * _TILE
                        out = a[OUT] + row * a[OUT_STRIDE] + pair * 64
                        other = a[OTHER] + row * a[OTHER_STRIDE] + pair * 64
                        stride, beside = a[OUT_STRIDE], a[OTHER_STRIDE]
                        if a[EPILOGUE] == rope:
                            pieces = a[HEAD_DIM] // 32
                            head, piece = pair // pieces, pair % pieces
                            kv, half = head - a[Q_HEADS], a[HEAD_DIM]
                            is_turned = np.int64(kv < a[KV_HEADS])
                            to_head, offsets = a[OUT] + head * half * 2, a[OUT_OFFSETS] + row * 8
                            if kv >= 0:
                                to_head = a[CACHE] + kv % a[KV_HEADS] * a[HEAD_STRIDE]
                                to_head += kv // a[KV_HEADS] * a[VALUE_STRIDE]
                                offsets = a[CACHE_OFFSETS] + row * 8
                            first, apart = piece, row_tiles * 2 * _TILE
                            if a[Q_NORM]:  # a head's pieces go together, with the last one
                                first = piece + 1 if piece + 1 < pieces else 0
                                tile -= piece * apart
                                if first == 0 and is_turned:
                                    weight = a[Q_NORM] if kv < 0 else a[K_NORM]
                                    epsilon = a[EPSILON_BITS]
                                    norm_tiles(
                                        native, version, tile, apart, pieces, count, weight, epsilon
                                    )
                                tile += first * apart
                            angle, stride = row * a[TABLE_STRIDE], a[TABLE_STRIDE]
                            for p in range(first, piece + 1):
                                rope_tiles(
                                    native,
                                    version,
                                    tile,
                                    count,
                                    to_head + p * 32,
                                    offsets,
                                    half,
                                    a[COS] + angle + p * 64,
                                    a[SIN] + angle + p * 64,
                                    stride,
                                    is_turned,
                                )
                                tile += apart
                        elif a[EPILOGUE] == plain:
                            end_tiles(plain, native, version, tile, count, out, stride, other, 0)
                        elif a[EPILOGUE] == add:
                            end_tiles(add, native, version, tile, count, out, stride, other, beside)
                        else:
                            out -= pair * 32
                            if a[OUT_TILES]:
                                place = tile_place(pair // 2, r, row_tiles, a[OUT_TILES], k_block)
                                out = a[OUT] + place * _TILE + pair % 2 * 32
                                stride = 64
                            end_tiles(silu_mul, native, version, tile, count, out, stride, other, 0)
            group = coming
        end_amx(unit_here)

    return callback(kernel, error_model="numpy")
