"""Each engine goes on while the other is within one round, however long that takes.

A signal stops the worker of one side: what its engine has asked of it is then a round without end.
The other side's whole answers must come meanwhile; engines in lockstep would give none.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from dualpace import LLM, Output, SamplingParams

HBM_BLOCKS = 10
LONG_PROMPT = [7] * (16 * HBM_BLOCKS + 1)  # HBM has no room for it
SHORT_PROMPT = [3] * 20
ANSWER = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {
        "model.dtype": "float32",
        "compile.backend": "eager",
        "kv.gpu_blocks": HBM_BLOCKS,
        "kv.host_blocks": 64,
        "kv.output_estimate": "declared",
    }
    with LLM("random:tiny", **settings) as llm:
        yield llm


@contextmanager
def stopped(llm: LLM, role: str) -> Iterator[None]:
    """That side's worker stands still."""
    pid = llm.stats()["workers"][role]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_until(llm: LLM, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The statistics once this holds of them; pytest's own timeout ends what never does."""
    while not holds(stats := llm.stats()):
        time.sleep(0.01)
    return stats


@contextmanager
def host_resident(llm: LLM) -> Iterator[Future[list[Output]]]:
    """An answer that the host decodes, from its first round on, which lasts while this does."""
    with ThreadPoolExecutor(1) as pool:
        with stopped(llm, "cpu"):
            answer = pool.submit(llm.generate, LONG_PROMPT, ANSWER)
            wait_until(llm, lambda stats: stats["cpu_running"] == 1)
            yield answer
        assert answer.result()[0].tokens_by_engine == {"gpu": 1, "cpu": 59}


def test_the_accelerator_answers_within_one_iteration_of_the_host(llm: LLM) -> None:
    with host_resident(llm) as other:
        before = llm.stats()["rounds"]
        (answer,) = llm.generate(SHORT_PROMPT, ANSWER)
        after = llm.stats()["rounds"]
        assert not other.done()
    assert answer.tokens_by_engine == {"gpu": 60, "cpu": 0}
    assert after["gpu"] - before["gpu"] >= 60
    assert after.get("cpu", 0) == before.get("cpu", 0)


def test_a_host_resident_answer_ends_within_one_prefill_of_the_accelerator(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        with ExitStack() as accelerator:
            with host_resident(llm) as answer:
                accelerator.enter_context(stopped(llm, "gpu"))
                other = pool.submit(llm.generate, SHORT_PROMPT, ANSWER)
                before = wait_until(llm, lambda stats: stats["gpu_running"] == 1)["rounds"]
            after = llm.stats()["rounds"]
            assert answer.done() and not other.done()
        assert other.result()[0].tokens_by_engine == {"gpu": 60, "cpu": 0}
    assert after["cpu"] - before.get("cpu", 0) == 59
    assert after["gpu"] == before["gpu"]
