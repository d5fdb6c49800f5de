"""The small kernels between the products: embedding, residual and norm, RoPE and KV append, SiLU.

Each reads what a product left (partial sums in float32, or one sum in the model's dtype), adds it
up, and does all that follows up to the next product. So a layer is four products, attention and
four of these.

Shape suffixes: M rows, H hidden, S splits, N and K query and key heads, D head size, P = D / 2,
I intermediate, V vocabulary, C positions.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# Kernels are typed by Triton, at their launch.

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dualpace.graphs.gpu.device import launch_options


def embed_norm(
    token_ids_M: Tensor,
    source_M: Tensor,
    sampled: Tensor,
    embed_VH: Tensor,
    weight_H: Tensor,
    x_MH: Tensor,
    h_MH: Tensor,
    eps: float,
    first: int | None = None,
) -> None:
    """x = the embedding of each row's token, h = its norm.

    The token is `sampled[source]` where source >= 0 (one that a batch in flight samples), else
    `token_ids`. source int32, token_ids int64, sampled int32. `first` where the table is a rank's
    part: the token of its first row. x is then 0 for tokens of other ranks, and h is left alone.
    """
    M, H = x_MH.shape
    _embed_norm[(M,)](
        token_ids_M,
        source_M,
        sampled,
        embed_VH,
        weight_H,
        x_MH,
        h_MH,
        H,
        eps,
        first or 0,
        embed_VH.shape[0],
        PART=first is not None,
        BLOCK=triton.next_power_of_2(H),
        num_warps=8,
        **launch_options(x_MH.device),
    )


def add_up(parts_SMH: Tensor, out_MH: Tensor) -> None:
    """out = the sum of parts, rounded to out's dtype once. parts: float32."""
    S, M, H = parts_SMH.shape
    block = min(2048, triton.next_power_of_2(H))
    _add_up[(M, triton.cdiv(H, block))](
        parts_SMH, out_MH, M, H, SPLIT=S, BLOCK=block, num_warps=4, **launch_options(out_MH.device)
    )


def add_norm(parts_SMH: Tensor, x_MH: Tensor, weight_H: Tensor, h_MH: Tensor, eps: float) -> None:
    """x += the sum of parts, in place; h = norm(x). parts: float32 or x's dtype."""
    S, M, H = parts_SMH.shape
    _add_norm[(M,)](
        parts_SMH,
        x_MH,
        weight_H,
        h_MH,
        M,
        H,
        eps,
        SPLIT=S,
        BLOCK=triton.next_power_of_2(H),
        num_warps=8,
        **launch_options(x_MH.device),
    )


