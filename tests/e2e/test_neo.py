"""The live neo policy: host rows in lockstep with the GPU's rounds change no token."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dualpace.runtime.schedule.check import check_log
from tests.e2e.conftest import Serve, settled
from tests.e2e.crowd import PARAMS, PROMPTS, TIGHT

Rounds = Callable[[], list[dict[str, Any]]]


def lockstep_rows(log: list[dict[str, Any]]) -> int:
    """Rows of GPU rounds whose request lay on the host."""
    host: set[int] = set()
    rows = 0
    for record in log:
        host -= {*record["swap_in"], *record["preempted"], *record["prefill_gpu"]}
        rows += len(host & set(record["batch"]))
        host |= {*record["prefill_cpu"], *record["swap_out"]}
    return rows


def test_tokens_equal_those_of_an_engine_with_room_for_all(
    serve: Serve, rounds: Rounds, undisturbed: list[list[int]]
) -> None:
    with serve(**TIGHT["neo"]) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        stats = settled(llm)
    assert [o.token_ids for o in outputs] == undisturbed
    log = rounds()
    assert check_log(log) == []
    assert {r["engine"] for r in log} == {"gpu"}, "neo has one clock"
    assert lockstep_rows(log) == stats["tokens"]["cpu"] > 50


def test_ranks_change_no_token(serve: Serve, rounds: Rounds, undisturbed: list[list[int]]) -> None:
    """The CPU's one rank attends for both of the accelerator's."""
    some, short = slice(2, 8), replace(PARAMS, max_tokens=20)
    with serve(**{**TIGHT["neo"], "kv.gpu_blocks": 6, "gpu.tp": 2}) as llm:
        outputs = llm.generate(PROMPTS[some], short)
        host_tokens = llm.stats()["tokens"]["cpu"]
    assert [o.token_ids for o in outputs] == [tokens[:20] for tokens in undisturbed[some]]
    log = rounds()
    assert check_log(log) == []
    assert lockstep_rows(log) == host_tokens > 10
