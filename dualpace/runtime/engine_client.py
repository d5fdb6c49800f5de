"""The owner's side of the engine process: starts it, submits requests, hands each its tokens.

Submissions and cancels of one turn of the event loop travel as one message; a round's tokens come
as one and are handed out without a task or queue per request. Knows token ids, not text.
"""

import asyncio
import json
import logging
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from dualpace.runtime import logprobs, messages
from dualpace.runtime.connection import Connection
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import ending, send, start_process
from dualpace.runtime.sampling_params import SamplingParams
from dualpace.runtime.submissions import Submission, encode
from dualpace.runtime.token_stream import Admission, TokenStream
from dualpace.runtime.types import ENGINES
from dualpace.runtime.wire import Message

log = logging.getLogger(__name__)

ENGINE_MODULE = "dualpace.runtime.engine"
_EXIT_S = 10.0  # that an engine may take to end after its drain


class EngineGone(RuntimeError):
    """The engine has ended, or is being ended; nothing more will come."""


class ShuttingDown(EngineGone):
    """The owner of the engine cuts off what still runs."""


class StartFailed(RuntimeError):
    """The engine could not start. `user_error`: the text says what its user can do about it."""

    def __init__(self, text: str, user_error: bool) -> None:
        super().__init__(text)
        self.user_error = user_error


class RequestRefused(ValueError):
    """The engine will never run this request, or not to its end; the text says why."""

    def __init__(self, text: str, param: str = "prompt", is_busy: bool = False) -> None:
        """`param`: what the request asks that is to blame. `is_busy`: sent again later it may
        run."""
        super().__init__(text)
        self.param = param
        self.is_busy = is_busy


class RequestGivenUp(RuntimeError):
    """A worker is lost whenever it computes this request; no other is touched."""


