"""Dense Assist on a device: tensors come from and go to registered host memory, the stage between
is a captured graph of its bucket.

Served at the main stream's boundaries, or on a stream of its own with a higher priority, beside
the main round (`assist.mode`).
"""

# mypy: allow-untyped-calls

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dualpace.graphs.gpu.capture import Capturer
from dualpace.graphs.gpu.forward import Forward, Rows
from dualpace.graphs.gpu.host_memory import HostMemory
from dualpace.graphs.gpu.planned import PackedInputs
from dualpace.graphs.sampling import SamplingRows
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.kv.overlaps import ALL, Overlap
from dualpace.runtime.messages import AssistDone
from dualpace.runtime.order import Decision, OrderLeader
from dualpace.runtime.worker.activations import Activations, logprob_rows, sampling_like
from dualpace.runtime.worker.cuda.events import DeviceEvent, Lately
from dualpace.runtime.worker.edits import logit_edits
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.rows import SamplingArrays

_BUCKETS = (1, 8, 32, 64, 96, 128, 192, 256, 384, 512)
_PAGE = 4096


class AssistGraphs:
    """Post-attention of every layer and post-layer, captured for each bucket over own buffers."""

    def __init__(
        self, forward: Forward, max_rows: int, progress: Callable[[int, int], None]
    ) -> None:
        """`forward` has a workspace of its own: it runs beside the main rounds."""
        self._forward = forward
        self.rows = Rows.empty(forward.spec, max_rows, forward.dtype, forward.device)
        self.buckets = (*(b for b in _BUCKETS if b < max_rows), max_rows)
        sizes = {
            name: (kind, max_rows)
            for name, kind in (
                ("temperature", torch.float32),
                ("top_k", torch.int32),
                ("top_p", torch.float32),
                ("u", torch.float32),
            )
        }
        self._sampling = PackedInputs(sizes, forward.device)
        capturer = Capturer(forward.device)
        self._capturer = capturer  # owns the graphs' memory
        self._layers: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._last: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
        layers = range(forward.spec.num_layers)
        for done, bucket in enumerate(reversed(self.buckets), start=1):
            rows = self.rows.first(bucket)
            capturer.warm_up(partial(self._all, rows))
            self._layers[bucket] = [
                capturer.capture(partial(forward.post_attention, layer, rows)) for layer in layers
            ]
            for name, function in self._final(rows).items():
                self._last[bucket, name] = capturer.capture(function)
            progress(done, len(self.buckets))

    def _final(self, rows: Rows) -> dict[str, Callable[[], object]]:
        forward, how = self._forward, self._how(len(rows.x))
        return {
            "norm": partial(forward.normed, rows, forward.weights.final_norm),
            "greedy": partial(forward.greedy, rows.h, rows.tokens),
            "sample": partial(forward.sample, rows.h, how, rows.tokens),  # nobody asks
        }

    def _how(self, count: int) -> SamplingRows:
        views = {name: view[:count] for name, view in self._sampling.views.items()}
        return SamplingRows(views["temperature"], views["top_k"], views["top_p"], views["u"])

    def _all(self, rows: Rows) -> None:
        self._forward.post_attention(0, rows)
        for function in self._final(rows).values():
            function()

    def bucket(self, num_rows: int) -> int:
        return self.buckets[bisect_left(self.buckets, num_rows)]

    def post_attention(self, layer: int, bucket: int) -> None:
        """attn, x -> x, and h, the norm for what follows."""
        self._layers[bucket][layer].replay()

    def norm(self, bucket: int) -> None:
        """h = the final norm of x."""
        self._last[bucket, "norm"].replay()

    def sample(self, bucket: int, sampling: SamplingArrays) -> Tensor | None:
        """h -> tokens, and what is told to those who ask. Launched where logits are edited or told
        about, for that is no captured work."""
        needs_logits = sampling.needs_logits
        if not needs_logits and not sampling.temperature.any():
            self._last[bucket, "greedy"].replay()
            return None
        arrays = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "u": sampling.uniform,
        }
        self._sampling.send(arrays, idle={"top_p": 1.0})
        self._sampling.sent()
        if not needs_logits:
            self._last[bucket, "sample"].replay()
            return None
        rows, how, device = self.rows.first(bucket), self._how(bucket), self._forward.device
        if sampling.edits is not None:
            how = replace(how, edits=logit_edits(sampling.edits, device))
        if sampling.asking is not None:
            how = replace(how, logprobs=logprob_rows(sampling.asking, device))
        return self._forward.sample(rows.h, how, rows.tokens)


@dataclass(slots=True)
class _Running:
    kind: AssistKind
    layer: int
    rows: int
    epoch: int
    published_s: float
    taken_s: float
    marks: Sequence[DeviceEvent]  # begin, moved in, computed, sampled, moved out


