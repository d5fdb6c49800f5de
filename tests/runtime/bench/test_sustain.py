import pytest

from dualpace.runtime.bench.sustain import sweeps, table


def result(
    policy: str, rate: float, latency: float, variant: str | None = None
) -> dict[str, object]:
    return {
        "profile": "machine",
        "workload": "conversation",
        "policy": policy,
        "variant": variant,
        "rate": rate,
        "request_throughput": min(rate, 3.5),
        "mean_normalized_latency_s_per_token": latency,
        "p99_ttft_ms": 1000.0 * rate,
        "p99_itl_ms": 100.0,
    }


RESULTS = [
    result("neo", 4, 2.0),
    result("neo", 3, 0.5),
    result("neo", 6, 9.0),
    result("neo", 3, 0.1, "NEO, changed"),
]


def test_results_of_one_policy_make_a_sweep_and_a_variant_makes_its_own() -> None:
    plain, changed = sweeps(RESULTS)
    assert [r["rate"] for r in plain.results] == [3, 4, 6]
    assert plain.sustains("mean_normalized_latency_s_per_token", 1.0)[0] == pytest.approx(10 / 3)
    assert plain.capacity == 3.5
    assert changed.name == "NEO, changed" and len(changed.results) == 1


def test_the_table_gives_rates_and_reasons() -> None:
    lines = table(RESULTS)
    assert "3.33" in lines[1] and "5.00" in lines[1]
    assert "P99 ITL 1.5 s: still within 1500 at the highest rate 6" in lines[1]
    assert "fewer than two rates" in lines[2]
