"""Round records in the fixed format, and the checker that replays them."""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dualpace.runtime.routing import Route
from dualpace.runtime.schedule.check import check_log, main
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
    request.num_preemptions = 2
    assert request_record(request, 2)["preemptions"] == 2
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


def plan_beyond_the_host(rounds: list[Record]) -> None:
    rounds[2]["host_blocks"]["planned"] = 41


def count_below_zero(rounds: list[Record]) -> None:
    rounds[2]["waiting"] = -1


def name_twice(rounds: list[Record]) -> None:
    rounds[0]["prefill_gpu"].append(rounds[0]["prefill_gpu"][0])


def finish_from_outside(rounds: list[Record]) -> None:
    rounds[0]["finished"].append(99)


def run_what_leaves(rounds: list[Record]) -> None:
    swap = next(r for r in rounds if r["swap_out"])
    swap["batch"].append(swap["swap_out"][0])


def move_on_the_cpu_engine(rounds: list[Record]) -> None:
    next(r for r in rounds if r["engine"] == "cpu")["marked"].append(99)


def number_backwards(rounds: list[Record]) -> None:
    [r for r in rounds if r["engine"] == "gpu"][1]["round"] = 0


def run_before_any_prefill(rounds: list[Record]) -> None:
    rounds[0]["batch"].append(99)


def prefill_on_the_other_side(rounds: list[Record]) -> None:
    hosted = next(r for r in rounds if r["prefill_cpu"])["prefill_cpu"][0]
    later = [r for r in rounds if r["engine"] == "gpu" and hosted not in r["prefill_cpu"]]
    later[-1]["prefill_gpu"].append(hosted)


def swap_in_what_is_there(rounds: list[Record]) -> None:
    first = next(r for r in rounds if r["prefill_gpu"])
    rounds[rounds.index(first) + 1]["swap_in"].append(first["prefill_gpu"][0])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (plan_beyond_the_host, "41 of 40 host blocks"),
        (count_below_zero, "negative count"),
        (name_twice, "stands twice in prefill_gpu"),
        (finish_from_outside, "finished without being in the batch"),
        (run_what_leaves, "runs what it swaps out"),
        (move_on_the_cpu_engine, "prefills or moves"),
        (number_backwards, "follows round"),
        (run_before_any_prefill, "99 runs, but its KV is nowhere"),
        (prefill_on_the_other_side, "prefilled while on the host|has ended, then prefill_gpu"),
        (swap_in_what_is_there, "gpu-resident, then swap_in"),
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
    rounds, requests = play()
    damaged = copy.deepcopy(rounds)
    damage(damaged)
    problems = check_log(damaged, requests)
    assert any(re.search(words, problem) for problem in problems), problems


def say_refused(request: Record) -> None:
    request["refused"] = True


def say_too_many(request: Record) -> None:
    request["max_tokens"] = request["output_len"] - 1


def say_another(request: Record) -> None:
    request["id"] = 99


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (say_refused, "was refused and ran"),
        (say_too_many, "tokens of at most"),
        (say_another, "request 99 never finished"),
    ],
)
def test_a_request_log_that_tells_of_another_run_is_found(damage: Any, words: str) -> None:
    rounds, requests = play()
    damage(requests[3])
    assert any(words in problem for problem in check_log(rounds, requests))


def test_a_cancelled_request_may_lack_tokens_and_a_refused_one_has_none() -> None:
    rounds, requests = play()
    left = {"arrival": 99.0, "prompt_len": 5, "max_tokens": 9, "output_len": 0}
    requests += [{**left, "id": 98, "cancelled": True}, {**left, "id": 99, "refused": True}]
    requests[3]["cancelled"] = True
    requests[3]["output_len"] += 1
    requests[3]["max_tokens"] += 1
    assert check_log(rounds, requests) == []


def test_the_command_reads_files_and_ends_with_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds, requests = play()
    log, requests_log = tmp_path / "rounds.jsonl", tmp_path / "requests.json"

    def run(*options: str) -> tuple[int, int]:
        log.write_text("".join(json.dumps(r) + "\n" for r in rounds))
        requests_log.write_text(json.dumps(requests))
        monkeypatch.setattr(sys, "argv", ["check", str(log), *options])
        status = main()
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])["problems"]

    assert run("--requests", str(requests_log), "--declared") == (0, 0)
    rounds[0]["gpu_blocks"]["used"] = -1
    assert run() == (1, 1)


@pytest.mark.parametrize(
    ("rounds", "requests", "sentence"),
    [
        (
            b'{"engine": "gpu"}\n{"engine"',
            b"[]",
            "rounds, line 2, is no round: a round log",
        ),
        (b"[1]", b"[]", "rounds, line 1, is no round"),
        (b"\xff", b"[]", "rounds is no log: it is no UTF-8 text."),
        (b"", b"{}", "requests is no request log: that is one JSON list of objects."),
        (b"", b"[1]", "requests is no request log"),
        (b"", None, "requests cannot be read (No such file or directory)."),
    ],
)
def test_a_file_that_is_no_log_is_a_sentence(
    rounds: bytes,
    requests: bytes | None,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = tmp_path / "rounds", tmp_path / "requests"
    files[0].write_bytes(rounds)
    if requests is not None:
        files[1].write_bytes(requests)
    monkeypatch.setattr(sys, "argv", ["check", str(files[0]), "--requests", str(files[1])])
    with pytest.raises(SystemExit, match=re.escape(f"{tmp_path}/{sentence}")):
        main()
