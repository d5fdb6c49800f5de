"""One request's tokens on their way from the engine's messages to whoever waits for them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from dualpace.runtime.logprobs import TokenLogprobs
from dualpace.runtime.messages import FINISH_REASONS


@dataclass(frozen=True, slots=True)
class Admission:
    """When the engine took a request in, and when it decided the first round that computes some of
    it; of `time.monotonic()`."""

    queued_s: float
    scheduled_s: float


@dataclass(slots=True)
class Update:
    """Tokens that came since the last one; `engines` says who made each, by place in ENGINES."""

    token_ids: list[int] = field(default_factory=list)
    engines: list[int] = field(default_factory=list)
    made_s: list[float] = field(default_factory=list)  # when each was; of `time.monotonic()`
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each, where asked for
    finish_reason: str | None = None  # stop (end of sequence) | length


class TokenStream:
    """One request's updates: `async for update in stream`. Close it to give the request up.

    Iterating raises RequestRefused, RequestGivenUp or EngineGone.
    """

    def __init__(self, request_id: int, cancel: Callable[[Sequence[int]], None]) -> None:
        """`cancel` tells the engine to drop requests."""
        self.request_id = request_id
        self.admission: Admission | None = None  # before the first token
        self._cancel = cancel
        self._update = Update()
        self._error: Exception | None = None
        self._ended = False  # nothing more will be put
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        if not self._update.token_ids and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._update.token_ids:
            update, self._update = self._update, Update()
            return update
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancels the request if it still runs."""
        if not self._ended:
            self._ended = True
            self._cancel([self.request_id])

    def put(
        self,
        token_id: int,
        engine: int,
        made_s: float,
        finished: int,
        told: TokenLogprobs | None = None,
    ) -> None:
        update = self._update
        update.token_ids.append(token_id)
        update.engines.append(engine)
        update.made_s.append(made_s)
        if told is not None:
            update.logprobs.append(told)
        if finished:
            update.finish_reason = FINISH_REASONS[finished]
            self._ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
