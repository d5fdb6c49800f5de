"""Main rounds on a device. Launching runs ahead of the device; tokens are read when they arrive.

Decodes alone replay a captured step; with prompts a round is launched kernel by kernel, its dense
stages once over all rows. A round scheduled ahead takes tokens that the host has not seen from the
device's own table.
"""

# mypy: allow-untyped-calls

import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualpace.graphs.gpu.attention import Decode, Prefill
from dualpace.graphs.gpu.forward import Rows
from dualpace.graphs.gpu.planned import PackedInputs
from dualpace.graphs.logit_edits import LogitEdits
from dualpace.graphs.logprobs import LogprobRows
from dualpace.graphs.sampling import SamplingRows
from dualpace.runtime.logprobs import num_words
from dualpace.runtime.messages import Edits, GpuBatch, StepDone
from dualpace.runtime.sampling_params import MAX_LOGPROBS
from dualpace.runtime.worker.activations import logprob_rows
from dualpace.runtime.worker.copies import Event
from dualpace.runtime.worker.cuda import batches
from dualpace.runtime.worker.cuda.compiles import Compiles
from dualpace.runtime.worker.cuda.events import DeviceClock, DeviceEvent, Lately, Lead
from dualpace.runtime.worker.cuda.model import DeviceModel, second_kv
from dualpace.runtime.worker.cuda.transfers import DeviceTransfers, WriteOut
from dualpace.runtime.worker.drawn import NOTHING, HostDrawn, host_drawn
from dualpace.runtime.worker.edits import logit_edits
from dualpace.runtime.worker.rows import Asking, GpuWork, Int32, Int64, gpu_work

_READS = 4  # pinned buffers for tokens on their way to the host
_LAST = 4  # stage tasks that are queued at once at a round's end

Tasks = Iterator[list[Event]]
Sampling = Generator[list[Event], None, Tensor | None]
"""Tasks that end with what is told of the sampled tokens."""


@dataclass(slots=True)
class Launched:
    """A round that the device has or will have run."""

    step: int
    num_rows: int
    sampled_rows: Int64
    launched_s: float
    was_idle: bool
    start: DeviceEvent | None = None
    end: DeviceEvent | None = None
    tokens: Tensor | None = None  # pinned int32 [S]
    asking: Asking | None = None
    logprobs: Tensor | None = None  # pinned int32 [Q, P]
    copies: list[tuple[int, list[DeviceEvent]]] | None = None  # Prefill-to-CPU: transfer, events