class EngineClient:
    """Life: `launch` (main thread) -> `connect` (the loop that owns it) -> ... -> `close`."""

    def __init__(self, plan: Plan, process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
        self.plan = plan
        self.process = process
        self.start_s = time.monotonic()
        self.phases: list[tuple[float, str]] = [(0.0, "starting the engine process")]
        self.on_phase: Callable[[str], None] | None = None
        self.on_round: Callable[[int], None] | None = None  # gets its prompt and output tokens
        self.num_tokens: Counter[str] = Counter()  # by engine
        self.progress_s = (
            self.start_s
        )  # when the last tokens came, or work arrived at an idle engine
        self._sock = sock
        self._engine: Connection | None = None
        self._streams: dict[int, TokenStream] = {}
        self._next_id = 0
        self._submissions: list[Submission] = []
        self._cancels: list[int] = []
        self._flush_due = False
        self._stats_waiters: list[asyncio.Future[dict[str, Any]]] = []
        self._failure: messages.Failed | None = None
        self._closing = False

    @classmethod
    def launch(cls, plan: Plan, module: str = ENGINE_MODULE) -> Self:
        """Starts the engine process and hands it its plan. Call it from a thread that outlives it:
        the main one."""
        process, sock = start_process(module, [], [], {})
        send(sock, messages.Hello(plan.to_json()))
        return cls(plan, process, sock)

    async def connect(self) -> None:
        """From here on the engine's messages are followed on this loop."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._gone: asyncio.Future[str] = loop.create_future()
        self._engine = await Connection.open(self._sock, self._on_message, self._on_close)

    # ---- state

    @property
    def phase(self) -> str:
        return self.phases[-1][1]

    @property
    def has_started(self) -> bool:
        return self._ready.done()

    @property
    def is_ready(self) -> bool:
        return self.has_started and self._engine is not None

    @property
    def num_requests(self) -> int:
        """Requests that may still get tokens."""
        return len(self._streams)

    async def wait_ready(self) -> dict[str, Any]:
        """The engine's facts about its start. Raises StartFailed."""
        first: set[asyncio.Future[Any]] = {self._ready, self._gone}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if self._gone.done():
            user_error = self._failure is not None and bool(self._failure.user_error)
            raise StartFailed(self._gone.result(), user_error)
        return self._ready.result()

    async def wait_gone(self) -> str:
        """Returns why the engine ended, once it has."""
        return await asyncio.shield(self._gone)

    # ---- requests

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> TokenStream:
        """A new request. `params` must have a seed; max_tokens None means as many as fit."""
        assert params.seed is not None
        self._next_id += 1
        stream = TokenStream(self._next_id, self.cancel)
        if self._engine is None or self._gone.done() or self._closing:
            stream.fail(EngineGone("the engine is not running"))
            return stream
        now = time.monotonic()
        if not self._streams:
            self.progress_s = now
        self._streams[stream.request_id] = stream
        self._submissions.append(Submission(stream.request_id, now, prompt, params))
        self._flush_soon()
        return stream

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Gives requests up; unknown ids (ended meanwhile) are fine."""
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self._cancels.append(request_id)
        self._flush_soon()

    def cut_off(self) -> None:
        """Ends every stream with ShuttingDown and tells the engine to drop the requests."""
        streams = list(self._streams.values())
        self.cancel([stream.request_id for stream in streams])
        for stream in streams:
            stream.fail(ShuttingDown("the server is shutting down"))

    async def stats(self, timeout_s: float) -> dict[str, Any]:
        """The engine's snapshot of queues, pools and counters. Raises TimeoutError, EngineGone."""
        if self._engine is None or self._gone.done():
            raise EngineGone("the engine is not running")
        waiter: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if not self._stats_waiters:  # one question serves all who ask meanwhile
            self._engine.send(messages.AskStats())
        self._stats_waiters.append(waiter)
        try:
            return await asyncio.wait_for(waiter, timeout_s)
        finally:
            if waiter in self._stats_waiters:
                self._stats_waiters.remove(waiter)

    # ---- end

    async def close(self, drain_s: float = 0.0) -> int:
        """Ends the engine, letting requests finish for `drain_s`; returns its exit status."""
        self._closing = True
        engine = self._engine
        if engine is not None:
            engine.send(messages.Shutdown(drain_s))
            await asyncio.wait({self._gone}, timeout=drain_s + _EXIT_S)
            engine.close()
        else:
            self._sock.close()
        status = await self._exit_status(_EXIT_S)
        if status is None:
            log.warning("the engine process did not end and is killed")
            self.kill()
            status = self.process.wait()
        return status

    def kill(self) -> None:
        """At once and from anywhere; the engine's workers end with it."""
        self.process.kill()

    # ---- messages

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Cancels go after submissions: one given up at once is known by then."""
        self._flush_due = False
        if self._engine is None:
            return
        if self._submissions:
            batch, self._submissions = self._submissions, []
            self._engine.send(encode(batch))
        if self._cancels:
            ids, self._cancels = self._cancels, []
            self._engine.send(messages.Cancel(np.array(ids, np.int64)))

    def _on_message(self, message: Message) -> None:
        match message:
            case messages.Tokens():
                self._hand_out(message)
            case messages.Scheduled():
                for request_id, queued_s in zip(
                    message.request_ids.tolist(), message.queued_s.tolist(), strict=True
                ):
                    if stream := self._streams.get(request_id):
                        stream.admission = Admission(queued_s, message.scheduled_s)
            case messages.Refused():
                if stream := self._streams.pop(message.request_id, None):
                    stream.fail(RequestRefused(message.text, message.param, bool(message.is_busy)))
            case messages.GivenUp():
                if stream := self._streams.pop(message.request_id, None):
                    stream.fail(RequestGivenUp(message.text))
            case messages.Stats():
                waiters, self._stats_waiters = self._stats_waiters, []
                info = json.loads(message.info)
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(info)
            case messages.Phase():
                self._note(message.text)
            case messages.Ready():
                self._note("ready")
                self._ready.set_result(json.loads(message.info))
            case messages.Failed():
                self._failure = message
            case _:
                raise AssertionError(f"unexpected {type(message).__name__} from the engine")

    def _note(self, phase: str) -> None:
        self.phases.append((time.monotonic() - self.start_s, phase))
        log.info("%6.1f s  %s", *self.phases[-1])
        if self.on_phase is not None:
            self.on_phase(phase)

    def _hand_out(self, message: messages.Tokens) -> None:
        self.progress_s = time.monotonic()
        if self.on_round is not None:
            self.on_round(message.num_prompt_tokens + len(message.tokens))
        by_engine = np.bincount(message.engines, minlength=len(ENGINES)).tolist()
        for name, count in zip(ENGINES, by_engine, strict=True):
            self.num_tokens[name] += count
        told = logprobs.by_place(message)
        columns = (message.request_ids, message.tokens, message.engines, message.finished)
        for place, (request_id, token_id, engine, finished) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # cancelled while these were on their way
            if finished:
                del self._streams[request_id]
            stream.put(token_id, engine, message.made_s, finished, told.get(place))

    def _on_close(self) -> None:
        self._engine = None
        self._reaper = asyncio.ensure_future(self._reap())

    async def _exit_status(self, timeout_s: float) -> int | None:
        """Waits without a thread: threads are not to be had while the interpreter ends."""
        deadline_s = time.monotonic() + timeout_s
        while (status := self.process.poll()) is None and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        return status

    async def _reap(self) -> None:
        """Finds out why the engine ended, and ends everything that waits for it."""
        status = await self._exit_status(2.0)
        reason = self._failure.text if self._failure else _how_it_ended(status)
        self._gone.set_result(reason)
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.fail(EngineGone(reason))
        waiters, self._stats_waiters = self._stats_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(EngineGone(reason))


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "the engine process closed its connection"
    return f"the engine process {ending(status)}"
