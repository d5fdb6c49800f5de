import numpy as np
import pytest

from dualpace.runtime.bench.metrics import RequestRecord, summarize, sustainable_rate

RECORDS = [
    # TTFT 0.5, gaps 0.1 and 0.3, E2E 0.9, TPOT 0.2
    RequestRecord(0, 0.5, 10, [1.0, 1.1, 1.4], cpu_tokens=1),
    # a single token: TTFT = E2E = 2.0, no TPOT, no gap
    RequestRecord(1, 2.0, 30, [4.0]),
    RequestRecord(2, 2.0, 99, [], error="refused"),
]


def test_every_number_is_the_hand_computed_one() -> None:
    result = summarize(RECORDS)
    expected = {
        "duration": 4.0,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 40,
        "total_output_tokens": 4,
        "request_throughput": 0.5,
        "request_goodput": None,
        "output_throughput": 1.0,
        "total_token_throughput": 11.0,
        "mean_ttft_ms": 1250.0,
        "median_ttft_ms": 1250.0,
        "std_ttft_ms": 750.0,
        "p99_ttft_ms": 1985.0,
        "mean_tpot_ms": 200.0,
        "p99_tpot_ms": 200.0,
        "std_tpot_ms": 0.0,
        "mean_itl_ms": 200.0,
        "p99_itl_ms": 298.0,
        "mean_e2el_ms": 1450.0,
        "mean_normalized_latency_s_per_token": (0.3 + 2.0) / 2,
        "cpu_resident_tokens": 1,
        "gpu_resident_tokens": 3,
    }
    assert {key: result[key] for key in expected} == pytest.approx(expected)
    assert {
        f"{stat}_{name}_ms"
        for stat in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    } <= result.keys()


def test_goodput_counts_requests_that_meet_every_target() -> None:
    assert summarize(RECORDS, {"ttft": 600.0})["request_goodput"] == pytest.approx(0.25)
    assert summarize(RECORDS, {"ttft": 600.0, "tpot": 100.0})["request_goodput"] == 0.0
    assert summarize(RECORDS, {"e2el": 5000.0})["request_goodput"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="e3el"):
        summarize(RECORDS, {"e3el": 1.0})


def test_a_run_in_which_nothing_completed_has_numbers_too() -> None:
    result = summarize([RECORDS[2]])
    assert (result["completed"], result["failed"]) == (0, 1)
    assert result["request_throughput"] == 0.0 and np.isfinite(result["p99_itl_ms"])


def test_the_sustainable_rate_is_where_the_line_crosses_the_target() -> None:
    found = sustainable_rate([3.0, 1.0, 2.0], [3.0, 0.2, 0.5], 1.0)
    assert found.rate == pytest.approx(2.2)


def test_it_is_the_first_crossing_even_if_a_later_point_falls_back() -> None:
    assert sustainable_rate([1, 2, 3, 4], [0.0, 2.0, 0.5, 2.0], 1.0).rate == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("values", "reason"),
    [([0.1, 0.2], "highest rate 2"), ([1.5, 2.0], "lowest rate 1"), ([0.5], "two rates")],
)
def test_it_is_never_extrapolated(values: list[float], reason: str) -> None:
    found = sustainable_rate([1.0, 2.0][: len(values)], values, 1.0)
    assert found.rate is None and reason in found.reason


def test_goodput_by_itl_asks_every_gap_of_a_request() -> None:
    even = RequestRecord(0, 0.0, 1, [0.1, 0.2, 0.3])
    paused = RequestRecord(1, 0.0, 1, [0.1, 0.2, 0.9])
    single = RequestRecord(2, 0.0, 1, [0.1])
    records = [even, paused, single]
    assert summarize(records, {"itl": 150})["request_goodput"] == pytest.approx(2 / 0.9)
    assert summarize(records, {"itl": 150, "ttft": 50})["request_goodput"] == 0


def test_tokens_that_came_together_count_one_each() -> None:
    record = RequestRecord(0, 0.0, 1, [1.0, 2.0], output_len=4)
    result = summarize([record])
    assert result["total_output_tokens"] == 4
    assert result["mean_tpot_ms"] == pytest.approx(1000 / 3)
    assert result["mean_itl_ms"] == pytest.approx(1000)
    assert result["mean_normalized_latency_s_per_token"] == pytest.approx(0.5)
