"""What the offline benchmark reads out of a round log."""

from typing import Any

import pytest

from dualpace.runtime.bench.offline import round_facts


def record(engine: str, t: float, duration: float, rows: int, **moved: list[int]) -> dict[str, Any]:
    keys = ("prefill_gpu", "prefill_cpu", "swap_out", "swap_in", "preempted")
    none: dict[str, Any] = {key: [] for key in keys}
    batch = list(range(rows))
    return {"engine": engine, "t": t, "duration": duration, "batch": batch, **none, **moved}


def test_idle_share_is_what_no_round_covers() -> None:
    rounds = [
        record("gpu", 10.0, 0.4, 2, prefill_gpu=[1]),
        record("gpu", 10.5, 0.3, 4),
        record("gpu", 10.9, 0.1, 4),
        record("cpu", 10.1, 1.0, 8),
        record("cpu", 12.1, 1.0, 8),
    ]
    facts = round_facts(rounds)
    assert facts["gpu_idle_share"] == pytest.approx(0.2)
    assert facts["gpu_idle_share_decode_only"] == pytest.approx(0.5)  # 0.1 s before 0.1 s
    assert facts["num_prefill_gpu"] == 1
    assert facts["cpu_longest_gap_iterations"] == pytest.approx(1.0)
    assert facts["tokens_by_second"] == {"gpu": [6, 4], "cpu": [0, 8, 0, 8]}


def test_an_empty_log_has_no_facts_to_divide() -> None:
    assert round_facts([])["gpu_rounds"] == 0
