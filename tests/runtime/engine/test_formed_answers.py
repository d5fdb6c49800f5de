"""Answers keep to their form whatever happens to their requests, and end where it ends.

Workers and forms are played, so that every order of events is the test's.
"""

from typing import Any

import pytest

from dualpace.runtime import messages
from dualpace.runtime.structured import StructuredOutputsParams
from tests.runtime.engine.fake_workers import Batch, Engine, FakeHandle, answer, play
from tests.runtime.engine.forms_case import SevensCompiler, expected, forms_by

PROMPT = 20


def under(text: str) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(regex=text)}


def play_with(compiler: SevensCompiler, story: Any, *overrides: str, **more: Any) -> Engine:
    engine = play(story, *overrides, forms=forms_by(compiler), **more)
    assert engine.failure == ""
    return engine


@pytest.mark.parametrize(
    ("policy", "fault"),
    [("dualpace", "gpu"), ("dualpace", "cpu"), ("gpu_only", None), ("neo", None)],
)
def test_forms_outlive_swaps_recomputes_and_lost_workers(policy: str, fault: str | None) -> None:
    async def story(engine: Engine) -> None:
        for shift in range(5):
            engine.ask([shift], PROMPT, 90, **under(f"{shift} {40 + shift}"))
        engine.ask([6], PROMPT, 50)
        await engine.until_answered()
        await engine.until_idle()

    def lost(handle: FakeHandle, batch: Batch) -> int | None:
        return -11 if handle.role == fault and len(handle.batches) == 9 else None

    engine = play_with(SevensCompiler(), story, f"policy={policy}", fault=lost)
    for shift in range(5):
        assert engine.answers[shift] == expected(shift, PROMPT, shift, 40 + shift)
    assert engine.answers[6] == answer(6, PROMPT, 50)
    assert sum(engine.restarts) == (fault is not None)
    stats = engine.stats()
    assert stats["events"]["preempted"] + stats["transfers"] > 0, "HBM has room for few"


def test_the_longest_answer_and_its_form_end_each_other() -> None:
    async def story(engine: Engine) -> None:
        engine.ask([1], PROMPT, 5, **under("1 9"))
        engine.ask([2], PROMPT, 9, **under("2 5"))
        engine.ask([3], PROMPT, 9, **under("2 5"), min_tokens=8)  # gives way
        await engine.until_answered()

    engine = play_with(SevensCompiler(), story)
    assert [len(engine.answers[i]) for i in (1, 2, 3)] == [5, 5, 5]
    said = [m for m in engine.said if isinstance(m, messages.Tokens)]
    told = [pair for m in said for pair in zip(m.request_ids, m.finished, strict=True)]
    ends = {int(request_id): int(end) for request_id, end in told if end}
    assert ends == {1: messages.LENGTH, 2: messages.STOP, 3: messages.STOP}


def test_where_no_token_is_left_the_request_ends_with_a_sentence() -> None:
    async def story(engine: Engine) -> None:
        engine.ask([1], PROMPT, **under("1 5 dead-end"))
        engine.ask([2], PROMPT, **under("2 9"), allowed_token_ids=[2, 3, 10])  # 4 comes after 3
        engine.ask([3], PROMPT, **under("3 9"), allowed_token_ids=[1, 2])
        engine.ask([4], PROMPT, **under("bad"))
        engine.ask([5], PROMPT, **under("broken"))
        engine.ask([6], PROMPT)
        engine.ask([7], PROMPT, **under("1 9 tiring"))
        engine.ask([8], PROMPT, **under("1 9 breaking"))
        await engine.until_answered()
        await engine.until_idle()

    engine = play_with(SevensCompiler(), story)
    blamed = "structured_outputs"
    assert engine.answers[1] == expected(1, PROMPT, 1, 5) and len(engine.answers[2]) == 2
    assert engine.answers[6] == answer(6, PROMPT, 12)
    assert not any(engine.answers[i] for i in (3, 4, 5))
    assert {param for _, param in engine.refused.values()} == {blamed}
    for request_id, sentence in {
        1: "after 5 tokens no other may come by it and the request's other parameters.",
        2: "after 2 tokens no other may come by it and the request's other parameters.",
        8: "after 1 tokens no other may come by it and the request's other parameters.",
        3: "no token may begin the answer by it and the other parameters.",
        4: "it is bad.",
        7: "after 1 tokens it takes too long to follow, as it can be read in too many ways: "
        "make it simpler.",
        5: "it could not be compiled: the server's log says more.",
    }.items():
        assert engine.refused[request_id][0] == f"{blamed}: {sentence}"


def test_others_are_answered_while_a_form_is_compiled() -> None:
    compiler = SevensCompiler()

    async def story(engine: Engine) -> None:
        engine.ask([1, 2], PROMPT, **under("slow 1 9"))
        engine.ask([3], PROMPT)
        await engine.until(lambda: 3 not in engine.left)
        engine.cancel(2)
        assert engine.left == {1} and engine.answers[1] == []
        engine.on_message(messages.Shutdown(60.0))  # what has been asked before is still answered
        await engine.until(lambda: not engine._accepting)
        engine.ask([4], PROMPT)
        await engine.until(lambda: 4 in engine.refused)
        compiler.may_go_on.set()
        await engine.until_answered()

    engine = play_with(compiler, story)
    assert engine.answers[1] == expected(1, PROMPT, 1, 9)
    assert engine.answers[2] == [] and engine.answers[3] == answer(3, PROMPT, 12)
    assert list(engine.refused) == [4]
