"""`vllm bench serve` as a client of this server: its payloads, its headers, its way of reading.

Its reader drops the white space around whatever one read brings, cuts at blank lines, and takes the
rest for an event if it is whole; only events with choices are tokens.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.runtime.server.conftest import FakeServer

COMMON = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
TOKENS = 24


@dataclass
class Seen:
    text: str = ""
    times_s: list[float] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    try:
        server.wait_for("/ready")
        yield server
    finally:
        server.close()


async def read(response: aiohttp.ClientResponse, seen: Seen) -> None:
    buffer = ""
    async for data in response.content.iter_any():
        buffer += data.strip().decode()
        *whole, rest = buffer.split("\n\n")
        if rest and is_whole(rest):
            whole, rest = [*whole, rest], ""
        buffer = rest
        for message in whole:
            take(message.strip().removeprefix("data: "), seen)
    assert buffer == ""


def is_whole(message: str) -> bool:
    text = message.removeprefix("data: ")
    try:
        return text == "[DONE]" or bool(json.loads(text))
    except ValueError:
        return False


def take(text: str, seen: Seen) -> None:
    if text == "[DONE]":
        return
    event: dict[str, Any] = json.loads(text)
    if choices := event.get("choices"):
        seen.times_s.append(time.perf_counter())
        delta = choices[0].get("delta")
        seen.text += (delta["content"] if delta else choices[0]["text"]) or ""
    elif usage := event.get("usage"):
        seen.usage = usage


def drive(
    server: FakeServer, path: str, body: dict[str, Any], count: int, rest: Path
) -> list[Seen]:
    """`count` at once. Their first tokens have come before `rest` makes the others come."""
    everything = [Seen() for _ in range(count)]

    async def all_at_once() -> None:
        headers = {"Authorization": "Bearer none", "x-request-id": "bench-0"}
        async with aiohttp.ClientSession(headers=headers) as session:

            async def one(seen: Seen) -> None:
                async with session.post(server.url + path, json=body) as response:
                    assert response.status == 200, await response.text()
                    await read(response, seen)

            async def let_go() -> None:
                while not all(seen.text for seen in everything):
                    await asyncio.sleep(0.01)
                rest.touch()

            await asyncio.gather(*map(one, everything), let_go())

    asyncio.run(all_at_once())
    return everything


@pytest.mark.parametrize("kind", [str, lambda text: list(text.encode())])
def test_completions_are_read_as_they_come(
    server: FakeServer, kind: Callable[[str], Any], tmp_path: Path
) -> None:
    prompt = f"until {tmp_path / 'rest'}"
    body = {
        "model": "tiny",
        "prompt": kind(prompt),
        "repetition_penalty": 1.0,
        "max_tokens": TOKENS,
        "logprobs": None,
        **COMMON,
    }
    for seen in drive(server, "/v1/completions", body, 32, tmp_path / "rest"):
        assert seen.usage["completion_tokens"] == TOKENS
        assert seen.usage["prompt_tokens"] == len(prompt)
        assert 1 < len(seen.times_s) <= TOKENS and seen.text == prompt[:TOKENS]


def test_chats_are_read_as_they_come(server: FakeServer, tmp_path: Path) -> None:
    content = [{"type": "text", "text": f"until {tmp_path / 'rest'}"}]
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": TOKENS,
        **COMMON,
    }
    for seen in drive(server, "/v1/chat/completions", body, 16, tmp_path / "rest"):
        assert seen.usage["completion_tokens"] == TOKENS and len(seen.text) == TOKENS
        assert 1 < len(seen.times_s) <= TOKENS + 1  # the first names the role


def test_a_model_is_found_where_none_is_named(server: FakeServer) -> None:
    cards = server.http.get("/v1/models").json()["data"]
    assert cards[0]["id"] == "tiny"
