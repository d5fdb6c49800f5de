"""CUDA graphs of a decode step, by layer or whole, and of the dense pieces of mixed batches.

Stage-boundary mode replays pre-layer, each segment of layers (pre-attention, KV append, attention,
post-attention) and post-layer one after another, so that the host may do something between;
whole-forward mode replays everything before sampling as one graph. Both read the same fixed
buffers: `begin` fills them, and nothing is allocated or compiled at a replay. A segment is a graph
of `span` layers, for every graph costs the device 5 to 20 us, or plain launches (launches.py),
which cost it 3 us a layer and the host ten times what a graph does.

Shape suffixes: M rows of a bucket, B rows of a batch.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dualpace.graphs.gpu.attention import Decode, PagedRows
from dualpace.graphs.gpu.forward import Forward, Rows
from dualpace.graphs.gpu.launches import Launches
from dualpace.graphs.gpu.planned import PackedInputs
from dualpace.graphs.logit_edits import LogitEdits
from dualpace.graphs.logprobs import LogprobRows
from dualpace.graphs.sampling import Drawn, SamplingRows

_WARM_UPS = 2  # the first run compiles and allocates
_IDLE = {"source": -1, "top_p": 1.0}  # of padding rows; 0 elsewhere


class Capturer:
    """Captures functions that touch fixed memory; all graphs share one private memory pool.

    They may, because graphs of one worker are replayed one after another on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # The pool lives as long as one graph of it does: this one as long as the capturer.
        word = torch.zeros(1, device=device)
        self.warm_up(word.zero_)
        self._keeper = self.capture(word.zero_)

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Runs `function` until nothing is left to compile."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                function()
        self._stream.synchronize()

    def capture(self, function: Callable[[], Any], keep: bool = False) -> torch.cuda.CUDAGraph:
        """A graph of what `function`, warmed up, launches; `keep` it as a graph for Launches."""
        graph = torch.cuda.CUDAGraph(keep_graph=keep)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads of the process may go on allocating and copying.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            function()
            graph.capture_end()
        return graph


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One round's decode rows as host arrays, in row order."""

    token_ids: np.ndarray  # int64 [B]
    source: np.ndarray  # int32 [B]: row of the round in flight that samples the token, or -1
    positions: np.ndarray  # int64 [B]
    slots: np.ndarray  # int64 [B]: block * 16 + offset where K and V go
    paged: PagedRows  # padded to the bucket
    temperature: np.ndarray  # float32 [B]
    top_k: np.ndarray  # int32 [B]
    top_p: np.ndarray  # float32 [B]
    u: np.ndarray  # float32 [B]

    @property
    def is_greedy(self) -> bool:
        return not self.temperature.any()


class DecodeInputs:
    """The fixed device buffers of one bucket's batches."""

    def __init__(self, bucket: int, device: torch.device) -> None:
        kinds = {
            "token_ids": torch.int64,
            "positions": torch.int64,
            "slots": torch.int64,
            "source": torch.int32,
            "temperature": torch.float32,
            "top_k": torch.int32,
            "top_p": torch.float32,
            "u": torch.float32,
        }
        self._packed = PackedInputs({name: (kind, bucket) for name, kind in kinds.items()}, device)
        self.views = self._packed.views
        views = self.views
        self.sampling = SamplingRows(
            views["temperature"], views["top_k"], views["top_p"], views["u"]
        )

    def send(self, batch: DecodeBatch) -> None:
        """Padding rows feed token 0 at position 0 into block 0, and take the best token."""
        self._packed.send({name: getattr(batch, name) for name in self.views}, idle=_IDLE)
        self._packed.sent()


class _Replayable(Protocol):
    def replay(self) -> None: ...


