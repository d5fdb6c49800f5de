"""LLMEngine: two loops that share request state and no barrier (paper section 5).

    gpu_loop   round -> submit -> await -> apply    the waiting and the HBM-resident
    cpu_loop   round -> submit -> await -> apply    the host-resident
    completion_loop                                 hands each round's tokens to the owner

Decisions are `schedule.State`'s, computing is the workers'. A loop sleeps until something changed:
a result, a transfer, an arrival, a cancel, or what the other loop did to the pools.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from dualpace.runtime import messages, submissions
from dualpace.runtime.engine.assisting import Assisting
from dualpace.runtime.engine.batches import cpu_batch, gpu_batch
from dualpace.runtime.engine.conversations import Conversation, open_conversation
from dualpace.runtime.engine.forms import Forms
from dualpace.runtime.engine.logs import RequestLog, RoundLog, lost_rounds
from dualpace.runtime.engine.milestones import first_scheduled, prompt_tokens
from dualpace.runtime.engine.openings import Openings
from dualpace.runtime.engine.pair import WorkerPair
from dualpace.runtime.engine.results import take_tokens
from dualpace.runtime.engine.scheduler import make_learner, make_state
from dualpace.runtime.engine.stats import EngineStats
from dualpace.runtime.engine.trials import forms_by_trial
from dualpace.runtime.plan import ModelPlan, Plan
from dualpace.runtime.routing import Route
from dualpace.runtime.schedule.limits import RequestTooLong
from dualpace.runtime.schedule.log import round_record
from dualpace.runtime.schedule.loss import remains
from dualpace.runtime.schedule.rounds import Applied, CpuStep, GpuStep, Row
from dualpace.runtime.schedule.state import State
from dualpace.runtime.types import ENGINES, Owner
from dualpace.runtime.wire import Message
from dualpace.runtime.wiring import MAX_STEPS_IN_FLIGHT

log = logging.getLogger(__name__)


class LLMEngine:
    """`send` tells the owner, `pair` makes the workers; `run` returns when the engine has ended."""

    def __init__(
        self,
        plan: Plan,
        send: Callable[[Message], None],
        pair: Callable[..., WorkerPair] = WorkerPair,
        forms: Callable[[ModelPlan], Forms] = forms_by_trial,
    ) -> None:
        self._plan = plan
        self._eos = frozenset(plan.model.eos_token_ids)
        self._send = send
        self._start_s = time.monotonic()
        self._learner = make_learner(plan)
        self._state: State = make_state(plan, self._learner)
        self._assisting = Assisting(plan.assist, self._state)
        self._conversations: dict[int, Conversation] = {}
        self._openings = Openings(forms(plan.model), self._admit, self._refuse)
        self._round_log = RoundLog(plan.runtime.round_log)
        self._request_log = RequestLog(plan.runtime.request_log)
        self._stats = EngineStats()
        self._workers = pair(plan, self._on_worker_message, self._on_worker_loss)
        self._gpu_steps: deque[GpuStep] = deque()  # in flight, oldest first
        self._cpu_step: CpuStep | None = None
        self._cpu_route = Route.FULL_CPU
        self._gpu_changed = asyncio.Event()
        self._cpu_changed = asyncio.Event()
        self._completions: asyncio.Queue[Message] = asyncio.Queue()
        self._accepting = True
        self._all_done = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: str | None = None

    # ---- life

    async def run(self) -> int:
        """Starts the workers, serves until shut down, and returns the exit status."""
        loops: list[asyncio.Task[None]] = []
        asyncio.get_running_loop().set_exception_handler(self._callback_failed)
        try:
            await self._workers.start(self._ended)
            loops = [
                asyncio.create_task(self._gpu_loop(), name="gpu_loop"),
                asyncio.create_task(self._cpu_loop(), name="cpu_loop"),
                asyncio.create_task(self._completion_loop(), name="completion_loop"),
            ]
            for task in loops:
                task.add_done_callback(self._loop_ended)
            await self._ended.wait()
        finally:
            for task in loops:
                task.cancel()
            self._openings.close()
            await self._workers.close()
            for left in self._conversations.values():
                self._request_log.write(left.request, left.num_output, cancelled=True)
            self._request_log.close()
            self._round_log.flush()
        if self._failure:
            self._send(messages.Failed(self._failure, 0))
        return 1 if self._failure else 0

    def end(self) -> None:
        """The owner is gone, or all is done."""
        self._ended.set()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._ended.set()

    def _loop_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            self._engine_failed(task.get_name(), error)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Nobody awaits what a message does; asyncio alone would log it and wait for ever."""
        if context.keys() & {"handle", "protocol"} and "exception" in context:
            self._engine_failed("a callback", context["exception"])
        else:  # such as a task whose end nobody has looked at
            loop.default_exception_handler(context)

    def _engine_failed(self, what: str, error: BaseException) -> None:
        log.error("%s failed", what, exc_info=error)
        for record in self._round_log.last:
            log.error("a round before: %s", json.dumps(record))
        self._fail(f"{what} failed: {error!r}")

    async def _shut_down(self, drain_s: float) -> None:
        self._accepting = False
        try:
            if self._conversations:
                await asyncio.wait_for(self._all_done.wait(), drain_s)
        except TimeoutError:
            log.warning("%d requests dropped after %.1f s", len(self._conversations), drain_s)
        self._ended.set()

    # ---- from the owner

    def on_message(self, message: Message) -> None:
        match message:
            case messages.Submit():
                self._submit(message)
            case messages.Cancel():
                for request_id in message.request_ids.tolist():
                    self._cancel(request_id)
            case messages.AskStats():
                self._send(messages.Stats(json.dumps(self.stats())))
            case messages.Shutdown():
                self._shutdown = asyncio.create_task(self._shut_down(message.drain_s))
            case _:
                raise AssertionError(f"unexpected {type(message).__name__} from the owner")
        self._changed()

    def _submit(self, batch: messages.Submit) -> None:
        for asked in submissions.decode(batch):
            conversation = open_conversation(asked, self._eos, self._start_s)
            self._conversations[asked.request_id] = conversation
            self._all_done.clear()
            if not self._accepting:
                self._refuse(conversation, "the server is shutting down", "prompt")
            elif asked.rules.structure is not None:
                self._openings.open(conversation, asked.rules.structure)
            else:
                self._admit(conversation)

    def _admit(self, conversation: Conversation) -> None:
        """Gives it to the scheduler, or says why not."""
        try:
            self._state.add(conversation.request)
        except RequestTooLong as error:
            self._refuse(conversation, str(error), "prompt")
        self._changed()

    def _refuse(
        self, conversation: Conversation, text: str, param: str, is_busy: bool = False
    ) -> None:
        """After what is known of it already."""
        refused = messages.Refused(conversation.request.id, text, param, is_busy)
        self._completions.put_nowait(refused)
        self._forget(conversation, refused=True)

    def _cancel(self, request_id: int) -> None:
        conversation = self._conversations.get(request_id)
        if conversation is None:
            return  # it ended while the cancel was on its way
        if not self._openings.cancel(request_id):
            self._state.cancel(request_id)
        self._forget(conversation, cancelled=True)

    # ---- from the workers

    def _on_worker_message(self, role: str, message: Message) -> None:
        match message:
            case messages.StepDone() if role == "gpu":
                self._apply_gpu(message)
            case messages.StepDone():
                self._apply_cpu(message)
            case messages.StepDropped():
                assert self._cpu_step is not None and self._cpu_step.number == message.step
                self._void_cpu_step()
            case messages.TransfersDone():
                self._state.transfer_done(message.transfer_ids.tolist())
                self._stats.transfers += len(message.transfer_ids)
            case messages.MovesChecked():
                if broken := self._stats.count_checked(message, self._state):
                    self._fail(broken)
            case messages.AssistDone():
                self._stats.count_assist(message)
            case messages.Phase():
                self._send(messages.Phase(f"{role}: {message.text}"))
            case messages.Ready():
                if self._learner is not None:
                    self._learner.learn(json.loads(message.info)["layer_times"])
                if self._workers.ready and not self._stats.is_ready:
                    self._stats.is_ready = True
                    self._send(messages.Ready(json.dumps(self._workers.info())))
            case messages.Failed():
                self._fail(message.text)
        self._changed()

    def _on_worker_loss(self, role: str, is_at_fault: bool) -> bool:
        """Whatever the worker owed, or had part in, is void; what it owned is rebuilt.

        Returns whether requests may be the cause, which will not run together again at once.
        """
        steps = [step for step in self._gpu_steps if role == "gpu" or step.has_host_rows]
        own = [self._cpu_step] if role == "cpu" and self._cpu_step is not None else []
        void: list[GpuStep | CpuStep] = [*steps, *own]
        log.error("lost with the %s worker: %s", role, lost_rounds(void))
        has_suspects = any(step.all_rows for step in void)
        if is_at_fault:
            has_suspects |= self._suspect(role)
        if role == "gpu":
            self._gpu_steps.clear()
            lost = self._state.lose_gpu()
            for step in steps:
                if (applied := remains(step, lost)) is not None:
                    self._log_void(Owner.GPU, applied)
        elif steps:
            self._workers.gpu.end("gpu worker ended: it would wait for the cpu worker")
        elif own:
            self._void_cpu_step()
        self._stats.rounds_lost[role] += len(void)
        self._changed()
        return is_at_fault and has_suspects

    def _void_cpu_step(self) -> None:
        """It is decided again: meanwhile some of its requests may have been cancelled."""
        step, self._cpu_step = self._cpu_step, None
        assert step is not None
        self._state.lose_cpu()
        if step.preempted:
            self._log_void(Owner.CPU, Applied(step, [], [], [], []))

    def _suspect(self, role: str) -> bool:
        """Who was in the lost rounds runs alone next, or is given up, and who was assisted is not
        any more. Returns whether somebody was."""
        assisting = self._cpu_step if role == "gpu" and self._workers.assist_is_running else None
        owner = Owner.GPU if role == "gpu" else Owner.CPU
        culprit = self._state.accuse(owner, was_assisting=assisting is not None)
        if culprit is not None:
            self._give_up(culprit.id, role)
        if assisting is not None:
            self._assisting.no_more(row.request.id for row in assisting.rows)
        return assisting is not None

    def _give_up(self, request_id: int, role: str) -> None:
        log.error("request %d is given up: the %s worker was lost with it alone", request_id, role)
        self._state.cancel(request_id)
        why = f"the {role} worker is lost whenever it computes it"
        self._completions.put_nowait(messages.GivenUp(request_id, why))
        self._stats.given_up += 1
        self._forget(self._conversations[request_id], cancelled=True)

    # ---- the loops

    async def _gpu_loop(self) -> None:
        while True:
            self._gpu_changed.clear()
            while self._can_run_gpu() and len(self._gpu_steps) < MAX_STEPS_IN_FLIGHT:
                before = self._state.changes
                step = self._state.schedule_gpu()
                if self._state.changes != before:  # reserve, marks, queues: without a step too
                    self._cpu_changed.set()
                if step is None:
                    break
                if started := first_scheduled(step, self._conversations):
                    self._send(started)
                batch = gpu_batch(step, self._conversations, self._workers.epoch)
                if step.has_host_rows:
                    self._workers.cpu.send(batch)
                self._workers.gpu.send(batch)
                self._gpu_steps.append(step)
            if self._state.idle:
                self._state.check()  # what is not given back by now would be gone for good
            await self._gpu_changed.wait()

    def _can_run_gpu(self) -> bool:
        """A round in lockstep takes both workers."""
        return self._workers.ready if self._plan.policy.lockstep else self._workers.gpu.ready

    async def _cpu_loop(self) -> None:
        while True:
            self._cpu_changed.clear()
            if self._workers.cpu.ready and self._cpu_step is None:
                before = self._state.changes
                step = self._state.schedule_cpu()
                if self._state.changes != before:  # a yielded request waits for its swap-in
                    self._gpu_changed.set()
                if step is not None:
                    self._cpu_step = step
                    self._submit_cpu(step)
            await self._cpu_changed.wait()

    async def _completion_loop(self) -> None:
        while True:
            self._send(await self._completions.get())

    def _submit_cpu(self, step: CpuStep) -> None:
        ids = [row.request.id for row in step.rows]
        self._cpu_route = self._assisting.route(ids, step.may_assist and self._workers.gpu.ready)
        self._workers.cpu.send(cpu_batch(step, self._conversations, self._cpu_route))

    def _apply_gpu(self, done: messages.StepDone) -> None:
        step = self._gpu_steps.popleft()
        assert step.number == done.step
        if step.has_host_rows:
            self._workers.cpu.has_helped()
        own = len(step.rows)
        prompts = prompt_tokens(step, self._conversations)
        finished = self._take_tokens(step.rows, done, 0, Owner.GPU, prompts)
        host = [*step.host_rows[0], *step.host_rows[1]]
        finished |= self._take_tokens(host, done, own, Owner.CPU)
        self._log_round(Owner.GPU, self._state.apply_gpu(step, finished), done)

    def _apply_cpu(self, done: messages.StepDone) -> None:
        step = self._cpu_step
        assert step is not None and step.number == done.step
        self._cpu_step = None
        finished = self._take_tokens(step.rows, done, 0, Owner.CPU)
        self._log_round(Owner.CPU, self._state.apply_cpu(step, finished), done)

    def _take_tokens(
        self,
        rows: list[Row],
        done: messages.StepDone,
        first: int,
        owner: Owner,
        num_prompt_tokens: int = 0,
    ) -> set[int]:
        """Gives each row's conversation its token; returns the ids that end with it."""
        taken = take_tokens(rows, done, first, owner, self._conversations, num_prompt_tokens)
        for conversation in taken.finished:
            self._forget(conversation)
        if taken.message is not None:
            self._completions.put_nowait(taken.message)
            self._stats.count_tokens(owner, len(taken.message.request_ids))
        for conversation in taken.stuck:
            self._refuse(conversation, *conversation.dead_end)
        return {conversation.request.id for conversation in (*taken.finished, *taken.stuck)}

    # ---- books

    def _forget(self, conversation: Conversation, **how: bool) -> None:
        self._request_log.write(conversation.request, conversation.num_output, **how)
        del self._conversations[conversation.request.id]
        self._assisting.forget(conversation.request.id)
        if not self._conversations:
            self._all_done.set()

    def _log_round(self, owner: Owner, applied: Applied, done: messages.StepDone) -> None:
        started_s = done.started_s - self._start_s
        route = self._cpu_route if owner is Owner.CPU else None
        record = round_record(ENGINES[owner], applied, started_s, done.duration_s, route)
        self._round_log.write(record)
        self._stats.count_round(owner, done, record)
        if not self._conversations:
            self._round_log.flush()

    def _changed(self) -> None:
        self._gpu_changed.set()
        self._cpu_changed.set()

    def _log_void(self, owner: Owner, applied: Applied) -> None:
        """A round that did not run, for what was done before it."""
        nothing = np.empty(0, np.int32)
        done = messages.StepDone(applied.step.number, time.monotonic(), 0.0, nothing, 0)
        self._log_round(owner, applied, done)

    def stats(self) -> dict[str, Any]:
        """For /metrics and tests: queues, pools, counters, workers."""
        return self._stats.snapshot(self._state, self._workers, len(self._openings))
