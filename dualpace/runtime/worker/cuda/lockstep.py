"""Rounds that carry host rows in lockstep (NEO, paper 3.1, Figure 4), on a device.

Sub-batch 0 travels with the prompts and the HBM-resident decodes, sub-batch 1 by itself. A layer's
q, k and v of host rows go to shared memory on a stream of their own, which then says so to the CPU
worker; another stream waits for its answer and brings attention back. So a whole round is queued at
once, and while the CPU attends to one sub-batch the main stream works for the other.
"""

# mypy: allow-untyped-calls

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualpace.graphs.gpu.capture import Capturer, LinearGraphs
from dualpace.graphs.gpu.forward import Rows
from dualpace.graphs.gpu.host_memory import HostMemory
from dualpace.graphs.gpu.planned import PackedInputs
from dualpace.graphs.gpu.stream_copies import StreamCopies
from dualpace.graphs.gpu.stream_words import StreamWords
from dualpace.runtime.lockstep import tag
from dualpace.runtime.messages import GpuBatch, StepDone
from dualpace.runtime.worker.cuda import batches
from dualpace.runtime.worker.cuda.events import DeviceEvent
from dualpace.runtime.worker.cuda.model import DeviceModel
from dualpace.runtime.worker.cuda.rounds import DeviceRounds, Launched, OwnAttention, Tasks
from dualpace.runtime.worker.exchange import Exchange
from dualpace.runtime.worker.rows import (
    CpuWork,
    GpuWork,
    asking_of,
    edits_of,
    gpu_work,
    host_work,
    num_own_rows,
)

_PAGE = 4096
_HOST_BUCKETS = (1, 8, 16, 32, 64, 128, 256)  # of sub-batch 1, of those there are


