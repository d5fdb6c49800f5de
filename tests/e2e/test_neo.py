"""The live neo policy: host rows in lockstep with the GPU's rounds change no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dualpace import LLM
from dualpace.runtime.schedule.check import check_log
from tests.e2e import crowd
from tests.e2e.conftest import Rounds, Serve, read_rounds, serving
from tests.e2e.live import Workers, is_idle, orderly_workers, stats_of, takes_cores, wait_until

if TYPE_CHECKING:
    from tests.e2e.judges import TinyJudge


def lockstep_rows(log: list[dict[str, Any]]) -> int:
    """Rows of GPU rounds whose request lay on the host."""
    host: set[int] = set()
    rows = 0
    for record in log:
        host -= {*record["swap_in"], *record["preempted"], *record["prefill_gpu"]}
        rows += len(host & set(record["batch"]))
        host |= {*record["prefill_cpu"], *record["swap_out"]}
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("neo")


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[Workers]:
    with orderly_workers(folder) as workers:
        yield workers


@pytest.fixture(scope="module")
def llm(folder: Path, workers: Workers) -> Iterator[LLM]:
    with serving(folder, **crowd.NEO, **workers.settings) as llm:
        yield llm


def test_host_rows_change_no_token(llm: LLM, folder: Path, tiny: TinyJudge) -> None:
    tiny.check(llm.generate(crowd.PROMPTS, crowd.PARAMS), crowd.PARAMS)
    stats = wait_until(llm, is_idle)
    log = read_rounds(folder)
    assert check_log(log) == []
    assert {r["engine"] for r in log} == {"gpu"}, "neo has one clock"
    assert lockstep_rows(log) == stats["tokens"]["cpu"] > 50


def test_workers_that_die_cost_no_answer(
    llm: LLM, folder: Path, workers: Workers, tiny: TinyJudge
) -> None:
    before = stats_of(llm)["events"]["preempted"]
    workers.die(gpu_0=10, cpu_0=20)
    tiny.check(llm.generate(crowd.PROMPTS, crowd.PARAMS), crowd.PARAMS)
    stats = wait_until(llm, is_idle)
    restarts = [stats["workers"][role]["restarts"] for role in ("gpu", "cpu")]
    assert restarts == [2, 1], "a round in lockstep ends with either"
    assert stats["events"]["preempted"] > before, "the accelerator had nothing to lose"
    assert check_log(read_rounds(folder)) == []


@takes_cores
def test_ranks_change_no_token(
    serve: Serve, rounds: Rounds, workers: Workers, tiny: TinyJudge
) -> None:
    """The CPU's one rank attends for both of the accelerator's."""
    some = slice(0, 6)
    tight = {**crowd.NEO, "kv.gpu_blocks": 6, "gpu.tp": 2}
    with serve(**tight, **workers.settings) as llm:
        tiny.check(llm.generate(crowd.PROMPTS[some], crowd.PARAMS[some]), crowd.PARAMS[some])
        host_tokens = stats_of(llm)["tokens"]["cpu"]
    log = rounds()
    assert check_log(log) == []
    assert lockstep_rows(log) == host_tokens > 10
