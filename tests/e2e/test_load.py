"""Two hundred streaming clients, many of whom leave early, through a real server."""

import asyncio
import random
import time
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.server_process import Server
from tests.servers import PATIENCE_S

CLIENTS = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("load") / "log"
    with Server(log, "kv.gpu_blocks=60", "kv.host_blocks=600", "cpu.max_batch_size=16") as server:
        yield server


async def _client(client: openai.AsyncOpenAI, index: int, rng: random.Random) -> str:
    """One streamed completion; leaves after some chunks, or stays to the end."""
    leave_after = rng.choice([0, 1, 3, 10, None, None])
    max_tokens = rng.randint(1, 60)
    await asyncio.sleep(rng.random() * 2)
    stream = await client.completions.create(
        model="random-tiny",
        prompt=[rng.randrange(3, 500) for _ in range(rng.randint(1, 120))],
        max_tokens=max_tokens,
        seed=index,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = 0
    async for chunk in stream:
        if chunk.usage is not None:
            assert chunk.usage.completion_tokens == max_tokens
            return "complete"
        if leave_after is not None and chunks >= leave_after:
            await stream.close()
            return "left"
        chunks += 1
    raise AssertionError("a stream ended without its usage")


async def _all(url: str) -> list[str]:
    rng = random.Random(1)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S
    ) as client:
        clients = [_client(client, i, random.Random(rng.random())) for i in range(CLIENTS)]
        return await asyncio.gather(*clients)


def test_all_are_answered_and_every_block_comes_back(server: Server) -> None:
    ends = asyncio.run(_all(server.url))
    assert ends.count("complete") > 50 and ends.count("left") > 50
    tokens = server.metric("dualpace_tokens_total")
    assert all(value > 100 for value in tokens.values()) and len(tokens) == 2, tokens
    _wait_idle(server)
    assert all(value == 0 for value in server.metric("dualpace_worker_restarts_total").values())


def _wait_idle(server: Server) -> None:
    """The last cancels may still be on their way."""
    deadline = time.monotonic() + PATIENCE_S
    while any(used := server.metric("dualpace_kv_blocks_used").values()):
        assert time.monotonic() < deadline, "blocks are still held"
        time.sleep(0.1)
    assert len(used) == 2
