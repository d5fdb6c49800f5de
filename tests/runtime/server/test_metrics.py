"""What /metrics makes of an answer's times: each number where vLLM has it, no server beside."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from plans import small_plan
from prometheus_client import CollectorRegistry

from dualpace.runtime.engine_client import EngineGone, RequestRefused, ShuttingDown
from dualpace.runtime.generation import Piece
from dualpace.runtime.server.metrics import Metrics
from dualpace.runtime.server.request_metrics import Asked, RequestMetrics
from dualpace.runtime.token_stream import Admission

LABELS = {"model_name": "tiny", "engine": "0"}
WAITED = Admission(queued_s=10.0, scheduled_s=10.5)


class Seen:
    """A registry, and what lies in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(self.registry, LABELS, max_context=300)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:{name}", LABELS | labels)

    def histogram(self, name: str) -> tuple[float | None, float | None]:
        """(count, sum)."""
        return self.value(f"{name}_count"), self.value(f"{name}_sum")

    def ended(self) -> dict[str, float]:
        reasons = ("stop", "length", "abort", "error")
        counts = {r: self.value("request_success_total", finished_reason=r) for r in reasons}
        return {reason: count for reason, count in counts.items() if count}


async def answer(
    *times: list[float], reason: str = "length", error: Exception | None = None
) -> AsyncGenerator[Piece, None]:
    """Pieces whose tokens were made at `times`; the last one ends it, or `error` does."""
    for number, made_s in enumerate(times, start=1):
        ids = [7] * len(made_s)
        ends = reason if number == len(times) and error is None else None
        yield Piece("", ids, ids, made_s, ends, admission=WAITED)
    if error is not None:
        raise error


async def read(pieces: AsyncGenerator[Piece, None]) -> None:
    async for _ in pieces:
        pass


def asked(num_answers: int = 1) -> Asked:
    return Asked(prompt_len=5, max_tokens=20, num_answers=num_answers, arrival_s=0.0)


def test_the_times_of_an_answer_are_the_engines() -> None:
    seen = Seen()
    asyncio.run(read(seen.metrics.observe(answer([11.5], [11.75, 12.5]), asked())))
    for name, total in (
        ("request_queue_time_seconds", 0.5),  # taken in at 10, first round at 10.5
        ("request_prefill_time_seconds", 1.0),  # first token at 11.5
        ("request_decode_time_seconds", 1.0),  # last token at 12.5
        ("request_inference_time_seconds", 2.0),
        ("request_time_per_output_token_seconds", 0.5),
        ("request_prompt_tokens", 5),
        ("request_generation_tokens", 3),
        ("request_params_max_tokens", 20),
        ("request_max_num_generation_tokens", 3),
        ("request_params_n", 1),
    ):
        assert seen.histogram(name) == (1, total), name
    assert seen.histogram("inter_token_latency_seconds") == (2, 1.0), "each token, also of a piece"
    assert seen.value("inter_token_latency_seconds_bucket", le="0.3") == 1
    assert seen.value("prompt_tokens_total") == 5 and seen.value("generation_tokens_total") == 3
    assert seen.value("time_to_first_token_seconds_count") == 1
    assert seen.value("e2e_request_latency_seconds_count") == 1
    assert seen.ended() == {"length": 1}


def test_answers_to_one_prompt_are_one_request_where_vllm_counts_it_so() -> None:
    seen, both = Seen(), asked(num_answers=2)
    asyncio.run(read(seen.metrics.observe(answer([11.0, 12.0, 13.0]), both)))
    assert seen.histogram("request_params_n") == (0, 0)
    asyncio.run(read(seen.metrics.observe(answer([11.0], reason="stop"), both)))
    assert seen.histogram("request_params_n") == (1, 2)
    assert seen.histogram("request_max_num_generation_tokens") == (1, 3)
    assert seen.histogram("request_generation_tokens") == (2, 4)
    assert seen.histogram("request_prompt_tokens") == (2, 10)
    assert seen.ended() == {"stop": 1, "length": 1}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineGone("it is gone"), "error"),
        (ShuttingDown("it ends"), "abort"),
        (RequestRefused("its form leads nowhere"), "error"),
    ],
)
def test_what_did_not_end_by_itself_is_counted_by_its_reason_alone(
    error: Exception, reason: str
) -> None:
    seen = Seen()
    with pytest.raises(type(error)):
        asyncio.run(read(seen.metrics.observe(answer([11.0, 12.0], error=error), asked())))
    assert seen.ended() == {reason: 1}
    assert seen.value("generation_tokens_total") == 2
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_params_n"):
        assert seen.histogram(name) == (0, 0), name


def test_an_answer_that_is_refused_is_none() -> None:
    """A client's fault, which no operator needs to be told of as an error."""
    seen = Seen()
    with pytest.raises(RequestRefused):
        asyncio.run(read(seen.metrics.observe(answer(error=RequestRefused("no")), asked())))
    assert seen.ended() == {}


def test_a_client_that_leaves_aborts_its_answer() -> None:
    async def leave(seen: Seen) -> None:
        pieces = seen.metrics.observe(answer([11.0], [12.0]), asked())
        await anext(pieces)
        await pieces.aclose()

    seen = Seen()
    asyncio.run(leave(seen))
    assert seen.ended() == {"abort": 1} and seen.value("generation_tokens_total") == 1


def test_a_round_is_counted_by_its_tokens_and_lengths_up_to_the_context() -> None:
    seen = Seen()
    for num_tokens in (1, 8, 9, 20000):
        seen.metrics.count_round(num_tokens)
    assert seen.histogram("iteration_tokens_total") == (4, 20018)
    for bound, count in (("1.0", 1), ("8.0", 2), ("16.0", 3), ("16384.0", 3), ("+Inf", 4)):
        assert seen.value("iteration_tokens_total_bucket", le=bound) == count, bound
    assert seen.value("request_prompt_tokens_bucket", le="200.0") == 0
    assert seen.value("request_prompt_tokens_bucket", le="500.0") is None


def test_who_waits_is_counted_with_what_they_wait_for() -> None:
    plan = small_plan()
    stats = FakeEngine(plan).stats() | {
        "waiting": 3, "forming": 2, "cpu_waiting": 5, "copying": 4, "gpu_running": 6,
    }  # fmt: skip

    async def answer_it(timeout_s: float) -> dict[str, Any]:
        return stats

    client = SimpleNamespace(
        plan=plan, is_ready=True, num_requests=0, progress_s=0.0, num_tokens=Counter(),
        stats=answer_it,
    )  # fmt: skip
    metrics = Metrics(client)  # type: ignore[arg-type]
    asyncio.run(metrics.render())

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert value("vllm:num_requests_waiting", **LABELS) == 3 + 2 + 5
    assert value("vllm:num_requests_running", **LABELS) == 6
    by_reason = "vllm:num_requests_waiting_by_reason"
    assert value(by_reason, **LABELS, reason="deferred") == 2 + 4
    assert value(by_reason, **LABELS, reason="capacity") == 3 + 5 - 4
    assert value("dualpace_requests_waiting", engine="gpu") == 3 + 2