class DeviceRounds:
    """Runs batches in order. `boundaries`: decodes too stage by stage. `ahead`: stage tasks queued
    behind the one on the device at most, where `lately` is given only while it is true; None: as
    far as there are batches.
    """

    def __init__(
        self,
        model: DeviceModel,
        transfers: DeviceTransfers,
        write_out: WriteOut | None,
        compiles: Compiles,
        boundaries: bool,
        ahead: int | None = None,
        lately: Lately | None = None,
    ) -> None:
        self.model, self._transfers, self._write_out = model, transfers, write_out
        self._compiles = compiles
        self._boundaries = boundaries
        self._lead = None if ahead is None else Lead(ahead, _LAST)
        self._lately = lately
        self._clock = DeviceClock()
        self._launched: deque[Launched] = deque()
        self._index: dict[int, int] = {}  # request -> its entry of `model.sampled`
        device, rows = model.forward.device, len(model.rows.x)
        self._kv_rows = (model.rows, second_kv(model.rows))
        limit = len(model.sampled)
        self.inputs = PackedInputs(
            {
                "token_ids": (torch.int64, rows),
                "positions": (torch.int64, rows),
                "slots": (torch.int64, rows),
                "source": (torch.int32, rows),
                "last_tokens": (torch.int64, limit),
                "temperature": (torch.float32, limit),
                "top_k": (torch.int32, limit),
                "top_p": (torch.float32, limit),
                "u": (torch.float32, limit),
                "host_blocks": (torch.int32, rows // 16 + 4 * limit),
            },
            device,
        )
        self._prefills = _Prefills(model)
        words = limit * (1 + num_words(MAX_LOGPROBS))
        self._reads = deque(
            torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(_READS)
        )

    # ---- what the worker asks

    def ready(self) -> None:
        self._compiles.ready()

    @property
    def must_poll(self) -> bool:
        return bool(self._launched)

    def take_finished(self) -> list[StepDone]:
        """Rounds whose tokens have arrived, in order; their copies are tracked from now on."""
        done = []
        while self._launched and _has_ended(self._launched[0]):
            done.append(self._finish(self._launched.popleft()))
        return done

    def _finish(self, round: Launched) -> StepDone:
        drawn = _drawn(round)
        started_s, duration_s = round.launched_s, 0.0
        if round.start is not None and round.end is not None:
            started_s, duration_s = self._clock.interval(
                round.launched_s, round.was_idle, round.start, round.end
            )
        for transfer_id, events in round.copies or ():
            self._transfers.track(transfer_id, events)
        tokens, compiles = drawn.tokens, self._compiles.after_ready
        told = drawn.asking, drawn.logprobs
        return StepDone(round.step, started_s, duration_s, tokens, compiles, *told)

    def tasks(self, batch: GpuBatch) -> Tasks:
        """Queues the batch; each step one stage task, or everything where nobody asks between."""
        work = gpu_work(batch)
        round = self.launch(batch, work.sampled_rows)
        if not work.num_rows:
            return
        if work.num_decodes == work.num_rows:
            told = yield from self._decode(round, work)
        else:
            told = yield from self._mixed(round, work)
        self.end(round, work.sampled_ids, work.sampling.asking, told)

    # ---- parts of a round, also for those that carry host rows (`lockstep`)

    def launch(self, batch: GpuBatch, sampled_rows: Int64) -> Launched:
        """Starts the batch's swaps."""
        launched_s = time.monotonic()
        was_idle = not self._launched or _has_ended(self._launched[-1])
        round = Launched(batch.step, len(batch.kinds), sampled_rows, launched_s, was_idle)
        self._launched.append(round)
        self._transfers.start_migrations(batch)
        return round

    def sources(self, work: GpuWork) -> Int32:
        """Entries of `model.sampled` that hold tokens which the host has not seen, else -1."""
        return batches.sources(work, self._index)

    def attention(self, work: GpuWork) -> "OwnAttention":
        """Plans it for all layers."""
        model = self.model
        bucket = model.bucket(max(work.num_decodes, 1))
        decode = model.attends[bucket]
        if work.num_decodes:
            decode.plan(batches.paged_decodes(work.decodes, bucket))
        prefills = self._prefills.plan(work)
        return OwnAttention(model, decode if work.num_decodes else None, bucket, prefills)

    def by_turn(self, work: GpuWork, count: int) -> list[Rows]:
        """The rows of even and of odd layers, which differ where copies may still read K and V."""
        even, odd = (rows.first(count) for rows in self._kv_rows)
        return [even, odd if work.host_prompts else even]

    def pre_attention(self, layer: int, rows: Rows, work: GpuWork) -> None:
        """h -> q, k, v; those that stay go to the pool, those of host prompts on their way."""
        count, views = len(rows.x), self.inputs.views
        if work.host_prompts:
            assert self._write_out is not None
            self._write_out.before_layer(layer)
        self.model.forward.pre_attention(
            layer,
            rows,
            views["positions"][:count],
            self.model.caches[layer],
            views["slots"][:count],
        )

    def write_out(self, layer: int, rows: Rows, work: GpuWork, round: Launched) -> None:
        """Starts the copies of the layer's k and v to the host."""
        if not work.host_prompts:
            return
        assert self._write_out is not None
        blocks = self.inputs.views["host_blocks"]
        last = self._write_out.layer(layer, rows.k, rows.v, blocks, work.host_prompts)
        round.copies = [(prompt.transfer_id, [last]) for prompt in work.host_prompts]

    def send(self, arrays: Mapping[str, np.ndarray]) -> None:
        """A mixed round's arrays, by the names of the device's buffers."""
        if self._write_out is not None:
            self._write_out.before_round()
        self.inputs.send(arrays, idle=batches.IDLE)
        self.inputs.sent()

    def sample(
        self, h: Tensor, greedy: bool, edits: Edits | None, asking: Asking | None
    ) -> Tensor | None:
        """Final-normed h -> `model.sampled`, by the sampling arrays that were sent; returns the
        log-probabilities of those who are asking."""
        tokens = self.model.sampled[: len(h)]
        if greedy and edits is None and asking is None:
            self.model.forward.greedy(h, tokens)
            return None
        views = {name: view[: len(h)] for name, view in self.inputs.views.items()}
        parts = (views["temperature"], views["top_k"], views["top_p"], views["u"])
        how = SamplingRows(*parts, edits=self._edits(edits), logprobs=self._asking(asking))
        return self.model.forward.sample(h, how, tokens)

    def _edits(self, edits: Edits | None) -> LogitEdits | None:
        return None if edits is None else logit_edits(edits, self.model.forward.device)

    def _asking(self, asking: Asking | None) -> LogprobRows | None:
        return None if asking is None else logprob_rows(asking, self.model.forward.device)

    def end(
        self, round: Launched, sampled_ids: Int64, asking: Asking | None, told: Tensor | None
    ) -> None:
        """Tokens start for the host, and what is told of them."""
        if len(sampled_ids):
            self._index = batches.index_of(sampled_ids)
            round.asking = asking
            self._read(round, told)
        round.end = DeviceEvent(timed=True)

    # ---- rounds

    def _decode(self, round: Launched, work: GpuWork) -> Sampling:
        model = self.model
        bucket = model.bucket(work.num_rows)
        graphs = model.decodes[bucket]
        graphs.begin(batches.decode_batch(work, self.sources(work), bucket))
        round.start = DeviceEvent(timed=True)
        if self._boundaries:
            graphs.pre_layer()
            for index in range(graphs.num_segments):
                graphs.segment(index)
                yield self._boundary(graphs.num_segments - 1 - index)
        else:
            graphs.whole()
            yield []
        sampling = work.sampling
        return graphs.post_layer(
            self._edits(sampling.edits), self._asking(sampling.asking)
        ).logprobs

    def _mixed(self, round: Launched, work: GpuWork) -> Sampling:
        model, views = self.model, self.inputs.views
        count, num_layers = len(work.token_ids), len(model.caches)
        self.send(batches.mixed_arrays(work, self.sources(work)))
        attention = self.attention(work)
        by_turn = self.by_turn(work, count)
        round.copies = []
        round.start = DeviceEvent(timed=True)
        model.forward.embed(
            by_turn[0], views["token_ids"][:count], views["source"][:count], model.sampled
        )
        for layer in range(num_layers):
            rows = by_turn[layer % 2]
            self.pre_attention(layer, rows, work)
            self.write_out(layer, rows, work, round)
            attention.run(layer, rows)
            model.forward.post_attention(layer, rows)
            yield self._boundary(num_layers - 1 - layer)
        sampled = len(work.sampled_rows)
        if not sampled:
            return None
        h = by_turn[0].h.index_select(0, views["last_tokens"][:sampled])
        how = work.sampling
        return self.sample(h, not how.temperature.any(), how.edits, how.asking)

    def _read(self, round: Launched, told: Tensor | None) -> None:
        """Starts both for the host; the buffer is used again when `_READS` rounds have passed."""
        count = len(round.sampled_rows)
        self._reads.rotate(1)
        round.tokens, rest = self._reads[0][:count], self._reads[0][count:]
        round.tokens.copy_(self.model.sampled[:count], non_blocking=True)
        if told is not None:
            round.logprobs = rest[: told.numel()].view(told.shape)
            round.logprobs.copy_(told, non_blocking=True)

    def _boundary(self, tasks_left: int) -> list[Event]:
        """What must have ended before the next task may be queued."""
        if self._lead is None or (self._lately is not None and not self._lately):
            return []
        return [*self._lead.blockers(tasks_left)]


class OwnAttention:
    """Attention of a batch's own rows, planned for all layers."""

    def __init__(
        self,
        model: DeviceModel,
        decode: Decode | None,
        bucket: int,
        prefills: Sequence[tuple[int, int, Prefill]],
    ) -> None:
        self._model, self._decode, self._bucket, self._prefills = model, decode, bucket, prefills

    def run(self, layer: int, rows: Rows) -> None:
        """q, k, v -> attn. Padding rows of decodes write beyond them, before others do."""
        model, bucket = self._model, self._bucket
        cache, q = model.caches[layer], model.rows.q
        attn = model.rows.attn.view_as(q)
        if self._decode is not None:
            self._decode.run(q[:bucket], cache, attn[:bucket])
        for first, end, prefill in self._prefills:
            part = slice(first, end)
            prefill.run(q[part], rows.k[part], rows.v[part], attn[part], cache)


class _Prefills:
    """Attention of prompts, planned from pinned memory that an earlier round may still read: two
    of each kind take turns, each guarded by an event.
    """

    def __init__(self, model: DeviceModel) -> None:
        self._turns: dict[bool, deque[tuple[Prefill, list[DeviceEvent]]]] = {
            later: deque((model.maker.prefill(), []) for _ in range(2)) for later in (False, True)
        }

    def plan(self, work: GpuWork) -> list[tuple[int, int, Prefill]]:
        """(first token, end, attention) of each stretch of prompts."""
        planned = []
        for later, prompts in batches.same_kind([*work.hbm_prompts, *work.host_prompts]):
            turns = self._turns[later]
            turns.rotate(1)
            prefill, reader = turns[0]
            for event in reader:
                event.wait()  # two rounds ago: nearly never
            lens = [prompt.num_tokens for prompt in prompts]
            prefill.plan(lens, batches.paged_prompts(prompts) if later else None)
            reader[:] = [DeviceEvent()]
            planned.append((prompts[0].first, prompts[-1].first + lens[-1], prefill))
        return planned


def _drawn(round: Launched) -> HostDrawn:
    """By row of the message, once it has ended."""
    rows, tokens, told = round.sampled_rows, round.tokens, round.logprobs
    if tokens is None:
        return NOTHING.among(round.num_rows, rows)
    words = None if told is None else told.numpy()
    return host_drawn(tokens.numpy(), round.asking, words).among(round.num_rows, rows)


def _has_ended(round: Launched) -> bool:
    """Rounds that are still being queued have no end yet."""
    return not round.num_rows or (round.end is not None and round.end.is_done())
