"""Forms are tried and compiled once, beside the loop, and not kept for ever."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from dualpace.runtime.engine.forms import FormRefused, Forms, FormsBusy
from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.structured import Structure
from tests.runtime.engine.forms_case import PlayedTrials, SevensCompiler
from tests.servers import PATIENCE_S

Story = Callable[["Played"], Coroutine[Any, Any, None]]


class Played:
    """Forms whose trials and compiling the test paces."""

    def __init__(self, **limits: Any) -> None:
        self.compiler = SevensCompiler()
        self.trials = PlayedTrials()
        self.forms = Forms(lambda: self.compiler, self.trials, **limits)

    async def guide(self, text: str, asked_as: str = "here") -> Guide:
        return await self.forms.guide(Structure("regex", text, asked_as))

    def ask(self, text: str) -> "asyncio.Task[Guide]":
        return asyncio.create_task(self.guide(text))

    async def until_tried(self, *texts: str) -> None:
        while self.trials.running != list(texts):
            await asyncio.sleep(0)


def play(story: Story, **limits: Any) -> Played:
    played = Played(**limits)

    async def run() -> None:
        await asyncio.wait_for(story(played), PATIENCE_S)

    asyncio.run(run())
    return played


def test_one_form_is_tried_and_compiled_once_whoever_asks() -> None:
    async def story(played: Played) -> None:
        guides = await asyncio.gather(*map(played.guide, ("1 9", "1 9", "2 9")))
        again = await played.guide("1 9", asked_as="elsewhere")
        assert guides[0].follow(1) and again.allows(1) and guides[1].allows(1)
        assert not guides[0].allows(1) and guides[2].allows(2)

    played = play(story)
    assert sorted(played.compiler.compiled) == sorted(played.trials.tried) == ["1 9", "2 9"]


@pytest.mark.parametrize("limits", [{"kept_bytes": 250}, {"kept_forms": 2}])
def test_the_longest_unused_are_forgotten(limits: dict[str, int]) -> None:
    async def story(played: Played) -> None:
        for text in ("1 9", "2 9", "1 9", "3 9", "1 9", "2 9"):
            await played.guide(text)

    assert play(story, **limits).compiler.compiled == ["1 9", "2 9", "3 9", "2 9"]


def test_refusals_are_forgotten_too() -> None:
    async def story(played: Played) -> None:
        for text in ("bad", "1 9", "2 9", "bad"):
            with suppress(FormRefused):
                await played.guide(text)

    assert play(story, kept_forms=2).compiler.compiled == ["bad", "1 9", "2 9", "bad"]


@pytest.mark.parametrize(
    ("text", "why", "compiled"), [("bad", "it is bad", ["bad"]), ("crashing", "library fails", [])]
)
def test_a_bad_one_is_refused_and_not_tried_again(text: str, why: str, compiled: list[str]) -> None:
    async def story(played: Played) -> None:
        for _ in range(2):
            with pytest.raises(FormRefused, match=why):
                await played.guide(text)

    played = play(story)
    assert played.trials.tried == [text] and played.compiler.compiled == compiled


def test_one_whose_trial_was_lost_is_tried_again_when_asked_again() -> None:
    async def story(played: Played) -> None:
        with pytest.raises(FormsBusy, match="lost"):
            await played.guide("lost 1 9")
        assert (await played.guide("lost 1 9")).allows(1)

    played = play(story)
    assert played.trials.tried == ["lost 1 9"] * 2 and played.trials.num_starts == 2


def test_who_waits_for_a_trial_is_not_told_to_be_simpler() -> None:
    async def story(played: Played) -> None:
        long = [played.ask(f"long {i} 9") for i in (1, 2)]
        await played.until_tried("long 1 9", "long 2 9")
        with pytest.raises(FormsBusy, match=r"^other forms are being compiled: send it again"):
            await played.guide("3 9")
        played.trials.may_end.set()
        await asyncio.gather(*long)
        assert (await played.guide("3 9")).allows(3)

    tried = play(story, queue_limit_s=0.01, usual_s=PATIENCE_S).trials.tried
    assert tried == ["long 1 9", "long 2 9", "3 9"]


def test_slow_ones_make_room_and_are_few() -> None:
    async def story(played: Played) -> None:
        slow = [played.ask(f"long {i} 9") for i in (1, 2)]
        await played.until_tried("long 1 9", "long 2 9")
        for _ in range(2):
            with pytest.raises(FormsBusy, match="more than 0 s to compile, as others do just now"):
                await played.guide("long 3 9")
        assert played.trials.running == ["long 1 9", "long 2 9"]
        assert (await played.guide("4 9")).allows(4)
        played.trials.may_end.set()
        assert [(await task).allows(i) for i, task in enumerate(slow, 1)] == [True, True]
        assert (await played.guide("long 3 9")).allows(3)

    play(story, usual_s=0)


@pytest.mark.parametrize("usual_s", [0, PATIENCE_S])
def test_a_form_that_nobody_waits_for_gives_its_place_up(usual_s: float) -> None:
    async def story(played: Played) -> None:
        long = [played.ask(f"long {i} 9") for i in (1, 2)]
        await played.until_tried("long 1 9", "long 2 9")
        queued = played.ask("long 3 9") if usual_s else None
        last = played.ask("4 9")
        for task in (*long, queued):
            if task is not None:
                task.cancel()
        assert (await last).allows(4)
        await played.until_tried()
        played.trials.may_end.set()
        assert (await played.guide("long 1 9")).allows(1)

    tried = play(story, usual_s=usual_s).trials.tried
    assert tried == ["long 1 9", "long 2 9", "4 9", "long 1 9"]


@pytest.mark.parametrize("pace", ["long", "slow"])
def test_who_gives_up_takes_nothing_from_the_others(pace: str) -> None:
    async def story(played: Played) -> None:
        first, second = (played.ask(f"{pace} 1 9") for _ in range(2))
        while not (played.trials.running or played.compiler.compiled):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        played.trials.may_end.set()
        played.compiler.may_go_on.set()
        assert (await second).allows(1) and first.cancelled()

    assert play(story).compiler.compiled == [f"{pace} 1 9"]


def test_what_is_being_compiled_is_kept_though_nobody_waits() -> None:
    async def story(played: Played) -> None:
        slow = played.ask("slow 1 9")
        while not played.compiler.compiled:
            await asyncio.sleep(0)
        slow.cancel()
        assert (await played.guide("2 9")).allows(2), "a thread holds no trial up"
        played.compiler.may_go_on.set()
        assert (await played.guide("slow 1 9")).allows(1)

    assert play(story).compiler.compiled == ["slow 1 9", "2 9"]


def test_closing_ends_what_runs() -> None:
    async def story(played: Played) -> None:
        task = played.ask("long 1 9")
        await played.until_tried("long 1 9")
        played.forms.close()
        await asyncio.wait({task})
        assert task.cancelled() and played.trials.running == []

    assert play(story).trials.is_closed


def test_every_request_hears_why_nothing_can_be_compiled() -> None:
    def load() -> SevensCompiler:
        raise FormRefused("there is no library")

    async def run() -> None:
        forms = Forms(load, PlayedTrials())
        for _ in range(2):
            with pytest.raises(FormRefused, match="no library"):
                await forms.guide(Structure("regex", "1 9", "here"))

    asyncio.run(run())
