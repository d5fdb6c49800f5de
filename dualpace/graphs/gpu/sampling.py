"""Sampling on the device, one program a row, nothing sorted and nothing awaited.

The rules of graphs/sampling.py: temperature, then top-k and top-p by weight (tokens of equal weight
kept together), then inverse CDF of the row's own uniform number. The smallest kept weight is found
by bisection over weights, not by a sort: whether a weight is kept is monotone in the weight.

A rank that has a part of the vocabulary leaves each row's best token there as two int32, the bits
of its logit and its id, and `best_rank` chooses among those of all ranks.

Shape suffixes: B rows, V vocabulary, T tiles, R ranks.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# Kernels are typed by Triton, at their launch.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dualpace.graphs.gpu.device import launch_options
from dualpace.graphs.sampling import SamplingRows

_BLOCK = 8192  # one program reads a row alone: many loads in flight


def argmax(logits_BV: Tensor, tokens_B: Tensor) -> None:
    """tokens = the best token of each row, the lower id on a tie. float32 [B, V] to int32 [B]."""
    B, V = logits_BV.shape
    _argmax[(B,)](logits_BV, tokens_B, V, 0, PART=False, BLOCK=_block(V), num_warps=8)


def best_part(logits_BV: Tensor, first: int, best_B2: Tensor) -> None:
    """best = each row's largest logit and its token, of a part that begins with token `first`."""
    B, V = logits_BV.shape
    _argmax[(B,)](logits_BV, best_B2, V, first, PART=True, BLOCK=_block(V), num_warps=8)


def best_tile(
    value_TB: Tensor, index_TB: Tensor, tokens_B: Tensor, first: int | None = None
) -> None:
    """tokens = index at the largest value of each row (skinny.best_of_tiles); with `first`, the
    token of index 0, tokens is [B, 2] as in `best_part`.
    """
    T, B = value_TB.shape
    block = min(2048, triton.next_power_of_2(T))
    options = launch_options(tokens_B.device)
    part = first is not None
    _best_tile[(B,)](
        value_TB,
        index_TB,
        tokens_B,
        T,
        B,
        first or 0,
        PART=part,
        BLOCK=block,
        num_warps=4,
        **options,
    )


def best_rank(best_BR2: Tensor, tokens_B: Tensor, vocab: int) -> None:
    """tokens = the best of all ranks' best tokens, the first rank's on a tie. Padding repeats the
    row of token vocab - 1, and so may stand for it.
    """
    B, R, _ = best_BR2.shape
    _best_rank[(B,)](best_BR2, tokens_B, vocab, R=R, num_warps=1)


def sample(logits_BV: Tensor, rows: SamplingRows, tokens_B: Tensor) -> None:
    """tokens = one token a row: float32 [B, V], rows of any stride, to int32 [B]."""
    B, V = logits_BV.shape
    _sample[(B,)](
        logits_BV,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.u,
        tokens_B,
        V,
        logits_BV.stride(0),
        BLOCK=_block(V),
        num_warps=32,
    )


def _block(vocab: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(vocab))


@triton.jit
def _best(logits, V, BLOCK: tl.constexpr):
    """(largest logit, its lowest index) of one row."""
    best = -float("inf")
    where = 0
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        values = tl.load(logits + c, mask=c < V, other=-float("inf"))
        value, index = tl.max(values, axis=0, return_indices=True)
        where = tl.where(value > best, start + index, where)
        best = tl.maximum(best, value)
    return best, where


@triton.jit
def _keep(out, row, value, token, PART: tl.constexpr):
    """The token of a row, or its logit's bits and the token."""
    if PART:
        tl.store(out + 2 * row, value.to(tl.int32, bitcast=True))
        tl.store(out + 2 * row + 1, token.to(tl.int32))
    else:
        tl.store(out + row, token.to(tl.int32))