class HostLink:
    """The way of a sub-batch's activations: out behind the main stream, attention back."""

    def __init__(self, exchange: Exchange, words: StreamWords, num_layers: int) -> None:
        buffer = exchange.buffer
        memory = torch.frombuffer(buffer.memory, dtype=torch.uint8)
        self._registered = HostMemory(memory, _PAGE)
        self._exchange, self._words, self._num_layers = exchange, words, num_layers
        start = memory.data_ptr()
        self._asked = [start + ranks[exchange.rank] for ranks in buffer.asked_at]
        self._answered = [
            [start + ranks[host] for host in exchange.hosts] for ranks in buffer.answered_at
        ]
        self._copies = StreamCopies()
        self._out, self._in = torch.cuda.Stream(), torch.cuda.Stream()

    def ask(self, place: int, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """What the main stream has been given so far computes q [B, N, D], k and v [B, K, D]."""
        self._copy_out(place, q, k, v)
        self._words.write(self._out, self._asked[place], tag(step, layer, self._num_layers))

    def bring(
        self, place: int, step: int, layer: int, attn: Tensor, after: DeviceEvent | None = None
    ) -> DeviceEvent:
        """The CPU's attention of the layer, [B, N * D], to `attn` once `after` has passed; returns
        the event of its arrival."""
        if after is not None:
            after.holds(self._in)
        for word in self._answered[place]:
            self._words.wait(self._in, word, tag(step, layer, self._num_layers))
        self._copy_in(place, attn)
        return DeviceEvent(self._in)

    def _copy_out(self, place: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        exchange = self._exchange
        assert len(q) <= self.max_rows
        DeviceEvent().holds(self._out)
        for shared, part in ((exchange.q, q), (exchange.k, k), (exchange.v, v)):
            self._copies.out(self._out, shared[place].data_ptr(), part)

    def _copy_in(self, place: int, attn: Tensor) -> None:
        self._copies.into(self._in, attn, self._exchange.out[place].data_ptr())

    @property
    def max_rows(self) -> int:
        return self._exchange.buffer.layout.max_rows

    def round_trip(self, rows: Rows) -> None:
        """The copies of one layer, for timing; asks nobody and waits for nobody."""
        main = torch.cuda.current_stream()
        self._copy_out(0, rows.q, rows.k, rows.v)
        DeviceEvent(self._out).holds(self._in)
        self._copy_in(0, rows.attn)
        DeviceEvent(self._in).holds(main)


@dataclass(slots=True)
class Lane:
    """What a sub-batch's dense work needs: rows, input buffers, graphs by bucket."""

    rows: Rows
    inputs: PackedInputs
    graphs: Mapping[int, LinearGraphs]

    def graphs_for(self, num_rows: int) -> LinearGraphs | None:
        """Those of the smallest bucket that holds so many."""
        bucket = min((b for b in self.graphs if b >= num_rows), default=None)
        return None if bucket is None else self.graphs[bucket]

    def send(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.inputs.send(arrays, idle=batches.IDLE)
        self.inputs.sent()


def make_lanes(
    model: DeviceModel,
    inputs: PackedInputs,
    max_host_rows: int,
    progress: Callable[[int, int], None],
) -> tuple[Lane, Lane]:
    """Captures the dense work of both sub-batches: over the model's own rows and `inputs` for
    every bucket, and over new ones for up to `max_host_rows`.
    """
    forward, device = model.forward, model.forward.device
    rows = Rows.empty(forward.spec, max_host_rows, forward.dtype, device)
    kinds = {name: inputs.views[name].dtype for name in ("token_ids", "source", "positions")}
    kinds["slots"] = torch.int64
    own = PackedInputs({name: (kind, max_host_rows) for name, kind in kinds.items()}, device)
    few = [b for b in model.buckets if b in _HOST_BUCKETS and b < max_host_rows]
    wanted = [
        *((model.rows, inputs, bucket) for bucket in model.buckets),
        *((rows, own, bucket) for bucket in (*few, max_host_rows)),
    ]
    capturer = Capturer(device)
    graphs: dict[int, dict[int, LinearGraphs]] = {id(inputs): {}, id(own): {}}
    for done, (all_rows, feed, bucket) in enumerate(reversed(wanted), start=1):
        graphs[id(feed)][bucket] = LinearGraphs(
            forward, model.caches, all_rows.first(bucket), feed.views, model.sampled, capturer
        )
        progress(done, len(wanted))
    first, second = graphs[id(inputs)], graphs[id(own)]
    return Lane(model.rows, inputs, first), Lane(rows, own, second)


class PairedRounds:
    """A device's rounds, some of which carry host rows."""

    def __init__(self, rounds: DeviceRounds, first: Lane, second: Lane, link: HostLink) -> None:
        """`first` shares rows and inputs with `rounds`."""
        self._rounds, self._first, self._second, self._link = rounds, first, second, link
        self.model = rounds.model

    def ready(self) -> None:
        self._rounds.ready()

    @property
    def must_poll(self) -> bool:
        return self._rounds.must_poll

    def take_finished(self) -> list[StepDone]:
        return self._rounds.take_finished()

    def tasks(self, batch: GpuBatch) -> Tasks:
        """A batch without host rows runs as ever."""
        if num_own_rows(batch) == len(batch.kinds):
            return self._rounds.tasks(batch)
        return self._paired(batch)

    def _paired(self, batch: GpuBatch) -> Tasks:
        rounds, work, (host, other) = self._rounds, gpu_work(batch), host_work(batch)
        host_rows = np.arange(work.num_rows, len(batch.kinds))
        round = rounds.launch(batch, np.concatenate([work.sampled_rows, host_rows]))
        round.copies = []
        arrays, others = batches.paired_arrays(work, rounds.sources(work), host, other)
        rounds.send(arrays)
        self._second.send(others)
        pipeline = _Pipeline(
            link=self._link,
            step=batch.step,
            num_layers=len(self.model.caches),
            attention=rounds.attention(work),
            first=self._dense(work, host, round),
            host=slice(len(work.token_ids), len(work.token_ids) + len(host)),
            second=self._second.graphs_for(len(other)) if len(other) else None,
            others=slice(0, len(other)),
        )
        round.start = DeviceEvent(timed=True)
        yield from pipeline.run()
        last_tokens = rounds.inputs.views["last_tokens"][: len(arrays["last_tokens"])]
        h = pipeline.h_of(last_tokens)
        rows = round.sampled_rows
        asking = asking_of(batch.logprobs, rows)
        told = rounds.sample(h, not arrays["temperature"].any(), edits_of(batch, rows), asking)
        ids = np.concatenate([work.sampled_ids, batch.request_ids[work.num_rows :]])
        rounds.end(round, ids, asking, told)

    def _dense(self, work: GpuWork, host: CpuWork, round: Launched) -> "_Captured | _Launching":
        """Captured where no prompt is among the rows and a bucket holds them."""
        count = len(work.token_ids) + len(host)
        graphs = self._first.graphs_for(count)
        if graphs is None or work.num_decodes < work.num_rows:
            return _Launching(self._rounds, work, round, count)
        return _Captured(graphs)


@dataclass(slots=True)
class _Pipeline:
    """One round's layers. What it queues is also a valid order of doing it all one by one, so
    streams that share a queue of the device may delay one another and never wait in a ring.
    """

    link: HostLink
    step: int
    num_layers: int
    attention: OwnAttention
    first: "_Captured | _Launching"
    host: slice  # host rows of sub-batch 0 among its rows
    second: LinearGraphs | None
    others: slice  # rows of sub-batch 1

    def run(self) -> Tasks:
        """A layer a task."""
        self.first.start()
        for layer in range(self.num_layers):
            rows = self.first.rows(layer)
            self._ask(0, layer, rows, self.host)
            self.attention.run(layer, rows)
            # Padding rows of its decodes have written where the host rows' attention will lie.
            attended = DeviceEvent()
            if self.second is not None:
                if layer == 0:
                    self.second.first()
                else:
                    self._after_second(layer - 1)
                self._ask(1, layer, self.second.rows, self.others)
            self._bring(0, layer, rows, self.host, attended)
            self.first.after(layer)
            yield []
        if self.second is not None:
            self._after_second(self.num_layers - 1)

    def _after_second(self, layer: int) -> None:
        assert self.second is not None
        self._bring(1, layer, self.second.rows, self.others)
        self.second.after(layer)

    def _ask(self, place: int, layer: int, rows: Rows, part: slice) -> None:
        if part.start < part.stop:
            self.link.ask(place, self.step, layer, rows.q[part], rows.k[part], rows.v[part])

    def _bring(
        self, place: int, layer: int, rows: Rows, part: slice, after: DeviceEvent | None = None
    ) -> None:
        """Holds the main stream until attention is there."""
        if part.start < part.stop:
            event = self.link.bring(place, self.step, layer, rows.attn[part], after)
            event.holds(torch.cuda.current_stream())

    def h_of(self, last_tokens: Tensor) -> Tensor:
        """What is sampled: those of sub-batch 0, then all of sub-batch 1."""
        h = self.first.h.index_select(0, last_tokens)
        return h if self.second is None else torch.cat([h, self.second.rows.h[self.others]])


class _Captured:
    """Sub-batch 0 without prompts: graphs of its bucket."""

    def __init__(self, graphs: LinearGraphs) -> None:
        self._graphs = graphs
        self.h = graphs.rows.h

    def rows(self, layer: int) -> Rows:
        return self._graphs.rows

    def start(self) -> None:
        self._graphs.first()

    def after(self, layer: int) -> None:
        self._graphs.after(layer)


class _Launching:
    """Sub-batch 0 with prompts: kernel by kernel, over all rows."""

    def __init__(self, rounds: DeviceRounds, work: GpuWork, round: Launched, count: int) -> None:
        self._rounds, self._work, self._round = rounds, work, round
        self._by_turn = rounds.by_turn(work, count)
        self.h = self._by_turn[0].h

    def rows(self, layer: int) -> Rows:
        return self._by_turn[layer % 2]

    def start(self) -> None:
        rows, model, views = self._by_turn[0], self._rounds.model, self._rounds.inputs.views
        count = len(rows.x)
        model.forward.embed(
            rows, views["token_ids"][:count], views["source"][:count], model.sampled
        )
        self._pre(0)

    def after(self, layer: int) -> None:
        self._rounds.model.forward.post_attention(layer, self.rows(layer))
        if layer + 1 < len(self._rounds.model.caches):
            self._pre(layer + 1)

    def _pre(self, layer: int) -> None:
        rows = self.rows(layer)
        self._rounds.pre_attention(layer, rows, self._work)
        self._rounds.write_out(layer, rows, self._work, self._round)
