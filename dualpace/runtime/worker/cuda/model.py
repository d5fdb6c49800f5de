"""The model on the device: weights, pool, buffers, and captured decode steps by bucket."""

# mypy: allow-untyped-calls

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dualpace.graphs.collective import TorchCollective
from dualpace.graphs.gpu import attention, tune, tune_attention
from dualpace.graphs.gpu.attention import Heads
from dualpace.graphs.gpu.capture import Capturer, DecodeGraphs
from dualpace.graphs.gpu.forward import Forward, Rows
from dualpace.graphs.gpu.linear import PRODUCTS, Choices
from dualpace.graphs.gpu.peer_sums import PeerSums
from dualpace.graphs.gpu.skinny import MAX_ROWS
from dualpace.graphs.rope import rope_table
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.weights import Weights
from dualpace.runtime.worker.ranks import ALONE, Ranks

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512)
TUNED = (1, 8, 32, 64)  # rows that products are measured at; others take the next one's choice
_WORTH_TUNING = 1024  # hidden size; below, a step is launches and any product does


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One model on the current CUDA device."""

    spec: ModelSpec
    forward: Forward
    caches: Sequence[Tensor]  # each layer's [B, 2, K, 16, D]
    rows: Rows  # of the largest round
    sampled: Tensor  # int32: tokens of the last round, in its order
    maker: attention.Maker
    decodes: dict[int, DecodeGraphs]
    attends: dict[int, attention.Decode]  # the decode attention of each bucket
    buckets: tuple[int, ...]

    def bucket(self, num_rows: int) -> int:
        return self.buckets[bisect_left(self.buckets, num_rows)]


def buckets_up_to(largest: int) -> tuple[int, ...]:
    """Row counts that a decode step is captured for."""
    return (*(bucket for bucket in BUCKETS if bucket < largest), largest)


def make_forward(
    spec: ModelSpec,
    weights: Weights,
    max_context: int,
    max_rows: int,
    choices: Choices | None,
    ranks: Ranks = ALONE,
) -> Forward:
    cos, sin = (t.to(weights.embed.device) for t in rope_table(spec, max_context))
    shard, collective, peers = ranks.shard, ranks.collective, None
    if isinstance(collective, TorchCollective):
        peers = PeerSums.join(collective, spec.hidden, weights.embed.dtype, weights.embed.device)
    return Forward(spec, weights, cos, sin, max_rows, choices, None, shard, collective, peers)


def choose_products(
    forward: Forward,
    buckets: Sequence[int],
    folder: Path | None,
    cores: Sequence[int],
    progress: Callable[[str], None],
) -> None:
    """Which product serves which bucket: read from `folder`, else measured with all `cores`."""
    if forward.spec.hidden < _WORTH_TUNING:
        return
    with _on_all(cores):
        tune.tune(forward.apart(), TUNED, folder, len(cores) or 1, progress)
    table = forward.choices.table
    for bucket in buckets:
        near = next((size for size in TUNED if size >= bucket), None)
        if bucket <= MAX_ROWS and near is not None:
            for product in PRODUCTS:
                table.setdefault((product, bucket), table.get((product, near)))


def choose_attention(
    forward: Forward,
    choice: attention.Choice,
    largest: int,
    folder: Path | None,
    cores: Sequence[int],
    progress: Callable[[str], None],
) -> attention.Maker:
    """Attention as chosen, decode of each bucket by the fastest where there are several: read from
    `folder`, else measured. Before the pool takes the device's memory.
    """
    spec, dtype, device = forward.spec, forward.dtype, forward.device
    heads = Heads(spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
    maker = attention.make(choice, heads, dtype, device)
    if choice.name != "flashinfer" or spec.hidden < _WORTH_TUNING:
        return maker
    processes = len(cores) or 1
    with _on_all(cores):
        return tune_attention.tuned(
            maker, heads, dtype, device, largest, folder, processes, progress
        )


@contextmanager
def _on_all(cores: Sequence[int]) -> Iterator[None]:
    """For compiling, which is parallel: children inherit the cores of this thread."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {*own, *cores})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def make_model(
    forward: Forward,
    pool: Tensor,
    max_rows: int,
    buckets: Sequence[int],
    maker: attention.Maker,
    segmented: bool,
    progress: Callable[[int, int], None],
    max_sampled: int = 0,
) -> DeviceModel:
    """Captures the decode step of every bucket: whole, or `segmented` a layer at a time; on ranks,
    each of which computes a part, as many layers as there are ranks, which take about as long.

    pool [L, B, 2, K, 16, D] on the device; `max_sampled` where a round may sample more rows than
    the largest bucket has.
    """
    spec, device = forward.spec, forward.device
    caches = list(pool.unbind(0))
    rows = Rows.empty(spec, max(max_rows, buckets[-1]), forward.dtype, device)
    sampled = torch.zeros(max(max_sampled, buckets[-1]), dtype=torch.int32, device=device)
    capturer = Capturer(device)
    decodes, attends = {}, {}
    for done, bucket in enumerate(reversed(buckets), start=1):  # large first: memory is shared
        attends[bucket] = decode = maker.decode(bucket, pool.shape[1] + bucket)
        decodes[bucket] = DecodeGraphs(
            forward,
            caches,
            decode,
            rows.first(bucket),
            sampled,
            capturer,
            whole=not segmented,
            span=forward.shard.size if segmented else 0,
        )
        progress(done, len(buckets))
    return DeviceModel(
        spec, forward, caches, rows, sampled, maker, decodes, attends, tuple(buckets)
    )


def second_kv(rows: Rows) -> Rows:
    """The same buffers but for K and V: layers take turns where copies may still read them."""
    return replace(rows, k=torch.zeros_like(rows.k), v=torch.zeros_like(rows.v))