class DecodeGraphs:
    """The captured decode step of one bucket. `begin`, then the replays, in stream order.

    `rows` may be shared between buckets, and so may `sampled`, into which every step writes its
    tokens and from which rows scheduled ahead read theirs.
    """

    def __init__(
        self,
        forward: Forward,
        caches: Sequence[Tensor],
        decode: Decode,
        rows: Rows,
        sampled: Tensor,
        capturer: Capturer,
        whole: bool = True,
        span: int = 0,
        as_launches: bool = False,
    ) -> None:
        """caches: each layer's [blocks, 2, K, 16, D]; sampled: int32, of the largest bucket.

        `whole` captures whole-forward mode; `span` > 0 stage-boundary mode in segments of that
        many layers, replayed as graphs or, `as_launches`, kernel by kernel.
        """
        self.bucket = bucket = rows.x.shape[0]
        self._forward, self._caches, self._decode = forward, caches, decode
        self._rows, self._sampled = rows, sampled
        self._inputs = DecodeInputs(bucket, forward.device)
        self._is_greedy = True
        decode.plan(PagedRows.idle(bucket))
        capturer.warm_up(self._once)
        self._greedy = capturer.capture(self._run_greedy)
        self._sample = capturer.capture(self._run_sample)
        self._whole = capturer.capture(self._run_whole) if whole else None
        self._pre: _Replayable | None = None
        self._segments: list[_Replayable] = []
        if span:

            def make(function: Callable[[], Any]) -> _Replayable:
                graph = capturer.capture(function, keep=as_launches)
                return Launches(graph) if as_launches else graph

            self._pre = make(self._run_pre)
            starts = range(0, len(caches), span)
            spans = [range(i, min(i + span, len(caches))) for i in starts]
            self._segments = [make(partial(self._run_layers, layers)) for layers in spans]

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def begin(self, batch: DecodeBatch) -> None:
        """Fills the buffers and plans attention, without waiting for the device."""
        self._inputs.send(batch)
        self._decode.plan(batch.paged)
        self._is_greedy = batch.is_greedy

    def pre_layer(self) -> None:
        assert self._pre is not None
        self._pre.replay()

    def segment(self, index: int) -> None:
        """The index-th `span` layers."""
        self._segments[index].replay()

    def whole(self) -> None:
        """Pre-layer and all layers."""
        assert self._whole is not None
        self._whole.replay()

    def post_layer(
        self, edits: LogitEdits | None = None, logprobs: LogprobRows | None = None
    ) -> Drawn:
        """Samples: int32 [M], the same buffer each time. With edits, or where log-probabilities are
        asked for, it is launched, not replayed: their sizes change from round to round.
        """
        tokens, told = self._sampled[: self.bucket], None
        if edits is not None or logprobs is not None:
            how = replace(self._inputs.sampling, edits=edits, logprobs=logprobs)
            told = self._forward.sample(self._rows.h, how, tokens)
        else:
            (self._greedy if self._is_greedy else self._sample).replay()
        return Drawn(tokens, told)

    # ---- what is captured

    def _run_pre(self) -> None:
        views = self._inputs.views
        self._forward.embed(self._rows, views["token_ids"], views["source"], self._sampled)

    def _run_layer(self, layer: int) -> None:
        views, rows, cache = self._inputs.views, self._rows, self._caches[layer]
        self._forward.pre_attention(
            layer, rows, views["positions"], cache, views["slots"], emit=False
        )
        self._decode.run(rows.q, cache, rows.attn.view_as(rows.q))
        self._forward.post_attention(layer, rows)

    def _run_layers(self, layers: range) -> None:
        for layer in layers:
            self._run_layer(layer)

    def _run_whole(self) -> None:
        self._run_pre()
        self._run_layers(range(len(self._caches)))

    def _run_greedy(self) -> None:
        self._forward.greedy(self._rows.h, self._sampled[: self.bucket])

    def _run_sample(self) -> None:
        self._forward.sample(self._rows.h, self._inputs.sampling, self._sampled[: self.bucket])

    def _once(self) -> None:
        self._run_pre()
        self._run_layer(0)
        self._run_greedy()
        self._run_sample()


class LinearGraphs:
    """The dense work of one bucket between attentions, for rounds that attend by themselves.

    `first`, then for each layer attention from `rows.q`, `rows.k`, `rows.v` into `rows.attn` and
    `after(layer)`; at the end `rows.h` is ready for sampling.
    """

    def __init__(
        self,
        forward: Forward,
        caches: Sequence[Tensor],
        rows: Rows,
        inputs: Mapping[str, Tensor],
        sampled: Tensor,
        capturer: Capturer,
    ) -> None:
        """inputs: token_ids, source, positions and slots (-1: k and v go to no cache), of which
        the bucket's first entries are read."""
        self.rows = rows
        self._forward, self._caches, self._sampled = forward, caches, sampled
        self._inputs = {name: view[: len(rows.x)] for name, view in inputs.items()}

        def once() -> None:
            self._run_first()
            self._run_after(0)

        capturer.warm_up(once)
        self._first = capturer.capture(self._run_first)
        layers = range(len(caches))
        self._after = [capturer.capture(partial(self._run_after, i)) for i in layers]

    def first(self) -> None:
        """token_ids, source -> x, and layer 0's q, k, v, which also go to their slots."""
        self._first.replay()

    def after(self, layer: int) -> None:
        """attn, x -> x, h, and the next layer's q, k, v where there is one."""
        self._after[layer].replay()

    def _run_first(self) -> None:
        inputs = self._inputs
        self._forward.embed(self.rows, inputs["token_ids"], inputs["source"], self._sampled)
        self._pre(0)

    def _run_after(self, layer: int) -> None:
        self._forward.post_attention(layer, self.rows)
        if layer + 1 < len(self._caches):
            self._pre(layer + 1)

    def _pre(self, layer: int) -> None:
        inputs, cache = self._inputs, self._caches[layer]
        self._forward.pre_attention(layer, self.rows, inputs["positions"], cache, inputs["slots"])
