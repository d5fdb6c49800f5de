"""A worker that meets an exception in a batch costs at most the request that causes it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualpace import SamplingParams
from dualpace.runtime.schedule.check import check_log
from tests.e2e.conftest import Serve, settled
from tests.e2e.crowd import PARAMS, PROMPTS, TIGHT
from tests.e2e.failing_worker import DEADLY

Rounds = Callable[[], list[dict[str, Any]]]

SHORT = replace(PARAMS, max_tokens=20)
# Longer than all of HBM: the host decodes it, so that a row of it is in the CPU worker's batches.
LONG_PROMPT = [7] * 500


def deadly(role: str) -> SamplingParams:
    return replace(SHORT, top_k=DEADLY[role])


def test_one_deadly_request_a_worker_ends_alone_and_the_server_goes_on(
    serve: Serve, rounds: Rounds, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are among a crowd that is spread over both tiers, every post-attention assisted."""
    monkeypatch.setenv("FAILING_RANKS", "gpu-0,cpu-0")
    failing = {"runtime.worker_module": "tests.e2e.failing_worker"}
    prompts = [*PROMPTS[:4], [9] * 30, LONG_PROMPT, *PROMPTS[4:]]
    params = [*[SHORT] * 4, deadly("gpu"), deadly("cpu"), *[SHORT] * (len(PROMPTS) - 4)]
    with serve(**TIGHT["dualpace"], **failing) as llm:
        outputs = llm.generate(prompts, params)
        stats = settled(llm)
        again = llm.generate(PROMPTS[:2], SHORT)
    lost = [outputs.pop(4), outputs.pop(4)]
    assert [o.finish_reason for o in lost] == ["error", "error"]
    assert lost[0].token_ids == [], "its first row was the last"
    assert [o.token_ids for o in outputs] == [tokens[:20] for tokens in undisturbed]
    assert [o.token_ids for o in again] == [tokens[:20] for tokens in undisturbed[:2]]
    assert stats["given_up"] == 2
    assert [stats["workers"][role]["restarts"] for role in ("gpu", "cpu")] == [2, 2]
    assert check_log(rounds()) == []
