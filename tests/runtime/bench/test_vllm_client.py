"""`vllm bench serve` as a client of this server: its payloads, its headers, its way of reading.

Its reader drops the white space around whatever one read brings, cuts at blank lines, and takes the
rest for an event if it is whole; only events with choices are tokens.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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


async def read(response: aiohttp.ClientResponse) -> Seen:
    seen, buffer = Seen(), ""
    async for data in response.content.iter_any():
        buffer += data.strip().decode()
        *whole, rest = buffer.split("\n\n")
        if rest and is_whole(rest):
            whole, rest = [*whole, rest], ""
        buffer = rest
        for message in whole:
            take(message.strip().removeprefix("data: "), seen)
    assert buffer == ""
    return seen


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


def drive(server: FakeServer, path: str, bodies: list[dict[str, Any]]) -> list[Seen]:
    async def all_at_once() -> list[Seen]:
        headers = {"Authorization": "Bearer none", "x-request-id": "bench-0"}
        async with aiohttp.ClientSession(headers=headers) as session:

            async def one(body: dict[str, Any]) -> Seen:
                async with session.post(server.url + path, json=body) as response:
                    assert response.status == 200, await response.text()
                    return await read(response)

            return await asyncio.gather(*map(one, bodies))

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("prompt", ["slow hello", [104, 105, 106]])
def test_completions_are_read_token_by_token(server: FakeServer, prompt: Any) -> None:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": TOKENS,
        "logprobs": None,
        **COMMON,
    }
    for seen in drive(server, "/v1/completions", [body] * 32):
        assert seen.usage["completion_tokens"] == TOKENS
        assert seen.usage["prompt_tokens"] == len(prompt)
        assert 1 < len(seen.times_s) <= TOKENS and len(seen.text) == TOKENS


def test_chats_are_read_token_by_token(server: FakeServer) -> None:
    content = [{"type": "text", "text": "slow hello"}]
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": TOKENS,
        **COMMON,
    }
    for seen in drive(server, "/v1/chat/completions", [body] * 16):
        assert seen.usage["completion_tokens"] == TOKENS and len(seen.text) == TOKENS
        assert 1 < len(seen.times_s) <= TOKENS + 1  # the first names the role


def test_a_model_is_found_where_none_is_named(server: FakeServer) -> None:
    cards = server.http.get("/v1/models").json()["data"]
    assert cards[0]["id"] == "tiny"
