"""One streamed completion of an OpenAI-compatible server, timed event by event.

Events are counted, not parsed, while they come in, so that the client stays cheap: 36-70 us an
event with aiohttp at 256 and 64 streams on the 2-core machine, where httpx took 118-190 us (the
reason for aiohttp). Only the last event with token counts is read. Knows nothing about schedules.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from dualpace.errors import ConfigError

_CHOICE = re.compile(rb'"choices": ?\[\{')  # cannot stand in a text, whose quotes are escaped
_KEPT = 4096  # bytes at the end of a stream that hold its last events


@dataclass(slots=True)
class Answer:
    """What came back: when (time.monotonic, s), how many tokens the server counts, by whom."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cpu_tokens: int = 0
    error: str | None = None


def request_body(
    model: str, prompt: Sequence[int], max_tokens: int, temperature: float = 0.0
) -> bytes:
    """The JSON of a streamed completion of exactly `max_tokens` tokens, whatever they are."""
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        separators=(",", ":"),
    ).encode()


class Client:
    """Connections to one server, as many as there are requests under way."""

    def __init__(self, url: str, timeout_s: float | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"Content-Type": "application/json"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def model_card(self, name: str | None) -> dict[str, Any]:
        """The model of that name, or the first; ConfigError if the server does not answer so."""
        url = f"{self.url}/v1/models"
        try:
            async with self._session.get(url) as response:
                cards: list[dict[str, Any]] = (await response.json())["data"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"bench.url={self.url} does not list its models ({_reason(error)}): give the "
                f"address of an OpenAI-compatible server that runs."
            ) from None
        for card in cards:
            if name is None or card["id"] == name:
                return card
        known = ", ".join(card["id"] for card in cards)
        raise ConfigError(f"bench.model={name} is not served at {self.url}: choose from {known}.")

    async def text(self, path: str) -> str | None:
        """What GET answers; None if the server has no such page."""
        try:
            async with self._session.get(self.url + path) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def complete(self, body: bytes, leave_after: int | None = None) -> Answer:
        """Streams one completion to its end, or until `leave_after` tokens came, as a client does
        that has read enough. Never raises for what the server does."""
        answer = Answer(time.monotonic())
        try:
            async with self._session.post(f"{self.url}/v1/completions", data=body) as response:
                if response.status != 200:
                    answer.error = f"{response.status}: {(await response.text())[:300]}"
                    return answer
                tail = await _follow(response, answer, leave_after)
            if leave_after is None or len(answer.token_times_s) < leave_after:
                _read_end(answer, tail)
        except (aiohttp.ClientError, TimeoutError) as error:
            answer.error = repr(error)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            answer.error = f"what it answered has another form: {error!r}"
        return answer


async def _follow(
    response: aiohttp.ClientResponse, answer: Answer, leave_after: int | None
) -> bytes:
    """Notes the time of every event with a choice; returns the end of the stream."""
    times = answer.token_times_s
    unfinished = kept = b""
    async for data in response.content.iter_any():
        now = time.monotonic()
        whole, separator, unfinished = (unfinished + data).rpartition(b"\n\n")
        times.extend([now] * len(_CHOICE.findall(whole)))
        kept = (kept + whole + separator)[-_KEPT:]
        if leave_after is not None and len(times) >= leave_after:
            del times[leave_after:]
            response.close()
            break
    return kept + unfinished


def _read_end(answer: Answer, tail: bytes) -> None:
    """Token counts, and an error that came after the status; the first event may be cut."""
    for line in tail.splitlines():
        if not line.startswith(b"data:") or not line.endswith(b"}"):
            continue
        event = json.loads(line[5:])
        if error := event.get("error"):
            answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
            by_engine = (event.get("dualpace") or {}).get("tokens_by_engine", {})
            answer.cpu_tokens = by_engine.get("cpu", 0)
    if answer.completion_tokens is not None:
        # Some servers end with an event that holds no token.
        del answer.token_times_s[answer.completion_tokens :]
    if answer.error is None and answer.completion_tokens is None:
        answer.error = "the stream ended without token counts"


def _reason(error: Exception) -> str:
    """Why a server did not answer as it should, in a few words."""
    match error:
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno or 0  # negative: of the name's look-up, which has words
            return os.strerror(number) if number > 0 else str(error.os_error.strerror)
        case aiohttp.InvalidURL():
            return "no valid address"
        case TimeoutError():
            return "no answer in time"
        case aiohttp.ContentTypeError():
            return f"status {error.status}, and no JSON"
        case aiohttp.ClientError():
            return str(error) or "the connection was lost"
    return "its answer has another form"
