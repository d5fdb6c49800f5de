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
        "p99_tpot_ms": 60.0 * rate,
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


def test_the_table_gives_rates_and_where_they_lie_beyond_the_sweep() -> None:
    head, neo, changed = table(RESULTS)
    assert neo.split()[3:] == ["3.33", "5.00", ">", "6", ">", "6"]
    assert changed.split()[-4:] == ["-", "-", "-", "-"]
    assert "0.1 s/token" not in head


def test_tighter_targets_are_told_where_they_are_crossed() -> None:
    fast = [result("neo", 2, 0.05), result("neo", 4, 0.15)]
    head, line = table(fast)
    assert head.split("0.1 s/token")[1].split()[:4] == ["P99", "TPOT", "0.15", "s"]
    assert line.split()[-2:] == ["3.00", "2.50"]
    assert "< 2" in table([result("neo", 2, 5.0), result("neo", 4, 9.0)])[1]
