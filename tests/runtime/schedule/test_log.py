"""Round records in the fixed format, and the checker that replays them."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dualpace.runtime.routing import Route
from dualpace.runtime.schedule.check import check_log
from dualpace.runtime.schedule.log import request_record, round_record
from dualpace.runtime.types import Request
from tests.runtime.schedule.drive import add, copies, make

Record = dict[str, Any]


def play(
    look_ahead: bool = False, estimator: str = "declared"
) -> tuple[list[Record], list[Record]]:
    """Both logs of a small crowded run on a clock where every round takes a second."""
    state = make(
        gpu=14, host=40, soft=64, hard=96, gpu_rows=6, look_ahead=look_ahead, estimator=estimator
    )
    requests = [add(state, i, 16 + 19 * (i % 5), 8 + 13 * (i % 4)) for i in range(12)]
    rounds, clock, pending = [], 0.0, []
    while not state.idle:
        while (step := state.schedule_gpu()) is not None:
            pending.append(step)
        if pending:
            step = pending.pop(0)
            rounds.append(round_record("gpu", state.apply_gpu(step, ()), clock, 1.0))
            state.transfer_done(copies(step))
        batch = state.schedule_cpu()
        clock += 1
        if batch is not None:
            applied = state.apply_cpu(batch, ())
            rounds.append(round_record("cpu", applied, clock, 0.5, Route.FULL_CPU))
    return rounds, [request_record(r, r.num_output) for r in requests]


def test_a_record_has_exactly_the_fixed_fields() -> None:
    rounds, requests = play()
    assert list(rounds[0]) == [
        "t",
        "engine",
        "round",
        "batch",
        "prefill_gpu",
        "prefill_cpu",
        "swap_out",
        "swap_in",
        "marked",
        "finished",
        "preempted",
        "gpu_blocks",
        "host_blocks",
        "waiting",
        "gpu_running",
        "cpu_waiting",
        "cpu_running",
        "route",
        "duration",
    ]
    assert list(rounds[0]["host_blocks"]) == ["capacity", "used", "planned", "growth", "migration"]
    assert list(rounds[0]["gpu_blocks"]) == ["capacity", "used"]
    assert rounds[0]["gpu_blocks"]["capacity"] == 14
    assert {r["route"] for r in rounds} == {None, "FULL_CPU"}
    assert requests[3] == {
        "id": 3,
        "arrival": 3.0,
        "prompt_len": 73,
        "output_len": 47,
        "max_tokens": 47,
    }
    json.dumps(rounds)


def test_refused_and_cancelled_are_named_where_so() -> None:
    request = Request(1, 4, 5, 0.5)
    assert request_record(request, 0, refused=True)["refused"] is True
    assert request_record(request, 2, cancelled=True)["cancelled"] is True
    assert not {"refused", "cancelled"} & request_record(request, 5).keys()


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("estimator", ["declared", "quantile"])
def test_a_sound_run_has_no_problems(look_ahead: bool, estimator: str) -> None:
    rounds, requests = play(look_ahead, estimator)
    assert any(r["engine"] == "cpu" for r in rounds) and any(r["swap_in"] for r in rounds)
    assert check_log(rounds, requests, declared=estimator == "declared") == []


def break_capacity(rounds: list[Record]) -> None:
    rounds[2]["gpu_blocks"]["used"] = 15


def break_envelope(rounds: list[Record]) -> None:
    next(r for r in rounds if r["prefill_cpu"])["host_blocks"]["migration"] = 99


def run_on_the_wrong_engine(rounds: list[Record]) -> None:
    first = next(r for r in rounds if r["prefill_gpu"])
    next(r for r in rounds if r["engine"] == "cpu")["batch"].append(first["prefill_gpu"][0])


def finish_twice(rounds: list[Record]) -> None:
    ended = next(r for r in rounds if r["finished"])
    rounds[-1]["batch"].append(ended["finished"][0])


def overlap(rounds: list[Record]) -> None:
    [r for r in rounds if r["engine"] == "gpu"][1]["duration"] = 1.5


def swap_both_ways(rounds: list[Record]) -> None:
    swap = next(r for r in rounds if r["swap_in"])
    swap["swap_out"] = [99]


def lose_a_token(rounds: list[Record]) -> None:
    whole = next(r for r in rounds if r["engine"] == "gpu" and len(r["batch"]) > 1)
    whole["batch"].pop(0)


def prefill_out_of_order(rounds: list[Record]) -> None:
    first, second = [r for r in rounds if r["prefill_gpu"] or r["prefill_cpu"]][:2]
    for key in ("batch", "prefill_gpu", "prefill_cpu"):
        first[key], second[key] = second[key], first[key]


def forget_a_field(rounds: list[Record]) -> None:
    del rounds[0]["marked"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_capacity, "15 of 14 GPU blocks"),
        (break_envelope, "Equation 2"),
        (run_on_the_wrong_engine, "on the GPU"),
        (finish_twice, "has ended"),
        (overlap, "starts before"),
        (swap_both_ways, "in and out at once"),
        (lose_a_token, "times for"),
        (prefill_out_of_order, "before an earlier one|is cpu-resident|runs, but|ran"),
        (forget_a_field, "no marked"),
    ],
)
def test_damage_is_found(damage: Any, words: str) -> None:
    import re

    rounds, requests = play()
    damaged = copy.deepcopy(rounds)
    damage(damaged)
    problems = check_log(damaged, requests)
    assert any(re.search(words, problem) for problem in problems), problems


def test_the_command_reads_files_and_ends_with_json(tmp_path: Path) -> None:
    rounds, requests = play()
    log, requests_log = tmp_path / "rounds.jsonl", tmp_path / "requests.json"
    log.write_text("".join(json.dumps(r) + "\n" for r in rounds))
    requests_log.write_text(json.dumps(requests))
    command = [sys.executable, "-m", "dualpace.runtime.schedule.check", str(log)]
    good = subprocess.run([*command, "--requests", str(requests_log), "--declared"], text=True,
                          capture_output=True, check=True)  # fmt: skip
    assert json.loads(good.stdout.splitlines()[-1])["problems"] == 0
    rounds[0]["gpu_blocks"]["used"] = -1
    log.write_text("".join(json.dumps(r) + "\n" for r in rounds))
    bad = subprocess.run(command, text=True, capture_output=True)
    assert bad.returncode == 1 and json.loads(bad.stdout.splitlines()[-1])["problems"] == 1
