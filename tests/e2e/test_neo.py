"""The live neo policy: host rows in lockstep with the GPU's rounds change no token, and worker
deaths lose none."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dualpace import SamplingParams
from dualpace.runtime.schedule.check import check_log
from tests.e2e.conftest import Serve

Rounds = Callable[[], list[dict[str, Any]]]

# HBM for about two requests; `launch_ms` below 0 makes the predictor say that all CPU attention
# hides, so that many host rows run beside the GPU's.
TIGHT = {
    "policy": "neo",
    "policy.launch_ms": -1000.0,
    "kv.gpu_blocks": 12,
    "kv.host_blocks": 400,
    "kv.output_estimate": "declared",
}
PROMPTS = [[i + 1] * (5 + 7 * i) for i in range(14)]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    from dualpace import LLM

    room = {"model.dtype": "float32", "compile.backend": "eager", "kv.gpu_blocks": 512}
    with LLM("random:tiny", **room) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


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
    with serve(**TIGHT) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        stats = llm.stats()
    assert [o.token_ids for o in outputs] == undisturbed
    assert stats["gpu_blocks"]["used"] == stats["host_blocks"]["used"] == 0
    log = rounds()
    assert check_log(log) == []
    assert {r["engine"] for r in log} == {"gpu"}, "neo has one clock"
    assert lockstep_rows(log) == stats["tokens"]["cpu"] > 50


@pytest.mark.parametrize("role", ["gpu", "cpu"])
def test_a_killed_worker_costs_no_answer(
    role: str, serve: Serve, rounds: Rounds, undisturbed: list[list[int]]
) -> None:
    with serve(**TIGHT) as llm:
        victim = llm.stats()["workers"][role]["pid"]
        killer = threading.Thread(target=kill_when_busy, args=(llm, victim))
        killer.start()
        outputs = llm.generate(PROMPTS, PARAMS)
        killer.join()
        stats = llm.stats()
    assert stats["workers"][role]["restarts"] == 1
    assert [o.token_ids for o in outputs] == undisturbed
    assert stats["gpu_blocks"]["used"] == stats["host_blocks"]["used"] == 0
    assert check_log(rounds()) == []


def kill_when_busy(llm: Any, pid: int) -> None:
    while llm.stats()["tokens"].get("cpu", 0) < 20:
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
