"""Several ranks a side, real processes: tokens are those of one, whoever moves KV or assists, and
whichever rank dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualpace.runtime.schedule.check import check_log
from tests.e2e import crowd
from tests.e2e.conftest import Rounds, Serve
from tests.e2e.live import Workers, is_idle, stats_of, takes_cores, wait_until

if TYPE_CHECKING:
    from tests.e2e.judges import TinyJudge


pytestmark = takes_cores


def test_ranks_of_unlike_numbers_change_no_token(
    serve: Serve, rounds: Rounds, tiny: TinyJudge
) -> None:
    """An accelerator's one rank fills the pools of both of the host's, which add by gloo. (Two and
    one meet in test_neo.)"""
    ranks = {"gpu.tp": 1, "cpu.tp": 2, "cpu.all_reduce": "gloo"}
    with serve(**crowd.TIGHT, **ranks) as llm:
        tiny.check(crowd.make_move(llm), crowd.PARAMS + crowd.LONG_PARAMS)
    assert check_log(rounds()) == []


def test_ranks_change_no_token_and_those_that_die_cost_no_answer(
    serve: Serve, rounds: Rounds, workers: Workers, tiny: TinyJudge
) -> None:
    """Each that dies has work left then: some are never out of HBM before their 20 tokens, and the
    host decodes 35 tokens of the longest."""
    ranks = {"gpu.tp": 2, "cpu.tp": 2}
    with serve(**crowd.TIGHT, **ranks, **workers.settings) as llm:
        tiny.check(crowd.make_move(llm), crowd.PARAMS + crowd.LONG_PARAMS)
        before = stats_of(llm)
        workers.die(gpu_1=12, cpu_1=10)
        tiny.check(crowd.ask_all(llm), crowd.PARAMS + crowd.LONG_PARAMS)
        stats = wait_until(llm, is_idle)
    for role, after in stats["workers"].items():
        assert after["restarts"] == 1
        assert len(after["pids"]) == 2
        assert not set(before["workers"][role]["pids"]) & set(after["pids"])
    preempted = stats["events"]["preempted"] - before["events"].get("preempted", 0)
    assert preempted > 0, "the accelerator had nothing to lose"
    assert check_log(rounds()) == []
