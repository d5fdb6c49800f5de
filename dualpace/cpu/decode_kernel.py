# mypy: ignore-errors
# (Numba and llvmlite ship no types, and kernels are typed by the compiler.)
"""The decode-attention kernel: threads take chunks of a plan, walk their KV blocks, and merge cut
requests.

One C callback a BlockShape, made once a process and kept on disk by Numba. It gets its work as one
block of 64-bit integers, whose fields are named below. This file knows nothing about tensors.
"""

import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from dualpace.block import BLOCK_TOKENS
from dualpace.cpu.block_ir import LOWEST, BlockShape, block_function
from dualpace.cpu.callback import callback
from dualpace.cpu.gemm_kernel import begin_amx, end_amx
from dualpace.cpu.plan import BEGIN, END, HEAD, ITEM, ROW, SLOT
from dualpace.cpu.primitives import (
    fetch_add,
    float32_at,
    float_of_bits,
    int32_at,
    int64_at,
    narrow,
    uint16_at,
    widen,
)
from dualpace.cpu.tile_block_ir import tile_block_function
from dualpace.cpu.version import source_version

# Fields of the argument block. Strides are in bytes.
(
    NEXT_CHUNK,  # atomic; the caller sets it to 0
    NEXT_THREAD,  # atomic; the caller sets it to 0
    NUM_CHUNKS,  # the first that is no counter
    CHUNK_STARTS,
    SEGMENTS,
    ITEM_SLOTS,
    ITEM_DONE,  # atomic int64 [items], zero before and after a run
    CONTEXT_LENS,
    HEADS_PER_ITEM,
    BLOCK_TABLES,
    TABLE_STRIDE,
    QUERY,
    QUERY_STRIDE,
    OUT,
    OUT_STRIDE,
    CACHE,
    BLOCK_STRIDE,
    VALUE_STRIDE,
    HEAD_STRIDE,
    SCRATCH,  # one piece a thread: working memory, queries, state; see scratch_bytes
    SCRATCH_STRIDE,
    PARTIALS,  # state of each slot
    SCALE_BITS,  # the float32 `scale * log2(e)` as an integer
    CONFIG,  # the 64 bytes of tile_block_ir.tile_config, with tiles
    NUM_FIELDS,
) = range(25)

_SEGMENT_COLUMNS = 6
_FAST = {"contract", "reassoc", "nsz", "arcp"}


