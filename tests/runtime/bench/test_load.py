"""The generator against a fake server: schedules are kept, lengths are exact, records are right."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.bench.client import Client
from dualpace.runtime.bench.load import Generator, Outcome, ramped
from dualpace.runtime.bench.metrics import summarize
from dualpace.runtime.bench.workload import RequestSpec
from tests.runtime.bench.fake_openai import Behaviour, FakeOpenAI, serving


def specs(count: int, gap_s: float = 0.01, output_len: int = 4) -> list[RequestSpec]:
    return [RequestSpec(i, i * gap_s, 5 + i, output_len, output_len) for i in range(count)]


def play(fake: FakeOpenAI, requests: list[RequestSpec], **more: Any) -> Outcome:
    """One run against `fake`; `warmup` and `concurrency` as the generator's methods take them."""

    async def run() -> Outcome:
        async with serving(fake) as url, Client(url) as client:
            generator = Generator(client, "fake", seed=3, room=64)
            await generator.warm_up(requests[0], more.pop("warmup", 0))
            fake.began_s = asyncio.get_running_loop().time()
            return await generator.run(requests, **more)

    return asyncio.run(run())


def test_an_open_loop_keeps_its_schedule_while_the_server_is_silent() -> None:
    """No answer begins before 20 requests have come: they come all the same, none before it is due,
    and their first tokens count from when they were due, not from when the server woke."""
    fake = FakeOpenAI(Behaviour(crowd=20))
    outcome = play(fake, specs(30, 0.02))
    sent = np.array(fake.arrived_s) - fake.began_s
    assert np.all(sent >= np.arange(30) * 0.02 - 0.001)
    for record in outcome.records:
        assert record.arrival_s == record.id * 0.02
        assert record.token_times_s[0] > 19 * 0.02 - 0.001
    ttfts = sorted(r.token_times_s[0] - r.arrival_s for r in outcome.records)
    assert ttfts[-1] > 0.3 and summarize(outcome.records)["p99_ttft_ms"] > 300


def test_lateness_of_the_client_itself_counts() -> None:
    """A request that is due while this process is busy is late by the server's clock, and its
    latency says so."""
    record = play(FakeOpenAI(Behaviour(busy_s=0.3)), specs(2, 0.1)).records[1]
    assert record.arrival_s == 0.1
    assert record.token_times_s[0] - record.arrival_s > 0.19


def test_lengths_are_exact_and_prompts_repeat_with_the_seed() -> None:
    first, second = FakeOpenAI(), FakeOpenAI()
    outcome = play(first, specs(6))
    play(second, specs(6))
    assert sorted(len(body["prompt"]) for body in first.bodies) == [5, 6, 7, 8, 9, 10]
    assert all(body["max_tokens"] == 4 and body["ignore_eos"] for body in first.bodies)
    assert [r.num_tokens for r in outcome.records] == [4] * 6 and outcome.wrong_lens == []
    key = json.dumps
    assert sorted(map(key, first.bodies)) == sorted(map(key, second.bodies))
    assert all(16 <= t < 256 for body in first.bodies for t in body["prompt"])


def test_an_answer_of_another_length_is_named() -> None:
    assert play(FakeOpenAI(Behaviour(short_by=1)), specs(3)).wrong_lens == [0, 1, 2]


@pytest.mark.parametrize(("pair", "tail", "times"), [(0, 0, 8), (1, 0, 4), (0, 1, 8)])
def test_events_are_counted_as_the_server_counts_tokens(pair: int, tail: int, times: int) -> None:
    behaviour = Behaviour(pair=bool(pair), tail=bool(tail), engines=True)
    record = play(FakeOpenAI(behaviour), specs(1, output_len=8)).records[0]
    assert record.num_tokens == 8 and len(record.token_times_s) == times
    assert record.cpu_tokens == 1
    result = summarize([record])
    assert result["total_output_tokens"] == 8 and result["gpu_resident_tokens"] == 7


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    fake = FakeOpenAI(Behaviour(crowd=3))
    outcome = play(fake, specs(12, 100.0), concurrency=3)  # scheduled times play no part
    assert fake.running == 3
    assert all(r.completed and r.arrival_s < 100 for r in outcome.records)
    assert sorted(outcome.lag_s) == [0.0] * 12


def test_warm_up_is_not_recorded() -> None:
    fake = FakeOpenAI()
    outcome = play(fake, specs(2), warmup=5)
    assert len(fake.bodies) == 7 and len(outcome.records) == 2


def test_failures_are_recorded_and_a_dead_server_is_a_sentence() -> None:
    outcome = play(FakeOpenAI(Behaviour(status=503)), specs(2))
    assert [r.error for r in outcome.records] == ['503: {"error": {"message": "no"}}'] * 2
    result = summarize(outcome.records)
    assert (result["completed"], result["failed"]) == (0, 2)
    with pytest.raises(ConfigError, match="answered no request"):
        play(FakeOpenAI(Behaviour(status=503)), specs(2), warmup=1)


@pytest.mark.parametrize(
    "end",
    [b"data: {oops}\n\n", b'data: {"usage": {"prompt_tokens": 1}}\n\n', b'data: {"usage": 7}\n\n'],
)
def test_an_answer_in_another_form_fails_alone(end: bytes) -> None:
    outcome = play(FakeOpenAI(Behaviour(end=end)), specs(2))
    assert all("has another form" in (r.error or "") for r in outcome.records)
    assert summarize(outcome.records)["failed"] == 2


def test_without_max_tokens_all_is_asked_for_and_the_client_leaves() -> None:
    fake = FakeOpenAI(Behaviour(token_s=0.01))
    outcome = play(fake, [RequestSpec(0, 0.0, 10, 5, None)])
    assert fake.bodies[0]["max_tokens"] == 64 - 10
    assert outcome.records[0].completed and outcome.records[0].num_tokens == 5
    assert fake.running == 1 and fake.now_running == 0


@pytest.mark.parametrize("shape", ["linear", "exponential"])
def test_a_ramp_moves_the_rate_and_keeps_the_order(shape: str) -> None:
    requests = [RequestSpec(i, (i + 1) / 50, 1, 1, 1) for i in range(3000)]
    times = np.array([r.arrival_s for r in ramped(requests, 10, 40, shape)])
    assert np.all(np.diff(times) > 0)
    mean_rate = 25 if shape == "linear" else 30 / np.log(4)
    assert times[-1] == pytest.approx(3000 / mean_rate, rel=1e-3)
    assert 1 / np.diff(times[:60]).mean() == pytest.approx(10, rel=0.1)
    assert 1 / np.diff(times[-60:]).mean() == pytest.approx(40, rel=0.1)
    halves = sum(times < times[-1] / 2) / 3000
    assert halves == pytest.approx(0.35 if shape == "linear" else 1 / 3, abs=0.01)


def test_impossible_ramps_are_refused() -> None:
    with pytest.raises(ConfigError, match="finite"):
        ramped(specs(3), 1, float("inf"), "linear")
    with pytest.raises(ConfigError, match="linear or exponential"):
        ramped(specs(3), 1, 2, "square")


def test_the_model_card_is_found_or_named() -> None:
    async def run() -> None:
        async with serving(FakeOpenAI()) as url, Client(url + "/v1/") as client:
            assert (await client.model_card(None))["id"] == "fake"
            assert (await client.model_card("other"))["id"] == "other"
            with pytest.raises(ConfigError, match="choose from fake, other"):
                await client.model_card("mine")
        async with Client("http://127.0.0.1:9") as client:
            with pytest.raises(ConfigError, match="does not list its models"):
                await client.model_card(None)

    asyncio.run(run())
