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
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from dualpace.cpu.block_ir import LOWEST, BlockShape, block_function
from dualpace.cpu.plan import BEGIN, BLOCK_TOKENS, END, HEAD, ITEM, ROW, SLOT
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
from dualpace.cpu.version import source_version

# Fields of the argument block. Strides are in bytes.
(
    NEXT_CHUNK,  # atomic; the caller sets it to 0
    NEXT_THREAD,  # atomic; the caller sets it to 0
    NUM_CHUNKS,
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
    NUM_FIELDS,
) = range(24)

_SEGMENT_COLUMNS = 6
_FAST = {"contract", "reassoc", "nsz", "arcp"}


def scratch_bytes(shape: BlockShape, heads_per_item: int) -> int:
    """Bytes that one thread needs, a multiple of a cache line."""
    one_head = shape.group * shape.query_row + shape.state_floats * 4
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
    constants = (dim, group, lanes, bf16, dot, native, _version)
    shape = BlockShape(*(constant.literal_value for constant in constants[:-1]))

    def codegen(_ctx: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        function = block_function(builder.module, shape)
        pointers = [builder.inttoptr(a, ir.PointerType()) for a in (*args[7:12], *args[14:])]
        builder.call(function, [*pointers[:5], *args[12:14], *pointers[5:]])
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
    dim, group, lanes = shape.head_dim, shape.group, shape.lanes
    bf16, dot, native = shape.bf16, shape.dot, shape.native
    row, query_row, work_bytes = shape.row, shape.query_row, shape.work_floats * 4
    state, sums = shape.state_floats * 4, shape.parts * lanes
    width, query_bytes = group * dim, group * query_row
    version = source_version()
    place = np.array(shape.place(), np.int64)
    lane = np.array([shape.lane(head) for head in range(group)], np.int64)

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        heads, cache, value = a[HEADS_PER_ITEM], a[CACHE], a[VALUE_STRIDE]
        starts = carray(int32_at(a[CHUNK_STARTS]), (a[NUM_CHUNKS] + 1,))
        segments = carray(int32_at(a[SEGMENTS]), (starts[a[NUM_CHUNKS]], _SEGMENT_COLUMNS))
        lens = int32_at(a[CONTEXT_LENS])
        scale = float_of_bits(np.uint32(a[SCALE_BITS]))
        work = a[SCRATCH] + fetch_add(block + NEXT_THREAD * 8, 1) * a[SCRATCH_STRIDE]
        query = work + work_bytes
        own_state = query + heads * query_bytes
        chunk = fetch_add(block + NEXT_CHUNK * 8, 1)
        while chunk < a[NUM_CHUNKS]:
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
                for g in range(heads * group):
                    if dot:
                        pad_query(source + g * row, query + g * query_row, dim, query_row)
                    else:
                        prepare_query(source + g * row, query + g * query_row, bf16, place)
                table = int32_at(a[BLOCK_TABLES] + request * a[TABLE_STRIDE])
                key = cache + table[begin] * a[BLOCK_STRIDE] + head * a[HEAD_STRIDE]
                for j in range(begin, end):
                    # Where this segment goes on; where the next one of the chunk begins; or here.
                    after = key
                    if j + 1 < end:
                        after = cache + table[j + 1] * a[BLOCK_STRIDE] + head * a[HEAD_STRIDE]
                    elif s + 1 < starts[chunk + 1]:
                        other = int32_at(a[BLOCK_TABLES] + segments[s + 1, ROW] * a[TABLE_STRIDE])
                        after = cache + other[segments[s + 1, BEGIN]] * a[BLOCK_STRIDE]
                        after += segments[s + 1, HEAD] * a[HEAD_STRIDE]
                    tokens = min(BLOCK_TOKENS, lens[request] - j * BLOCK_TOKENS)
                    for h in range(heads):
                        coming = key + a[HEAD_STRIDE] if h + 1 < heads else after
                        attend_block(
                            dim,
                            group,
                            lanes,
                            bf16,
                            dot,
                            native,
                            version,
                            query + h * query_bytes,
                            key,
                            key + value,
                            state_at + h * state,
                            work,
                            tokens,
                            scale,
                            coming,
                            coming + value,
                        )
                        key = coming
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
            chunk = fetch_add(block + NEXT_CHUNK * 8, 1)

    signature = types.void(types.intp)
    return int(cfunc(signature, cache=True, fastmath=_FAST, error_model="numpy")(kernel).address)
