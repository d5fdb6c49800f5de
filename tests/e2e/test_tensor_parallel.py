"""Several ranks a side, real processes: tokens are those of one, whoever moves KV or assists, and
whichever rank dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dualpace.runtime.schedule.check import check_log
from tests.e2e import crowd
from tests.e2e.conftest import Rounds, Serve
from tests.e2e.live import Workers, is_idle, stats_of, takes_cores, wait_until

if TYPE_CHECKING:
    from tests.e2e.judges import TinyJudge


pytestmark = takes_cores


@pytest.mark.parametrize(
    "ranks", [{"gpu.tp": 2, "cpu.tp": 1}, {"gpu.tp": 1, "cpu.tp": 2, "cpu.all_reduce": "gloo"}]
)
def test_ranks_change_no_token(
    ranks: dict[str, Any], serve: Serve, rounds: Rounds, tiny: TinyJudge
) -> None:
    with serve(**crowd.TIGHT, **ranks) as llm:
        tiny.check(crowd.make_move(llm), crowd.PARAMS + crowd.LONG_PARAMS)
    assert check_log(rounds()) == []


def test_ranks_that_die_cost_no_answer(
    serve: Serve, rounds: Rounds, workers: Workers, tiny: TinyJudge
) -> None:
    """Each has work left then: some are never out of HBM before their 20 tokens, and the host
    decodes 35 tokens of the longest."""
    ranks = {"gpu.tp": 2, "cpu.tp": 2}
    with serve(**crowd.TIGHT, **ranks, **workers.settings) as llm:
        before = stats_of(llm)["workers"]
        workers.die(gpu_1=12, cpu_1=10)
        tiny.check(crowd.ask_all(llm), crowd.PARAMS + crowd.LONG_PARAMS)
        stats = wait_until(llm, is_idle)
    for role, after in stats["workers"].items():
        assert after["restarts"] == 1
        assert len(after["pids"]) == 2 and not set(before[role]["pids"]) & set(after["pids"])
    assert check_log(rounds()) == []
