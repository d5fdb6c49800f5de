"""An engine whose workers are played: everything of it is real but their processes.

A token is what request and position make it, so answers are known and whoever computes them says
the same. A `Fault` says with which batches a worker is lost, and how.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import numpy as np

from dualpace.runtime import messages
from dualpace.runtime.channel import Channel, silence
from dualpace.runtime.engine import group
from dualpace.runtime.engine.engine import LLMEngine
from dualpace.runtime.plan import Plan
from dualpace.runtime.sampling_params import SamplingParams
from dualpace.runtime.submissions import Submission, encode
from dualpace.runtime.types import RowKind
from dualpace.runtime.wire import Message
from dualpace.runtime.worker.rows import edits_of
from dualpace.settings.resolve import resolve
from tests.servers import PATIENCE_S
from tests.tiny_settings import settings

Batch = messages.GpuBatch | messages.CpuBatch
# Of a worker's rank and the batch that it is given: None, an exception's text, an exit status, or
# HELD: it says nothing.
Fault = Callable[["FakeHandle", Batch], str | int | None]
HELD = ""
LayerTimes = dict[str, dict[str, list[tuple[int, float]]]]  # by role and part: size and seconds
# A step is all that costs, so that host rows in lockstep always pay.
STEPS_COST: LayerTimes = {"gpu": {"post_layer": [(1, 1e-3)], "linear": [(1, 1e-9)]}, "cpu": {}}
_HOST_ROWS = (RowKind.HOST_FIRST, RowKind.HOST_SECOND)


def token(request_id: int, position: int) -> int:
    return (7 * request_id + 31 * position) % 500


def answer(request_id: int, prompt_len: int, max_tokens: int) -> list[int]:
    return [token(request_id, prompt_len + i) for i in range(max_tokens)]


def masks_of(batch: Batch) -> list[list[int] | None]:
    """The tokens that each row may draw; None: all."""
    rows = np.arange(len(batch.request_ids))
    edits = edits_of(batch, rows)
    masks: list[list[int] | None] = [None] * len(rows)
    if edits is not None and len(edits.masks):
        masked = edits.rows[edits.masked != 0]
        bits = np.unpackbits(edits.masks.view(np.uint8), bitorder="little").reshape(len(masked), -1)
        for row, mask in zip(masked.tolist(), bits, strict=True):
            masks[row] = np.flatnonzero(mask).tolist()
    return masks


def drawn_by(mask: Sequence[int] | None, wanted: int) -> int:
    """The first token from `wanted` on, and round again, that the mask lets through."""
    if mask is None:
        return wanted
    return next((t for t in mask if t >= wanted), mask[0])


class FakeHandle:
    """A `WorkerHandle` without a process. It computes a batch in the turn of the event loop after
    the one in which it was rung."""

    fault: Fault = staticmethod(lambda handle, batch: None)
    layer_times: LayerTimes
    faulty_starts: Collection[tuple[str, int]] = ()  # (role, how many starts before)
    made: list["FakeHandle"]

    def __init__(
        self,
        role: str,
        rank: int,
        module: str,
        plan_json: str,
        channel: Channel,
        shared_fds: Any,
        on_status: Callable[["FakeHandle", Message], None],
        on_result: Callable[[Message], None],
        on_death: Callable[["FakeHandle", int], None],
    ) -> None:
        self.name = f"{role} worker {rank}"
        self.role, self.rank, self.channel = role, rank, channel
        self.ready = self.has_worked = self.is_running = False
        self.info: dict[str, Any] = {"layer_times": self.layer_times[role]}
        self.pid = 0
        self.num_starts = 0
        self.batches: list[Batch] = []  # taken by this or an earlier process
        self.computed = 0  # number of the last of them that was survived
        self._on_status, self._on_result, self._on_death = on_status, on_result, on_death
        self.made.append(self)

    def start(self) -> None:
        assert not self.is_running
        self.channel.down.reset()
        self.is_running, self.has_worked = True, False
        self.num_starts += 1
        asyncio.get_running_loop().add_reader(self.channel.bell_down, self._rung)
        self._later(self._started)

    def _later(self, work: Callable[..., object], *arguments: object) -> None:
        """Unless this process has ended by then."""
        number = self.num_starts

        def run() -> None:
            if self.is_running and self.num_starts == number:
                work(*arguments)

        asyncio.get_running_loop().call_soon(run)

    def _started(self) -> None:
        if (self.role, self.num_starts - 1) in self.faulty_starts:
            self._on_status(self, messages.Failed("it cannot be loaded", 0))
            self._end(1)
            return
        self.ready = True
        self._on_status(self, messages.Ready(json.dumps(self.info)))

    def _rung(self) -> None:
        silence(self.channel.bell_down)
        for batch in self.channel.down.take():
            self._later(self._compute, batch)

    def post(self, message: Message) -> None:
        self.channel.send_down(message)

    def _compute(self, batch: Batch) -> None:
        self.batches.append(batch)
        fault = self.fault(self, batch)
        if fault == HELD:
            return
        if isinstance(fault, str):
            self.fail(fault)
        elif fault is not None:
            self._end(fault)
        else:
            self.computed = batch.step
            self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        """When the others have that it adds up with, or that attend for it."""
        if any(other.computed < batch.step for other in self._others(batch)):
            self._later(self._finish, batch)
        elif isinstance(batch, messages.CpuBatch):
            self._say(batch, batch.starts + 1)
        elif self.role == "gpu":
            self._say(batch, np.where(batch.sample, batch.starts + batch.num_tokens, -1))
            copies = [*batch.migration_ids, *batch.transfer_ids[batch.transfer_ids >= 0]]
            if copies:
                self._result(messages.TransfersDone(np.array(copies, np.int64)))

    def _others(self, batch: Batch) -> list["FakeHandle"]:
        is_in_lockstep = (
            isinstance(batch, messages.GpuBatch) and np.isin(batch.kinds, _HOST_ROWS).any()
        )
        roles = ("gpu", "cpu") if is_in_lockstep and self.role == "gpu" else (self.role,)
        return [h for h in self.made if h.role in roles and (h.rank or h.role != self.role)]

    def fail(self, text: str) -> None:
        """It meets an exception."""
        self._on_status(self, messages.Failed(f"the {self.role} worker failed: {text}", 0))
        self._end(1)

    def answer_twice(self, batch: Batch) -> None:
        """As no worker does."""
        self._later(self._say, batch, batch.starts)

    def check(self, blocks: int, transfer_id: int = 0, difference: str = "") -> None:
        self._result(messages.MovesChecked(blocks, transfer_id, difference))

    def drop(self, batch: Batch) -> None:
        self._result(messages.StepDropped(batch.step))

    def _say(self, batch: Batch, positions: Any) -> None:
        rows = zip(batch.request_ids.tolist(), positions.tolist(), masks_of(batch), strict=True)
        drawn = [drawn_by(mask, token(i, at)) if at >= 0 else -1 for i, at, mask in rows]
        tokens = np.array(drawn, np.int32)
        if self.rank == 0:  # it speaks for all
            self._result(messages.StepDone(batch.step, 0.0, 0.0, tokens, 0))

    def _result(self, message: Message) -> None:
        self.has_worked = True
        self._on_result(message)

    def kill(self) -> None:
        if self.is_running:
            self._later(self._end, -9)

    def _end(self, status: int) -> None:
        if self.is_running:
            self.is_running = self.ready = False
            asyncio.get_running_loop().remove_reader(self.channel.bell_down)
            self._on_death(self, status)

    def close(self) -> None:
        self.is_running = self.ready = False


class Engine(LLMEngine):
    """With what it says to its owner, by request."""

    def __init__(self, plan: Plan, **more: Any) -> None:
        self.refused: dict[int, tuple[str, str]] = {}
        self.handles: list[FakeHandle] = []
        self.answers: dict[int, list[int]] = {}
        self.given_up: list[int] = []
        self.left: set[int] = set()  # without their end
        self.said: list[Message] = []
        real, group.WorkerHandle = group.WorkerHandle, FakeHandle  # type: ignore[misc, assignment]
        FakeHandle.made = self.handles
        try:
            super().__init__(plan, self._hear, **more)
        finally:
            group.WorkerHandle = real  # type: ignore[misc]

    def _hear(self, message: Message) -> None:
        self.said.append(message)
        match message:
            case messages.Tokens():
                ends = message.finished.tolist()
                made = zip(message.request_ids.tolist(), message.tokens.tolist(), ends, strict=True)
                for request_id, one, end in made:
                    assert request_id not in self.given_up
                    self.answers[request_id].append(one)
                    self.left -= {request_id} if end else set()
            case messages.GivenUp():
                self.given_up.append(message.request_id)
                self.left.discard(message.request_id)
            case messages.Refused():
                self.refused[message.request_id] = message.text, message.param
                self.left.discard(message.request_id)

    def handle(self, role: str, rank: int = 0) -> FakeHandle:
        (found,) = [h for h in self.handles if (h.role, h.rank) == (role, rank)]
        return found

    def ask(
        self, ids: Sequence[int], prompt_len: int = 20, max_tokens: int = 12, **asked: Any
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True, **asked)
        self.left |= set(ids)
        self.answers |= {i: [] for i in ids}
        self.on_message(encode([Submission(i, 0.0, [1] * prompt_len, params) for i in ids]))

    def cancel(self, request_id: int) -> None:
        self.left.discard(request_id)
        self.on_message(messages.Cancel(np.array([request_id], np.int64)))

    def close(self) -> None:
        """Gives back what a process of its own would leave to its end."""
        pair = self._workers
        for region in (pair._host_pool, pair._assist_region, getattr(pair, "_lockstep", None)):
            if region is not None:
                region.close()
        for handle in self.handles:
            handle.channel.close()
            del handle.channel  # the largest part; the rest is garbage in circles

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0)

    async def until_answered(self) -> None:
        await self.until(lambda: not self.left)

    async def until_idle(self) -> None:
        """Every copy has ended, and every block has come back."""
        while not self._state.idle:
            await asyncio.sleep(0)
        self._state.check()
        assert self._state.gpu_pool.num_used == self._state.host_pool.num_used == 0

    @property
    def rounds_lost(self) -> int:
        return sum(self._stats.rounds_lost.values())

    @property
    def restarts(self) -> list[int]:
        return [self._workers.gpu.restarts, self._workers.cpu.restarts]

    @property
    def failure(self) -> str:
        """Why it has ended, once it has."""
        return next((m.text for m in self.said if isinstance(m, messages.Failed)), "")


def play(
    story: Callable[[Engine], Awaitable[None]],
    *overrides: str,
    fault: Fault = lambda handle, batch: None,
    faulty_starts: Collection[tuple[str, int]] = (),
    layer_times: LayerTimes = STEPS_COST,
    **more: Any,
) -> Engine:
    """Runs an engine with that plan and `more`, and `story` beside it until either ends. The host
    takes whoever fits, unless overrides say otherwise."""
    pools = ("kv.gpu_blocks=12", "kv.host_blocks=64")
    rows = ("gpu.max_batch_size=32", "cpu.max_batch_size=32")  # more would make large mailboxes
    host = "policy.host_admission=always"
    plan = resolve(settings("gpu.device=cpu", *pools, *rows, host, *overrides))

    async def run() -> Engine:
        FakeHandle.layer_times = layer_times
        engine = Engine(plan, **more)
        FakeHandle.fault, FakeHandle.faulty_starts = staticmethod(fault), faulty_starts
        serving = asyncio.create_task(engine.run())
        telling = asyncio.create_task(story(engine))  # type: ignore[arg-type]
        await asyncio.wait({serving, telling}, return_when=asyncio.FIRST_COMPLETED)
        if telling.done():
            telling.result()
            engine.end()
        telling.cancel()
        await serving
        engine.close()
        return engine

    return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
