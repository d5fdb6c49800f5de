"""Sending answers: server-sent events or one JSON body, given up as soon as the client is gone."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dualpace.runtime.alignment import ToldToken
from dualpace.runtime.generation import Piece
from dualpace.runtime.server.errors import as_api_error
from dualpace.runtime.server.responses import End, Envelope, Usage

log = logging.getLogger(__name__)

UsageParts = Literal["none", "last", "all"]  # of a stream, that say how many tokens there were
ToldAs = Callable[[Sequence[ToldToken]], dict[str, Any]]
Pieces = AsyncGenerator[tuple[int, Piece], None]  # (index of the choice, what is new)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass each piece on at once
]
_DONE = b"data: [DONE]\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, and cancels it when the client disconnects."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def event(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


@dataclass(slots=True)
class Job:
    """A checked request that is about to run."""

    envelope: Envelope
    pieces: Pieces
    num_choices: int
    usage: Usage
    stream: bool
    usage_parts: UsageParts
    told_as: ToldAs | None  # how log-probabilities are told; None: not at all


class Answer(Response):
    """Runs a job while it is being sent; closing the connection ends it.

    The first piece is awaited before the status is sent: a refusal by the engine is a plain error.
    """

    def __init__(self, job: Job) -> None:
        self.background = None
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = _send_events if self._job.stream else _send_json
        await while_connected(receive, work(self._job, send))


async def _send_json(job: Job, send: Send) -> None:
    texts: list[list[str]] = [[] for _ in range(job.num_choices)]
    told: list[list[ToldToken]] = [[] for _ in range(job.num_choices)]
    ends = [End()] * job.num_choices
    async with contextlib.aclosing(job.pieces) as pieces:
        async for index, piece in pieces:
            texts[index].append(piece.text)
            told[index] += piece.told
            ends[index] = End(piece.finish_reason, piece.stop_reason)
            job.usage.count(piece.engines)
    choices = [
        job.envelope.shape.choice(index, "".join(parts), end, job.told_as and job.told_as(tokens))
        for index, (parts, end, tokens) in enumerate(zip(texts, ends, told, strict=True))
    ]
    body = json.dumps(job.envelope.whole(choices, job.usage), ensure_ascii=False).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_events(job: Job, send: Send) -> None:
    started = False
    try:
        async with contextlib.aclosing(_events(job)) as events:
            async for data in events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await send({"type": "http.response.body", "body": data, "more_body": True})
    except Exception as error:
        if not started:
            raise
        answer = as_api_error(error)
        if answer.status == 500 and answer.code is None:  # nobody has told of it
            log.error("a stream failed", exc_info=error)
        data = event(answer.body())
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(job: Job) -> AsyncGenerator[bytes, None]:
    """An event an update, even when its tokens make no text yet: clients time tokens by them."""
    envelope, shape = job.envelope, job.envelope.shape
    no_usage: dict[str, Any] = {} if job.usage_parts == "none" else {"usage": None}
    opened: set[int] = set()
    async with contextlib.aclosing(job.pieces) as pieces:
        async for index, piece in pieces:
            data = b""
            if index not in opened:
                opened.add(index)
                if (opening := shape.opening(index)) is not None:
                    data = event(envelope.part([opening], **no_usage))
            job.usage.count(piece.engines)
            end = End(piece.finish_reason, piece.stop_reason)
            logprobs = job.told_as(piece.told) if job.told_as and piece.told else None
            delta = shape.delta(index, piece.text, end, logprobs)
            usage = job.usage.fields() if job.usage_parts == "all" else no_usage
            yield data + event(envelope.part([delta], **usage))
    last = b"" if job.usage_parts == "none" else event(envelope.part([], **job.usage.fields()))
    yield last + _DONE
