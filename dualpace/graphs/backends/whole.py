"""Executables of stages whose weights are one handle: a layer's dense stage as a whole.

Pre-attention can also leave K and V in a paged cache, where they would be copied next; and where
both stages are whole, all layers of a batch can run as one chain of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualpace.block import BLOCK_TOKENS
from dualpace.cpu.append import kv_append
from dualpace.cpu.attention import PagedDecoder
from dualpace.cpu.dense_stage import PostAttention
from dualpace.cpu.gemm import MAX_ROWS
from dualpace.cpu.handles import Handles
from dualpace.cpu.layers import MAX_PROGRAMS, Layers
from dualpace.cpu.qkv import Places, PreAttention
from dualpace.graphs.backends import Arguments, Stage
from dualpace.graphs.table import StageTable


class Round:
    """Where the rows of a batch stand, made once for all layers."""

    def __init__(self) -> None:
        self._given: tuple[Tensor | None, Tensor | None] = None, None
        self._places: Places | None = None

    def places(self, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor) -> Places:
        """Of tokens at `positions` whose K and V go to `slots`; cos and sin are the model's."""
        given = self._given
        if self._places is None or given[0] is not positions or given[1] is not slots:
            self._places = Places(cos[positions], sin[positions], slots)
            self._given = positions, slots
        return self._places


@dataclass(frozen=True, slots=True)
class PreLayer:
    """Pre-attention of one layer, and the model's table of angles ([positions, d / 2])."""

    product: PreAttention
    cos: Tensor
    sin: Tensor
    round: Round

    def store(self, x: Tensor, positions: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        """q [T, N, D]; k and v go to `slots` (int64 [T]) of `cache` [blocks, 2, K, 16, D]."""
        return self.product(x, self.places(positions, slots), cache)

    def places(self, positions: Tensor, slots: Tensor) -> Places:
        return self.round.places(self.cos, self.sin, positions, slots)


PRE_LAYERS = Handles[PreLayer]()
POST_LAYERS = Handles[PostAttention]()


class WholePreAttention:
    """An executable of `stages.pre_attention` for (x, positions, handle)."""

    def __init__(self) -> None:
        self._slots = torch.arange(0)

    def __call__(
        self, x: Tensor, positions: Tensor, handle: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        layer, rows = PRE_LAYERS[handle], len(x)
        _, kv_heads, dim = layer.product.heads
        cache = x.new_empty(-(-rows // BLOCK_TOKENS), 2, kv_heads, BLOCK_TOKENS, dim)
        if len(self._slots) != rows:
            self._slots = torch.arange(rows)
        q = layer.store(x, positions, cache, self._slots)
        k, v = (part.transpose(1, 2).flatten(0, 1)[:rows] for part in cache.unbind(1))
        return q, k.contiguous(), v.contiguous()

    def store(
        self, x: Tensor, positions: Tensor, cache: Tensor, slots: Tensor, handle: Tensor
    ) -> Tensor:
        """PreLayer.store of the layer behind the handle."""
        return PRE_LAYERS[handle].store(x, positions, cache, slots)


WHOLE_PRE_ATTENTION = WholePreAttention()  # one, so that backends which share it are timed once


def whole_post_attention(attn: Tensor, x: Tensor, handle: Tensor) -> Tensor:
    """An executable of `stages.post_attention`."""
    return POST_LAYERS[handle](attn, x)


def stored_by(
    graph: Stage, x: Tensor, positions: Tensor, weights: Arguments, cache: Tensor, slots: Tensor
) -> Tensor:
    """q [T, N, D] by any executable of `stages.pre_attention` for T rows; k and v go to `slots`
    (int64 [T], block * 16 + offset) of `cache` [blocks, 2, K, 16, D], by the executable itself
    where it can, else by a copy behind it.
    """
    if graph is WHOLE_PRE_ATTENTION:
        (handle,) = weights
        assert handle is not None
        return WHOLE_PRE_ATTENTION.store(x, positions, cache, slots, handle)
    q, k, v = graph(x, positions, *weights)
    kv_append(k, v, cache, slots)
    return q


class ChainedLayers:
    """The layers of a batch as chains of kernels, where their dense stages are whole."""

    def __init__(self, caches: Sequence[Tensor], decoder: PagedDecoder, scale: float) -> None:
        """caches: each layer's; the decoder has begun each round before `begin`."""
        self._caches, self._decoder, self._scale = caches, decoder, scale
        self._first: PreLayer | None = None
        self._layers: dict[bool, Layers] = {}  # by whether post-attention is whole

    def prepare(self, tables: Mapping[str, StageTable], most_rows: int) -> None:
        """Make the chains of every number of rows that has some."""
        for rows in range(1, min(most_rows, MAX_ROWS, MAX_PROGRAMS) + 1):
            if (layers := self._layers_of(tables, rows)) is not None:
                layers.prepare(rows)

    def begin(
        self, tables: Mapping[str, StageTable], positions: Tensor, slots: Tensor
    ) -> Layers | None:
        """The layers, which have begun the round of these rows. None where pre-attention of so many
        is not whole; their `post` is None where post-attention is not.
        """
        layers = self._layers_of(tables, len(positions))
        if layers is not None:
            assert self._first is not None
            layers.begin(len(positions), self._first.places(positions, slots), self._scale)
        return layers

    def _layers_of(self, tables: Mapping[str, StageTable], rows: int) -> Layers | None:
        pre = _whole_weights(tables.get("pre_attention"), rows, WHOLE_PRE_ATTENTION)
        post = _whole_weights(tables.get("post_attention"), rows, whole_post_attention)
        if pre is None:
            return None
        first = PRE_LAYERS[pre[0]]
        if self._first is not first:  # other tables serve than before
            self._first, self._layers = first, {}
        is_whole = post is not None
        if is_whole not in self._layers:
            self._layers[is_whole] = Layers(
                [PRE_LAYERS[handle].product for handle in pre],
                None if post is None else [POST_LAYERS[handle] for handle in post],
                self._caches,
                self._decoder,
                first.product.rooms,
            )
        return self._layers[is_whole]


def _whole_weights(table: StageTable | None, rows: int, graph: Stage) -> list[Tensor] | None:
    """Each layer's handle, where `graph` serves so many rows of the stage."""
    pieces = () if table is None or rows > MAX_ROWS else table.pieces(rows)
    if len(pieces) != 1 or pieces[0][2].graph is not graph:
        return None
    handles = []
    for (handle,) in pieces[0][2].weights:
        assert handle is not None
        handles.append(handle)
    return handles
