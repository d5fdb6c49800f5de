"""The engine's client alone, against a peer at the other end of its socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from plans import small_plan

from dualpace.runtime import messages
from dualpace.runtime.connection import Connection
from dualpace.runtime.engine_client import EngineClient, EngineGone
from dualpace.runtime.sampling_params import SamplingParams
from dualpace.runtime.token_stream import Admission
from dualpace.runtime.wire import Message
from tests.servers import PATIENCE_S

PARAMS = SamplingParams(seed=1, max_tokens=5, stop="x")


class EndedProcess:
    """Stands for the engine process once its socket has closed."""

    def poll(self) -> int:
        return -9

    def wait(self, timeout: float | None = None) -> int:
        return -9

    def kill(self) -> None:
        pass


class Peer:
    """Keeps what the client sends."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        self.link: Connection

    def send_tokens(self, *rows: tuple[int, int, int, int]) -> None:
        ids, tokens, engines, finished = (np.array(column) for column in zip(*rows, strict=True))
        self.link.send(messages.Tokens(ids, tokens, engines, finished, 2.0, 7))


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EngineClient, Peer]]:
    ours, theirs = socket.socketpair()
    peer = Peer()
    peer.link = await Connection.open(theirs, peer.received.append, lambda: None)
    client = EngineClient(small_plan(), EndedProcess(), ours)
    await client.connect()
    yield client, peer
    peer.link.close()
    await client.wait_gone()


def test_one_turn_of_the_loop_is_one_message():
    async def run():
        async with connected() as (client, peer):
            streams = [client.submit([i, i + 1], PARAMS) for i in range(64)]
            streams[3].close()
            await until(lambda: len(peer.received) >= 2)
            submit, cancel = peer.received
            assert submit.request_ids.tolist() == [s.request_id for s in streams]
            assert submit.tokens[submit.offsets[5] : submit.offsets[6]].tolist() == [5, 6]
            assert set(submit.max_tokens.tolist()) == {5}
            assert cancel.request_ids.tolist() == [streams[3].request_id]

    asyncio.run(run())


def test_a_slow_reader_gets_its_tokens_at_once():
    async def run():
        async with connected() as (client, peer):
            first, second = client.submit([1], PARAMS), client.submit([2], PARAMS)
            a, b = first.request_id, second.request_id
            peer.send_tokens((a, 7, 0, 0), (b, 1, 0, 2))
            peer.send_tokens((a, 8, 1, 1), (99, 1, 1, 0))
            await until(lambda: client.num_tokens == {"gpu": 2, "cpu": 2})
            updates = [update async for update in first]
            assert len(updates) == 1
            assert (updates[0].token_ids, updates[0].engines) == ([7, 8], [0, 1])
            assert updates[0].finish_reason == "stop"
            assert [u.finish_reason async for u in second] == ["length"]
            assert client.num_requests == 0

    asyncio.run(run())


def test_a_stream_knows_when_its_request_was_scheduled_and_each_token_made():
    async def run():
        async with connected() as (client, peer):
            rounds = []
            client.on_round = rounds.append
            stream = client.submit([1], PARAMS)
            ids = np.array([stream.request_id, 99])
            peer.link.send(messages.Scheduled(ids, np.array([0.5, 0.75]), 1.25))
            peer.send_tokens((stream.request_id, 7, 0, 2), (99, 1, 0, 0))
            updates = [update async for update in stream]
            assert [update.made_s for update in updates] == [[2.0]]
            assert stream.admission == Admission(queued_s=0.5, scheduled_s=1.25)
            assert rounds == [7 + 2], "prompt tokens as the message says, and each row's own"

    asyncio.run(run())


def test_tokens_of_a_cancelled_request_are_dropped():
    async def run():
        async with connected() as (client, peer):
            stream, other = client.submit([1], PARAMS), client.submit([2], PARAMS)
            stream.close()
            stream.close()
            peer.send_tokens((stream.request_id, 7, 0, 0))
            peer.send_tokens((other.request_id, 1, 0, 2))
            assert len([update async for update in other]) == 1
            assert [update async for update in stream] == []
            await until(lambda: len(peer.received) >= 2)
            assert sum(isinstance(m, messages.Cancel) for m in peer.received) == 1

    asyncio.run(run())


def test_everything_that_waits_ends_with_the_engine():
    async def run():
        async with connected() as (client, peer):
            stream = client.submit([1], PARAMS)
            waiting = asyncio.create_task(anext(stream))
            asking = asyncio.create_task(client.stats(timeout_s=PATIENCE_S))
            await until(lambda: len(peer.received) >= 2)  # the prompt and the question
            peer.link.close()
            for task in (waiting, asking):
                with pytest.raises(EngineGone, match="SIGKILL"):
                    await task
            with pytest.raises(EngineGone):
                await anext(client.submit([1], PARAMS))
            with pytest.raises(EngineGone):
                await client.stats(timeout_s=PATIENCE_S)

    asyncio.run(run())


def test_one_question_answers_all_who_ask_for_stats():
    async def run():
        async with connected() as (client, peer):
            asking = [asyncio.create_task(client.stats(timeout_s=PATIENCE_S)) for _ in range(3)]
            await until(lambda: peer.received)
            peer.link.send(messages.Stats('{"waiting": 4}'))
            assert [await task for task in asking] == [{"waiting": 4}] * 3
            assert len(peer.received) == 1
            with pytest.raises(TimeoutError):
                await client.stats(timeout_s=0.01)

    asyncio.run(run())