def scratch_bytes(shape: BlockShape, heads_per_item: int) -> int:
    """Bytes that one thread needs, a multiple of a cache line."""
    one_head = shape.query_bytes + shape.state_floats * 4
    return -(-(shape.work_floats * 4 + heads_per_item * one_head) // 64) * 64


@intrinsic(prefer_literal=True)
def attend_block(
    _context: Any,
    dim: Any,
    group: Any,
    lanes: Any,
    bf16: Any,
    dot: Any,
    native: Any,
    tiles: Any,
    _version: Any,
    q: Any,
    k: Any,
    v: Any,
    state: Any,
    work: Any,
    tokens: Any,
    scale: Any,
    next_k: Any,
    next_v: Any,
) -> Any:
    """block_ir's function for the BlockShape in the first arguments, which are constants."""
    constants = (dim, group, lanes, bf16, dot, native, tiles, _version)
    shape = BlockShape(*(constant.literal_value for constant in constants[:-1]))
    build = tile_block_function if shape.tiles else block_function

    def codegen(_ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        function = build(builder.module, shape)
        pointers = [builder.inttoptr(a, ir.PointerType()) for a in (*args[8:13], *args[15:])]
        builder.call(function, [*pointers[:5], *args[13:15], *pointers[5:]])
        return _ctx.get_dummy_value()

    numbers = [types.intp] * 6 + [types.float32] + [types.intp] * 2
    return types.void(*constants, *numbers), codegen


@njit(fastmath=_FAST, error_model="numpy")
def begin_state(state: Any, acc_floats: Any, sums: Any) -> None:
    """An empty state: nothing accumulated, maxima below any score."""
    floats = carray(float32_at(state), (acc_floats + 2 * sums,))
    floats[:] = np.float32(0.0)
    floats[acc_floats : acc_floats + sums] = np.float32(LOWEST)


@njit(fastmath=_FAST, error_model="numpy")
def prepare_query(source: Any, query: Any, bf16: Any, place: Any) -> None:
    """A query row as float32 in the order of the accumulators."""
    out = float32_at(query)
    for i in range(len(place)):
        out[place[i]] = widen(uint16_at(source)[i]) if bf16 else float32_at(source)[i]


@njit(error_model="numpy")
def pad_query(source: Any, query: Any, dim: Any, size: Any) -> None:
    """A bf16 query row as it is, padded with zeros to `size` bytes."""
    out = uint16_at(query)
    for i in range(size // 2):
        out[i] = uint16_at(source)[i] if i < dim else np.uint16(0)


@njit(error_model="numpy")
def pair_queries(source: Any, query: Any, group: Any, dim: Any, pad: Any) -> None:
    """The bf16 query rows of a group by pairs of elements, `pad` heads of a pair side by side, of
    which those behind the group are zero.
    """
    to = int32_at(query)
    for g in range(pad):
        row = int32_at(source + g * dim * 2)
        for pair in range(dim // 2):
            to[pair * pad + g] = row[pair] if g < group else np.int32(0)


@njit
def enter_chunk(chunk: Any, starts: Any, segments: Any) -> Any:
    """A cursor on the first block of a chunk: chunk, segment, end of segments, block, head."""
    first = np.int64(starts[chunk])
    return chunk, first, np.int64(starts[chunk + 1]), np.int64(segments[first, BEGIN]), 0


@njit
def advance(cursor: Any, heads: Any, segments: Any) -> Any:
    """The cursor one block of one head further; behind its chunk's last it has no segment left."""
    chunk, segment, stop, block, head = cursor
    if segment < stop:
        head += 1
        if head == heads:
            head = 0
            block += 1
            if block == segments[segment, END]:
                segment += 1
                if segment < stop:
                    block = np.int64(segments[segment, BEGIN])
    return chunk, segment, stop, block, head


@njit(fastmath=_FAST, error_model="numpy")
def finish_row(acc: Any, total: Any, target: Any, bf16: Any, place: Any) -> None:
    """accumulators / sum into the output row at `target`."""
    floats = float32_at(acc)
    inverse = np.float32(1.0) / total
    for i in range(len(place)):
        value = floats[place[i]] * inverse
        if bf16:
            uint16_at(target)[i] = narrow(value)
        else:
            float32_at(target)[i] = value


@njit(fastmath=_FAST, error_model="numpy")
def merge_states(
    first: Any, count: Any, stride: Any, size: Any, group: Any, dim: Any, lane: Any
) -> None:
    """Fold the states of `size` bytes at first + stride, ... into that at `first`."""
    floats = size // 4
    width = group * dim
    sums = (floats - width) // 2
    one = carray(float32_at(first), (floats,))
    for part in range(1, count):
        two = carray(float32_at(first + part * stride), (floats,))
        for g in range(group):
            at = width + lane[g]
            top = max(one[at], two[at])
            keep = np.float32(math.exp2(one[at] - top))
            add = np.float32(math.exp2(two[at] - top))
            one[at] = top
            one[at + sums] = keep * one[at + sums] + add * two[at + sums]
            for i in range(g * dim, g * dim + dim):
                one[i] = keep * one[i] + add * two[i]


@functools.cache
def decode_kernel(shape: BlockShape) -> int:
    """Address of the kernel `void f(int64 *block)` for this shape. The first call compiles or
    loads it.
    """
    dim, group, lanes, pad = shape.head_dim, shape.group, shape.lanes, shape.pad
    bf16, dot, native, tiles = shape.bf16, shape.dot, shape.native, shape.tiles
    unit = native and tiles
    row, query_row, work_bytes = shape.row, shape.query_row, shape.work_floats * 4
    state, sums = shape.state_floats * 4, shape.parts * lanes
    width, query_bytes = group * dim, shape.query_bytes
    version = source_version()
    place = np.array(shape.place(), np.int64)
    lane = np.array([shape.lane(head) for head in range(group)], np.int64)

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        heads, cache, value = a[HEADS_PER_ITEM], a[CACHE], a[VALUE_STRIDE]
        num_chunks = a[NUM_CHUNKS]
        starts = carray(int32_at(a[CHUNK_STARTS]), (num_chunks + 1,))
        segments = carray(int32_at(a[SEGMENTS]), (starts[num_chunks], _SEGMENT_COLUMNS))
        lens = int32_at(a[CONTEXT_LENS])
        scale = float_of_bits(np.uint32(a[SCALE_BITS]))
        work = a[SCRATCH] + fetch_add(block + NEXT_THREAD * 8, 1) * a[SCRATCH_STRIDE]
        query = work + work_bytes
        own_state = query + heads * query_bytes
        chunk = fetch_add(block + NEXT_CHUNK * 8, 1)
        if chunk >= num_chunks:
            return
        cursor = enter_chunk(chunk, starts, segments)  # on the block that is asked for
        begin_amx(unit, a[CONFIG])
        coming = chunk
        while chunk < num_chunks:
            for s in range(starts[chunk], starts[chunk + 1]):
                request, head, slot = segments[s, ROW], segments[s, HEAD], segments[s, SLOT]
                begin, end, item = segments[s, BEGIN], segments[s, END], segments[s, ITEM]
                state_at = own_state
                if slot >= 0:
                    state_at = a[PARTIALS] + slot * heads * state
                source = a[QUERY] + request * a[QUERY_STRIDE] + head * group * row
                target = a[OUT] + request * a[OUT_STRIDE] + head * group * row
                for h in range(heads):
                    begin_state(state_at + h * state, width, sums)
                    to, rows = query + h * query_bytes, source + h * group * row
                    if tiles:
                        pair_queries(rows, to, group, dim, pad)
                    else:
                        for g in range(group):
                            if dot:
                                pad_query(rows + g * row, to + g * query_row, dim, query_row)
                            else:
                                prepare_query(rows + g * row, to + g * query_row, bf16, place)
                table = int32_at(a[BLOCK_TABLES] + request * a[TABLE_STRIDE])
                for j in range(begin, end):
                    tokens = min(BLOCK_TOKENS, lens[request] - j * BLOCK_TOKENS)
                    for h in range(heads):
                        key = cache + table[j] * a[BLOCK_STRIDE] + (head + h) * a[HEAD_STRIDE]
                        cursor = advance(cursor, heads, segments)
                        if cursor[1] == cursor[2]:
                            # The next chunk is taken early enough to ask for its first block, and
                            # no earlier: others may be free before this thread is.
                            coming = fetch_add(block + NEXT_CHUNK * 8, 1)
                            if coming < num_chunks:
                                cursor = enter_chunk(coming, starts, segments)
                        _, ahead, stop, ahead_block, ahead_head = cursor
                        after = key
                        if ahead < stop:
                            other = a[BLOCK_TABLES] + segments[ahead, ROW] * a[TABLE_STRIDE]
                            after = cache + int32_at(other)[ahead_block] * a[BLOCK_STRIDE]
                            after += (segments[ahead, HEAD] + ahead_head) * a[HEAD_STRIDE]
                        attend_block(
                            dim,
                            group,
                            lanes,
                            bf16,
                            dot,
                            native,
                            tiles,
                            version,
                            query + h * query_bytes,
                            key,
                            key + value,
                            state_at + h * state,
                            work,
                            tokens,
                            scale,
                            after,
                            after + value,
                        )
                if slot >= 0:
                    slots = int32_at(a[ITEM_SLOTS] + item * 8)
                    done = a[ITEM_DONE] + item * 8
                    if fetch_add(done, 1) < slots[1] - 1:
                        continue
                    # The last of an item's segments: the others' states are complete.
                    int64_at(done)[0] = 0
                    state_at = a[PARTIALS] + slots[0] * heads * state
                    for h in range(heads):
                        merge_states(
                            state_at + h * state, slots[1], heads * state, state, group, dim, lane
                        )
                for h in range(heads):
                    at = state_at + h * state
                    totals = float32_at(at + (width + sums) * 4)
                    for g in range(group):
                        out = target + (h * group + g) * row
                        finish_row(at + g * dim * 4, totals[lane[g]], out, bf16, place)
            chunk = coming
        end_amx(unit)

    return callback(kernel, fastmath=_FAST, error_model="numpy")
