"""The paper's policy on one engine with too little HBM: each side has its own pace, KV moves and
changes no token, parameters do what they say, a worker that a request ends costs no other.
Workers that are killed are the matter of test_tensor_parallel.

An engine in lockstep would give no answer while one of its sides stands still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dualpace import LLM, Output, SamplingParams
from dualpace.runtime.schedule.check import check_log
from tests.e2e import crowd
from tests.e2e.conftest import read_rounds, serving
from tests.e2e.live import Workers, ask, is_idle, orderly_workers, stats_of, stopped, wait_until
from tests.servers import PATIENCE_S

if TYPE_CHECKING:
    from tests.e2e.judges import TinyJudge

LONG_PROMPT = [7] * (16 * crowd.HBM_BLOCKS + 1)  # HBM has no room for it
SHORT_PROMPT = [3] * 20
ANSWER = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dualpace")


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[Workers]:
    with orderly_workers(folder) as workers:
        workers.copy_late()
        yield workers


@pytest.fixture(scope="module")
def llm(folder: Path, workers: Workers) -> Iterator[LLM]:
    with serving(folder, **crowd.TIGHT, **workers.settings) as llm:
        yield llm


@pytest.fixture(autouse=True)
def sound_log(llm: LLM, folder: Path) -> Iterator[None]:
    """After each test, of all rounds so far."""
    yield
    wait_until(llm, is_idle)
    assert check_log(read_rounds(folder)) == []


@contextmanager
def host_resident(llm: LLM) -> Iterator[Future[list[Output]]]:
    """An answer that the host decodes, from its first round on, which lasts while this does."""
    with stopped(llm, "cpu"):
        answer = ask(llm, LONG_PROMPT, ANSWER)
        wait_until(llm, lambda stats: stats["cpu_running"] == 1)
        yield answer
    assert answer.result(PATIENCE_S)[0].tokens_by_engine == {"gpu": 1, "cpu": 39}


def test_the_accelerator_answers_within_one_iteration_of_the_host(llm: LLM) -> None:
    with host_resident(llm) as other:
        before = stats_of(llm)["rounds"]
        (answer,) = llm.generate(SHORT_PROMPT, ANSWER)
        after = stats_of(llm)["rounds"]
        assert not other.done()
    assert answer.tokens_by_engine == {"gpu": 40, "cpu": 0}
    assert after["gpu"] - before["gpu"] >= 40
    assert after.get("cpu", 0) == before.get("cpu", 0)


def test_a_host_resident_answer_ends_within_one_prefill_of_the_accelerator(llm: LLM) -> None:
    with ExitStack() as accelerator:
        with host_resident(llm) as answer:
            accelerator.enter_context(stopped(llm, "gpu"))
            other = ask(llm, SHORT_PROMPT, ANSWER)
            before = wait_until(llm, lambda stats: stats["gpu_running"] == 1)["rounds"]
        after = stats_of(llm)["rounds"]
        assert answer.done() and not other.done()
    assert other.result(PATIENCE_S)[0].tokens_by_engine == {"gpu": 40, "cpu": 0}
    assert after["cpu"] - before.get("cpu", 0) == 39
    assert after["gpu"] == before["gpu"]


def test_late_and_reordered_copies_change_no_token(llm: LLM, tiny: TinyJudge) -> None:
    outputs = crowd.make_move(llm)
    tiny.check(outputs, crowd.PARAMS + crowd.LONG_PARAMS)
    assert any(0 < o.tokens_by_engine["cpu"] < len(o.token_ids) - 1 for o in outputs)


def test_each_parameter_does_something(llm: LLM) -> None:
    """To one prompt's greedy answers, side by side."""
    prompt, greedy = [1, 2, 3, 4] * 4, {"temperature": 0.0, "max_tokens": 24}

    def answers(*asked: dict[str, Any]) -> list[list[int]]:
        params = [SamplingParams(**greedy | {"ignore_eos": True} | each) for each in asked]
        return [output.token_ids for output in llm.generate([prompt] * len(asked), params)]

    (plain,) = answers({})
    (usual, times), *_ = Counter(plain).most_common(1)
    assert times > 2, "the model repeats itself"
    never, always, few, stopped, later, drawn, *penalised = answers(
        {"logit_bias": {usual: -100}},
        {"logit_bias": {usual: 100}},
        {"allowed_token_ids": [3, 5]},
        {"stop_token_ids": [usual]},
        {"stop_token_ids": [usual], "min_tokens": 20, "ignore_eos": False},
        {"temperature": 2.0, "seed": 1, "min_p": 1.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 3.0},
    )
    assert usual not in never and set(always) == {usual} and set(few) <= {3, 5}
    assert stopped == plain[: plain.index(usual) + 1]
    assert len(later) >= 20 and usual not in later[:20]
    assert drawn == plain  # nothing is left but the best
    for answer in penalised:
        assert len(set(answer)) > len(set(plain))


def test_a_request_that_workers_do_not_survive_ends_alone(
    llm: LLM, workers: Workers, tiny: TinyJudge
) -> None:
    """Each side meets one amid a crowd that is spread over both tiers."""
    before = stats_of(llm)
    deadly = {"gpu": ([9] * 30, 777), "cpu": (LONG_PROMPT, 778)}  # prompt and top_k
    prompts = [*crowd.PROMPTS[:4], *[prompt for prompt, _ in deadly.values()], *crowd.PROMPTS[4:]]
    params = crowd.PARAMS[:4] + [replace(ANSWER, top_k=k) for _, k in deadly.values()]
    params += crowd.PARAMS[4:]
    with workers.failing(gpu_0=777, cpu_0=778):
        outputs = llm.generate(prompts, params)
    lost = [outputs.pop(4), outputs.pop(4)]
    assert [o.finish_reason for o in lost] == ["error", "error"]
    assert lost[0].token_ids == [], "its first row was the last"
    tiny.check(outputs, crowd.PARAMS)
    tiny.check(llm.generate(crowd.PROMPTS[:2], crowd.PARAMS[:2]), crowd.PARAMS[:2])
    after = stats_of(llm)
    assert after["given_up"] - before["given_up"] == 2
    for role in ("gpu", "cpu"):
        restarts = after["workers"][role]["restarts"] - before["workers"][role]["restarts"]
        assert restarts >= 2, role  # with others, and alone; or more, where it also assisted