def rope_append(
    parts_SMW: Tensor,
    positions_M: Tensor,
    cos_CP: Tensor,
    sin_CP: Tensor,
    bias_W: Tensor | None,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    q_MND: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    cache: Tensor | None,
    slots_M: Tensor | None,
    eps: float,
    emit: bool = True,
) -> None:
    """The sum of parts plus bias becomes q, k, v: QK norm where the model has it, RoPE; k and v go
    to `cache` ([blocks, 2, K, 16, D]) at their slots (block * 16 + offset, int64; -1 is nowhere),
    and to k_MKD and v_MKD if `emit`. parts: [S, M, (N + 2K) * D].
    """
    S, M, _ = parts_SMW.shape
    N, D = q_MND.shape[1:]
    K = k_MKD.shape[1]
    nothing = parts_SMW  # a pointer that is never followed
    group = math.gcd(N, K)  # a program's heads are all query, all key or all value heads
    width = triton.next_power_of_2(group) * triton.next_power_of_2(D // 2)
    _rope_append[(M, (N + 2 * K) // group)](
        parts_SMW,
        positions_M,
        cos_CP,
        sin_CP,
        nothing if bias_W is None else bias_W,
        nothing if q_norm_D is None else q_norm_D,
        nothing if k_norm_D is None else k_norm_D,
        q_MND,
        k_MKD,
        v_MKD,
        nothing if cache is None else cache,
        nothing if slots_M is None else slots_M,
        M,
        0 if cache is None else cache.stride(0),
        eps,
        SPLIT=S,
        N=N,
        K=K,
        D=D,
        GROUP=group,
        PADDED=triton.next_power_of_2(group),
        HALF=triton.next_power_of_2(D // 2),
        BIAS=bias_W is not None,
        QK_NORM=q_norm_D is not None,
        APPEND=cache is not None,
        EMIT=emit,
        num_warps=min(4, max(1, width // 128)),
        **launch_options(q_MND.device),
    )


def silu_mul(gate_up: Tensor, out_MI: Tensor) -> None:
    """out = silu(gate) * up for rows of [gate, up]: [M, 2I] to [M, I]."""
    M, intermediate = out_MI.shape
    block = min(2048, triton.next_power_of_2(intermediate))
    _silu_mul[(M, triton.cdiv(intermediate, block))](
        gate_up, out_MI, intermediate, BLOCK=block, num_warps=4, **launch_options(out_MI.device)
    )


@triton.jit
def _normed(x, weight, H, eps, dtype: tl.constexpr):
    """RMS norm in float32, scaled in the model's dtype (stages.rms_norm)."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    return weight * (x * scale).to(dtype)


@triton.jit
def _embed_norm(
    ids,
    source,
    sampled,
    embed,
    weight,
    x,
    h,
    H,
    eps,
    first,
    count,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = c < H
    weights = tl.load(weight + c, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    origin = tl.load(source + row)
    late = tl.load(sampled + tl.maximum(origin, 0)).to(tl.int64)
    token = tl.where(origin >= 0, late, tl.load(ids + row)) - first
    width = H
    if PART:
        width = tl.where((token >= 0) & (token < count), H, 0)
    values = tl.load(embed + token * H + c, mask=c < width, other=0.0)
    tl.store(x + row * H + c, values, mask=inside)
    if not PART:
        out = _normed(values.to(tl.float32), weights, H, eps, x.dtype.element_ty)
        tl.store(h + row * H + c, out, mask=inside)


@triton.jit
def _add_up(parts, out, M, H, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < H
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLIT):
        total += tl.load(parts + (s * M + row) * H + c, mask=inside, other=0.0)
    tl.store(out + row * H + c, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm(
    parts, x, weight, h, M, H, eps, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = c < H
    weights = tl.load(weight + c, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(x + row * H + c, mask=inside, other=0.0).to(tl.float32)
    for s in tl.static_range(SPLIT):
        part = tl.load(parts + (s * M + row) * H + c, mask=inside, other=0.0)
        total += part.to(tl.float32)
    rounded = total.to(x.dtype.element_ty)
    tl.store(x + row * H + c, rounded, mask=inside)
    out = _normed(rounded.to(tl.float32), weights, H, eps, x.dtype.element_ty)
    tl.store(h + row * H + c, out, mask=inside)


@triton.jit
def _rope_append(
    parts,
    positions,
    cos,
    sin,
    bias,
    q_norm,
    k_norm,
    q,
    k,
    v,
    cache,
    slots,
    M,
    block_stride,
    eps,
    SPLIT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    APPEND: tl.constexpr,
    EMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    row, first_head = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP
    P: tl.constexpr = D // 2
    W: tl.constexpr = (N + 2 * K) * D
    g, p = tl.arange(0, PADDED)[:, None], tl.arange(0, HALF)[None, :]
    inside = (g < GROUP) & (p < P)
    dtype: tl.constexpr = q.dtype.element_ty
    own = g * D + p  # of the first half of each head, from the first head on
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.zeros((PADDED, HALF), tl.float32)
    second = tl.zeros((PADDED, HALF), tl.float32)
    for s in tl.static_range(SPLIT):
        part = parts + (s * M + row) * W + first_head * D + own
        first += tl.load(part, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(part + P, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        added = bias + first_head * D + own
        first += tl.load(added, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(added + P, mask=inside, other=0.0).to(tl.float32)
    if first_head < N + K:
        if QK_NORM:
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            scale = tl.rsqrt(squares / D + eps)[:, None]
            norm = q_norm
            if first_head >= N:
                norm = k_norm
            weight = tl.load(norm + p, mask=p < P, other=0.0)
            first = (weight * (first * scale).to(dtype)).to(tl.float32)
            weight = tl.load(norm + P + p, mask=p < P, other=0.0)
            second = (weight * (second * scale).to(dtype)).to(tl.float32)
        position = tl.load(positions + row)
        c = tl.load(cos + position * P + p, mask=p < P, other=0.0)
        s_ = tl.load(sin + position * P + p, mask=p < P, other=0.0)
        turned = first * c - second * s_
        second = second * c + first * s_
        first = turned
    first_out, second_out = first.to(dtype), second.to(dtype)
    if first_head < N:
        q_place = q + (row * N + first_head) * D + own
        tl.store(q_place, first_out, mask=inside)
        tl.store(q_place + P, second_out, mask=inside)
    else:
        is_value = first_head >= N + K
        kv_head = first_head - N - tl.where(is_value, K, 0)
        if EMIT:
            target = k
            if is_value:
                target = v
            kv_place = target + (row * K + kv_head) * D + own
            tl.store(kv_place, first_out, mask=inside)
            tl.store(kv_place + P, second_out, mask=inside)
        if APPEND:
            slot = tl.load(slots + row)
            if slot >= 0:
                piece = tl.where(is_value, K, 0) + kv_head
                place = cache + (slot // 16) * block_stride
                place += ((piece + g) * 16 + slot % 16) * D + p
                tl.store(place, first_out, mask=inside)
                tl.store(place + P, second_out, mask=inside)


@triton.jit
def _silu_mul(gate_up, out, intermediate, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < intermediate
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = gate_up + row * 2 * intermediate + c
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + intermediate, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * intermediate + c, value.to(out.dtype.element_ty), mask=inside)