class DeviceAssists:
    """Takes what the CPU worker publishes, queues it, and answers when the device is through."""

    def __init__(
        self,
        link: Link,
        graphs: AssistGraphs,
        dtype: torch.dtype,
        own_stream: bool,
        columns: Sequence[Overlap] = (ALL,),
        order: OrderLeader | None = None,
        lately: Lately | None = None,
    ) -> None:
        """`columns`: where this rank's attention lies among what CPU ranks write. `order`: of the
        other ranks, which have to serve the same assist; then there is no stream of its own.
        `lately`: marked with each assist; None: they are expected at any time."""
        assert not (own_stream and order)
        self._lately = lately
        self._link, self._graphs, self._buffer = link, graphs, link.assist
        self._shared = Activations(link.assist, dtype)
        self._columns = _Columns(self._shared, columns, graphs.rows.attn)
        self._order = order
        memory = torch.frombuffer(link.assist.memory, dtype=torch.uint8)
        self._memory = HostMemory(memory, _PAGE)
        self._tokens: Tensor = torch.from_numpy(link.assist.tokens)
        self._logprobs: Tensor = torch.from_numpy(link.assist.logprobs)
        self._stream = torch.cuda.Stream(priority=-1) if own_stream else None
        self._running: _Running | None = None

    @property
    def must_poll(self) -> bool:
        return self._running is not None

    @property
    def are_expected(self) -> bool:
        return self._lately is None or bool(self._lately)

    def serve(self) -> bool:
        """Queues a ready assist or finishes one that has run; whether it did."""
        if self._running is not None:
            if not self._running.marks[-1].is_done():
                return False
            self._finish(self._running)
            self._running = None
            return True
        taken = self._buffer.take()
        if taken is None:
            return False
        taken_s = time.monotonic()
        if self._lately is not None:
            self._lately.mark()
        kind, layer, rows, _ = taken
        sampling = None if kind == AssistKind.POST_ATTENTION else self._shared.sampling(rows)
        if self._order is not None:
            greedy = sampling is None or not sampling.temperature.any()
            needs_logits = sampling is not None and sampling.needs_logits
            self._order.say(Decision(kind, layer, rows, greedy, needs_logits))
        if self._stream is None:
            marks = self._queue(kind, layer, rows, sampling)
        else:
            with torch.cuda.stream(self._stream):
                marks = self._queue(kind, layer, rows, sampling)
        self._running = _Running(*taken, float(self._buffer.times[0]), taken_s, marks)
        return True

    def follow(self, decision: Decision) -> None:
        """Queues this rank's part of what the first one serves, which answers."""
        kind, rows = AssistKind(decision.kind), decision.rows
        self._move_in(kind, rows)
        self._compute(kind, decision.layer, rows)
        if kind != AssistKind.POST_ATTENTION:
            self._graphs.sample(self._graphs.bucket(rows), sampling_like(decision))

    def _queue(
        self, kind: AssistKind, layer: int, rows: int, sampling: SamplingArrays | None
    ) -> list[DeviceEvent]:
        graphs, shared, mine = self._graphs, self._shared, self._graphs.rows
        marks = [DeviceEvent(timed=True)]
        self._move_in(kind, rows)
        marks.append(DeviceEvent(timed=True))
        self._compute(kind, layer, rows)
        marks.append(DeviceEvent(timed=True))
        told = None
        if sampling is not None:
            told = graphs.sample(graphs.bucket(rows), sampling)
        marks.append(DeviceEvent(timed=True))
        if sampling is None:
            shared.residual[:rows].copy_(mine.x[:rows], non_blocking=True)
        else:
            self._tokens[:rows].copy_(mine.tokens[:rows], non_blocking=True)
        if told is not None:
            self._logprobs[: told.numel()].copy_(told.view(-1), non_blocking=True)
        marks.append(DeviceEvent(timed=True))
        return marks

    def _move_in(self, kind: AssistKind, rows: int) -> None:
        self._graphs.rows.x[:rows].copy_(self._shared.residual[:rows], non_blocking=True)
        if kind != AssistKind.POST_LAYER:
            self._columns.move_in(rows)

    def _compute(self, kind: AssistKind, layer: int, rows: int) -> None:
        bucket = self._graphs.bucket(rows)
        if kind == AssistKind.POST_LAYER:
            self._graphs.norm(bucket)
        else:
            self._graphs.post_attention(layer, bucket)

    def _finish(self, assist: _Running) -> None:
        """Launch is everything between taking the assist and its end that is not on the device."""
        seen_s = time.monotonic()
        self._buffer.finish(assist.epoch, self._link.other_doorbell)
        begin, moved_in, computed, sampled, moved_out = assist.marks
        on_device_s = moved_out.seconds_since(begin)
        self._link.send(
            AssistDone(
                kind_of_assist=assist.kind,
                layer=assist.layer,
                rows=assist.rows,
                wait_s=assist.taken_s - assist.published_s,
                launch_s=max(seen_s - assist.taken_s - on_device_s, 0.0),
                h2d_s=moved_in.seconds_since(begin),
                compute_s=computed.seconds_since(moved_in),
                sampling_s=sampled.seconds_since(computed),
                d2h_s=moved_out.seconds_since(sampled),
                finalize_s=time.monotonic() - seen_s,
            )
        )


class _Columns:
    """This rank's columns of the attention that CPU ranks wrote, on their way to the device.

    What a CPU rank wrote is copied whole, even where only some of it is wanted: a strided copy
    would be gathered by this thread first.
    """

    def __init__(self, shared: Activations, columns: Sequence[Overlap], attn: Tensor) -> None:
        self._attn = attn
        self._parts = [
            (part.own, part.theirs, shared.attention_parts[part.other]) for part in columns
        ]
        (_, _, first), *others = self._parts
        self._is_one = not others and first.shape[1] == attn.shape[1]
        landing = [] if self._is_one else [part for _, _, part in self._parts]
        self._landing = [torch.empty_like(part, device=attn.device) for part in landing]

    def move_in(self, rows: int) -> None:
        """To the first `rows` of attn, on the current stream."""
        attn = self._attn[:rows]
        if self._is_one:
            attn.copy_(self._parts[0][2][:rows], non_blocking=True)
            return
        for (own, theirs, part), landing in zip(self._parts, self._landing, strict=True):
            landing[:rows].copy_(part[:rows], non_blocking=True)
            attn[:, own] = landing[:rows, theirs]
