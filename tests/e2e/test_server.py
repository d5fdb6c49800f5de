"""A real server under a crowd that comes and goes, with a worker that stands still and one that
dies, and at its end: answers stay whole, nothing is left behind. (One that is killed is the matter
of test_readme.)
"""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.live import Workers, orderly_workers
from tests.e2e.server_process import Server, by_script, words
from tests.servers import PATIENCE_S

HBM_TOKENS = 8 * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[Workers]:
    with orderly_workers(folder) as workers:
        yield workers


@pytest.fixture(scope="module")
def server(folder: Path, workers: Workers, no_memory_left: None) -> Iterator[Server]:
    """The last of its tests ends it."""
    settings = {"kv.gpu_blocks": 8, "server.drain_timeout_s": 0.5, **workers.settings}
    with Server(folder / "log", by_script, **settings) as server:
        yield server


@dataclass
class Asked:
    """A completion, and when its client goes."""

    prompt: list[int]
    max_tokens: int
    seed: int
    leave_after: int | None  # chunks; None: it stays to the end


def crowd() -> list[Asked]:
    """Prompts up to twice what HBM holds: the longer half are the host's."""
    rng = random.Random(1)
    return [
        Asked(
            prompt=[rng.randrange(3, 500) for _ in range(rng.randint(1, 2 * HBM_TOKENS))],
            max_tokens=rng.randint(1, 60),
            seed=seed,
            leave_after=rng.choice([0, 1, 3, 10, None, None]),
        )
        for seed in range(200)
    ]


async def ask(client: openai.AsyncOpenAI, asked: Asked) -> str:
    stream = await client.completions.create(
        model="random-tiny",
        prompt=asked.prompt,
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = 0
    async for chunk in stream:
        if chunk.usage is not None:
            assert chunk.usage.completion_tokens == asked.max_tokens
            return "complete"
        if asked.leave_after is not None and chunks >= asked.leave_after:
            await stream.close()
            return "left"
        chunks += 1
    raise AssertionError("a stream ended without its usage")


async def ask_all(url: str, crowd: list[Asked]) -> list[str]:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S
    ) as client:
        return await asyncio.gather(*(ask(client, asked) for asked in crowd))


def test_two_hundred_clients_are_answered_and_every_block_comes_back(server: Server) -> None:
    """Many of whom leave early, or would have but for chunks of several tokens."""
    asked = crowd()
    ends = asyncio.run(ask_all(server.url, asked))
    stayed = [a for a in asked if a.leave_after is None]
    for one, end in zip(asked, ends, strict=True):
        if one.leave_after is None:
            assert end == "complete", one
        if one.leave_after == 0:
            assert end == "left", one
    long = sum(a.max_tokens - 1 for a in stayed if len(a.prompt) > HBM_TOKENS)
    tokens = server.metric("dualpace_tokens_total")
    assert tokens['{engine="cpu"}'] >= long > 500
    assert tokens['{engine="gpu"}'] >= len(stayed) > 50  # at least first tokens
    deadline = time.monotonic() + PATIENCE_S
    while any(used := server.metric("dualpace_kv_blocks_used").values()):
        assert time.monotonic() < deadline, "blocks are still held"  # last cancels come
        time.sleep(0.1)
    assert len(used) == 2
    assert all(value == 0 for value in server.metric("dualpace_worker_restarts_total").values())


def test_ready_tells_of_a_worker_that_stands_still_and_of_one_that_starts_again(
    server: Server, workers: Workers
) -> None:
    """Nothing has been asked, so no answer shows it; the log says what happened and when."""
    (worker,) = [pid for pid in server.family if "--role cpu" in " ".join(words(pid))]
    os.kill(worker, signal.SIGSTOP)
    assert server.wait_ready_says("stalled") == "the cpu worker is stopped by a signal"
    os.kill(worker, signal.SIGCONT)
    assert server.wait_ready_says("ready") is None
    with workers.held("cpu_0"):
        os.kill(worker, signal.SIGKILL)
        assert str(server.wait_ready_says("degraded")).startswith("cpu worker: ")
        assert httpx.get(f"{server.url}/ready").status_code == 200  # what fits HBM is served
    assert server.wait_ready_says("ready") is None
    server.note_family()
    lines = server.log.read_text().splitlines()
    for text in ("cpu worker was ended by signal SIGKILL", "the cpu worker is back after"):
        (line,) = [line for line in lines if text in line]
        assert re.match(r"\d\d:\d\d:\d\d [EI] engine: ", line)


def test_control_c_under_load_ends_it_well(server: Server) -> None:
    assert server.end_under_load(server.interrupt, max_tokens=1900) == 0
    assert "Traceback" not in server.log.read_text()
