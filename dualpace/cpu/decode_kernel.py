"""The decode-attention kernel: threads take chunks of a plan, walk their KV blocks, and merge cut
requests.

One C callback a (head size, group, dtype, path), made once a process and kept on disk by Numba.
It gets its work as one block of 64-bit integers, whose fields are named below. This file knows
nothing about tensors.
"""

import functools
import math
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

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
    SCRATCH,  # float32 [threads, scratch_floats(...)]
    PARTIALS,  # float32 [slots, heads_per_item * state_floats(...)]
    SCALE_BITS,  # the float32 `scale` as an integer
    NUM_FIELDS,
) = range(23)

_SEGMENT_COLUMNS = 6
LOG2E = math.log2(math.e)
_LOWEST = -1e30  # below any score, and finite: differences of two of them stay numbers
_FAST = {"contract", "reassoc", "nsz", "arcp"}


def state_floats(head_dim: int, group: int) -> int:
    """float32 of one head group's running state: accumulators [group, d], then maxima [group],
    then sums [group].
    """
    return group * (head_dim + 2)


def scratch_floats(head_dim: int, group: int, heads_per_item: int) -> int:
    """float32 that one thread needs: queries, state, and the scores of one block; a multiple of a
    cache line.
    """
    wanted = heads_per_item * (group * head_dim + state_floats(head_dim, group))
    return -(-(wanted + group * BLOCK_TOKENS) // 16) * 16


@njit(fastmath=_FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def loop_block(
    q: Any, k: Any, v: Any, bf16: Any, acc: Any, top: Any, total: Any, scores: Any, num_tokens: Any
) -> None:
    """One KV block in plain loops: the portable path, and the yardstick of the vector ones."""
    group, dim = q.shape
    for t in range(num_tokens):
        for g in range(group):
            dot = np.float32(0.0)
            if bf16:
                row = carray(uint16_at(k + t * dim * 2), (dim,))
                for i in range(dim):
                    dot += q[g, i] * widen(row[i])
            else:
                full = carray(float32_at(k + t * dim * 4), (dim,))
                for i in range(dim):
                    dot += q[g, i] * full[i]
            scores[g, t] = dot
    for g in range(group):
        peak = top[g]
        for t in range(num_tokens):
            peak = max(peak, scores[g, t])
        shrink = np.float32(math.exp2(top[g] - peak))
        top[g] = peak
        total[g] *= shrink
        for i in range(dim):
            acc[g, i] *= shrink
        for t in range(num_tokens):
            scores[g, t] = np.float32(math.exp2(scores[g, t] - peak))
            total[g] += scores[g, t]
    for t in range(num_tokens):
        for g in range(group):
            weight = scores[g, t]
            if bf16:
                row = carray(uint16_at(v + t * dim * 2), (dim,))
                for i in range(dim):
                    acc[g, i] += weight * widen(row[i])
            else:
                full = carray(float32_at(v + t * dim * 4), (dim,))
                for i in range(dim):
                    acc[g, i] += weight * full[i]


@njit(fastmath=_FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def load_query(source: Any, bf16: Any, scale: Any, query: Any) -> None:
    """Query rows at `source` into `query` [group, d], scaled."""
    group, dim = query.shape
    for g in range(group):
        for i in range(dim):
            if bf16:
                query[g, i] = scale * widen(uint16_at(source)[g * dim + i])
            else:
                query[g, i] = scale * float32_at(source)[g * dim + i]


@njit(fastmath=_FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def store_result(target: Any, bf16: Any, acc: Any, total: Any) -> None:
    """acc / total into the output rows at `target`."""
    group, dim = acc.shape
    for g in range(group):
        inverse = np.float32(1.0) / total[g]
        for i in range(dim):
            value = acc[g, i] * inverse
            if bf16:
                uint16_at(target)[g * dim + i] = narrow(value)
            else:
                float32_at(target)[g * dim + i] = value


@njit(fastmath=_FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def merge_states(first: Any, count: Any, stride: Any, group: Any, dim: Any) -> None:
    """Fold the states at first + stride, first + 2 * stride, ... (bytes) into that at `first`."""
    acc = carray(float32_at(first), (group, dim))
    top = carray(float32_at(first + group * dim * 4), (group,))
    total = carray(float32_at(first + group * (dim + 1) * 4), (group,))
    for part in range(1, count):
        other = first + part * stride
        acc2 = carray(float32_at(other), (group, dim))
        top2 = carray(float32_at(other + group * dim * 4), (group,))
        total2 = carray(float32_at(other + group * (dim + 1) * 4), (group,))
        for g in range(group):
            peak = max(top[g], top2[g])
            keep = np.float32(math.exp2(top[g] - peak))
            add = np.float32(math.exp2(top2[g] - peak))
            top[g] = peak
            total[g] = keep * total[g] + add * total2[g]
            for i in range(dim):
                acc[g, i] = keep * acc[g, i] + add * acc2[g, i]


@functools.cache
def decode_kernel(head_dim: int, group: int, bf16: bool) -> int:
    """Address of the kernel `void f(int64 *block)` for this head size, query heads a KV head, and
    dtype.
    """
    width = group * head_dim
    state = state_floats(head_dim, group) * 4
    row_bytes = width * (2 if bf16 else 4)

    def kernel(block: Any) -> None:
        a = carray(int64_at(block), (NUM_FIELDS,))
        heads = a[HEADS_PER_ITEM]
        starts = carray(int32_at(a[CHUNK_STARTS]), (a[NUM_CHUNKS] + 1,))
        segments = carray(int32_at(a[SEGMENTS]), (starts[a[NUM_CHUNKS]], _SEGMENT_COLUMNS))
        lens = int32_at(a[CONTEXT_LENS])
        scale = float_of_bits(np.uint32(a[SCALE_BITS]))
        room = (heads * (width * 4 + state) + group * BLOCK_TOKENS * 4 + 63) // 64 * 64
        query_at = a[SCRATCH] + fetch_add(block + NEXT_THREAD * 8, 1) * room
        own_state = query_at + heads * width * 4
        scores = carray(float32_at(own_state + heads * state), (group, BLOCK_TOKENS))
        chunk = fetch_add(block + NEXT_CHUNK * 8, 1)
        while chunk < a[NUM_CHUNKS]:
            for s in range(starts[chunk], starts[chunk + 1]):
                row, head, slot = segments[s, ROW], segments[s, HEAD], segments[s, SLOT]
                begin, end, item = segments[s, BEGIN], segments[s, END], segments[s, ITEM]
                state_at = own_state
                if slot >= 0:
                    state_at = a[PARTIALS] + slot * heads * state
                source = a[QUERY] + row * a[QUERY_STRIDE] + head * row_bytes
                target = a[OUT] + row * a[OUT_STRIDE] + head * row_bytes
                for h in range(heads):
                    query = carray(float32_at(query_at + h * width * 4), (group, head_dim))
                    load_query(source + h * row_bytes, bf16, scale, query)
                    floats = carray(float32_at(state_at + h * state), (group * (head_dim + 2),))
                    for i in range(group * (head_dim + 2)):
                        floats[i] = np.float32(0.0)
                    for g in range(group):
                        floats[width + g] = np.float32(_LOWEST)
                table = int32_at(a[BLOCK_TABLES] + row * a[TABLE_STRIDE])
                for j in range(begin, end):
                    num_tokens = min(BLOCK_TOKENS, lens[row] - j * BLOCK_TOKENS)
                    key = a[CACHE] + table[j] * a[BLOCK_STRIDE] + head * a[HEAD_STRIDE]
                    for h in range(heads):
                        query = carray(float32_at(query_at + h * width * 4), (group, head_dim))
                        at = state_at + h * state
                        acc = carray(float32_at(at), (group, head_dim))
                        top = carray(float32_at(at + width * 4), (group,))
                        total = carray(float32_at(at + width * 4 + group * 4), (group,))
                        loop_block(
                            query,
                            key,
                            key + a[VALUE_STRIDE],
                            bf16,
                            acc,
                            top,
                            total,
                            scores,
                            num_tokens,
                        )
                        key += a[HEAD_STRIDE]
                last = True
                if slot >= 0:
                    slots = int32_at(a[ITEM_SLOTS] + item * 8)
                    done = a[ITEM_DONE] + item * 8
                    last = fetch_add(done, 1) == slots[1] - 1
                    if last:
                        int64_at(done)[0] = 0
                        state_at = a[PARTIALS] + slots[0] * heads * state
                        for h in range(heads):
                            merge_states(
                                state_at + h * state, slots[1], heads * state, group, head_dim
                            )
                if last:
                    for h in range(heads):
                        at = state_at + h * state
                        acc = carray(float32_at(at), (group, head_dim))
                        total = carray(float32_at(at + width * 4 + group * 4), (group,))
                        store_result(target + h * row_bytes, bf16, acc, total)
            chunk = fetch_add(block + NEXT_CHUNK * 8, 1)

    signature = types.void(types.intp)
    return int(cfunc(signature, cache=True, fastmath=_FAST, error_model="numpy")(kernel).address)
