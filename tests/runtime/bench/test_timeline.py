"""Timelines from round logs: who made each token, and where the host tier stood still."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualpace.runtime.bench.metrics import RequestRecord
from dualpace.runtime.bench.timeline import advance, from_records, from_round_log

EMPTY: dict[str, Any] = {
    key: []
    for key in ("prefill_gpu", "prefill_cpu", "swap_out", "swap_in", "preempted", "finished")
}


def record(t: float, batch: list[int], **more: list[int]) -> dict[str, Any]:
    return {**EMPTY, "t": t, "duration": 0.5, "batch": batch, **more}


def test_tokens_are_the_hosts_between_prefill_to_cpu_and_swap_in() -> None:
    rounds = [
        record(0, [1, 2], prefill_gpu=[1], prefill_cpu=[2]),  # first tokens are the GPU's
        record(1, [2]),  # the CPU engine's
        record(2, [1], swap_out=[1]),  # cannot be in a batch: as in a log with its last GPU token
        record(3, [1, 2]),
        record(4, [2], swap_in=[2]),
        record(5, [1, 2], finished=[1, 2]),
    ]
    rows, pauses = advance(rounds, 0)
    assert [tokens for _, tokens, _ in rows] == [2, 1, 1, 2, 1, 2]
    assert [on_host for _, _, on_host in rows] == [0, 1, 0, 2, 0, 1]
    assert pauses == [(1.5, 3.5), (3.5, 5.5)]


def test_chunks_of_a_prompt_are_no_tokens_but_the_last() -> None:
    rounds = [record(t, [1], prefill_gpu=[1]) for t in range(3)] + [record(3, [1], finished=[1])]
    assert [row[1] for row in advance(rounds, 0)[0]] == [1, 1]


def test_a_log_is_moved_to_the_clients_clock_and_leaves_out_the_warm_up(tmp_path: Path) -> None:
    rounds = [
        record(100, [1], prefill_gpu=[1], finished=[1]),
        record(110, [2], prefill_cpu=[2]),
        record(115, [2]),
        record(116, [2], finished=[2]),
    ]
    file = tmp_path / "rounds.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rounds) + '{"t": 1')  # being written
    timeline = from_round_log(file, 2, 0.25, points=10)
    assert timeline["t"][-1] == pytest.approx(6.25)
    assert (timeline["tokens"][-1], timeline["cpu_tokens"][-1]) == (3, 2)
    assert timeline["pauses"] == [pytest.approx((0.25, 5.25))]


def test_without_a_log_it_is_what_clients_saw() -> None:
    records = [RequestRecord(0, 0.0, 1, [1.0, 2.0]), RequestRecord(1, 0.0, 1, error="no")]
    timeline = from_records(records, points=2)
    assert timeline == {
        "t": [0.0, 1.0, 2.0],
        "tokens": [0, 1, 2],
        "cpu_tokens": [0, 0, 0],
        "pauses": [],
    }
    assert from_records([])["t"] == []