@triton.jit
def _argmax(logits, out, V, first, PART: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    value, where = _best(logits + row * V, V, BLOCK)
    _keep(out, row, value, where + first, PART)


@triton.jit
def _best_rank(best, tokens, vocab, R: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = -float("inf")
    token = vocab - 1
    for rank in tl.static_range(R):
        place = best + 2 * (row * R + rank)
        value = tl.load(place).to(tl.float32, bitcast=True)
        token = tl.where(value > top, tl.load(place + 1), token)
        top = tl.maximum(top, value)
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int32))


@triton.jit(do_not_specialize=["B"])
def _best_tile(
    value, index, out, T, B, first, PART: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    best = -float("inf")
    where = 0
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        values = tl.load(value + t * B + row, mask=t < T, other=-float("inf"))
        top, tile = tl.max(values, axis=0, return_indices=True)
        where = tl.where(top > best, start + tile, where)
        best = tl.maximum(best, top)
    _keep(out, row, best, tl.load(index + where * B + row) + first, PART)


@triton.jit
def _heavier(logits, V, best, temperature, least, BLOCK: tl.constexpr):
    """(number, sum) of the weights above `least`; a weight is exp((logit - best) / temperature)."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        values = tl.load(logits + c, mask=c < V, other=-float("inf"))
        weights = tl.exp((values - best) / temperature)
        above = weights > least
        count += above.to(tl.int32)
        mass += tl.where(above, weights, 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _smallest_kept(logits, V, best, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """A threshold: what top-k and top-p keep are the weights of at least it.

    Bisects over the bits of weights, which are ordered as the weights are: a weight of `high` is
    kept, one of `low` is not, until nothing lies between.
    """
    _, total = _heavier(logits, V, best, temperature, 0.0, BLOCK)
    limit = tl.where(top_k > 0, top_k, V)
    mass_limit = tl.where(top_p < 1.0, top_p * total, float("inf"))
    low = tl.full((), 0, tl.int32)  # weight 0 is never kept
    high = tl.full((), 0x3F800000, tl.int32)  # 1.0, the best token's weight
    while high - low > 1:
        middle = low + (high - low) // 2
        least = middle.to(tl.float32, bitcast=True)
        count, mass = _heavier(logits, V, best, temperature, least, BLOCK)
        if (count < limit) & (mass < mass_limit):
            high = middle
        else:
            low = middle
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _draw(logits, V, best, temperature, least, u, BLOCK: tl.constexpr):
    """The first token at which the kept weights add up to more than u of their sum."""
    total = 0.0
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        values = tl.load(logits + c, mask=c < V, other=-float("inf"))
        weights = tl.exp((values - best) / temperature)
        total += tl.sum(tl.where((weights >= least) & (c < V), weights, 0.0), 0)
    target = u * total
    before = 0.0
    drawn = -1
    last = 0  # the last kept token: rounding may leave the target above every sum
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        values = tl.load(logits + c, mask=c < V, other=-float("inf"))
        weights = tl.exp((values - best) / temperature)
        weights = tl.where((weights >= least) & (c < V), weights, 0.0)
        sums = before + tl.cumsum(weights, 0)
        reached = tl.min(tl.where((sums > target) & (weights > 0.0), c, V), 0)
        drawn = tl.where((drawn < 0) & (reached < V), reached, drawn)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, c, 0), 0))
        before += tl.sum(weights, 0)
    return tl.where(drawn < 0, last, drawn)


@triton.jit
def _sample(logits, temperature, top_k, top_p, u, tokens, V, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    best, token = _best(logits, V, BLOCK)
    heat = tl.load(temperature + row)
    if heat > 0.0:
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        least = 0.0
        if (k > 0) | (p < 1.0):
            least = _smallest_kept(logits, V, best, heat, k, p, BLOCK)
        token = _draw(logits, V, best, heat, least, tl.load(u + row), BLOCK)
    tl.store(tokens + row, token.to(tl.int32))
