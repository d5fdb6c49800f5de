"""Forms are compiled once, beside the loop, and not for ever."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dualpace.runtime.engine.forms import FormRefused, Forms, FormsBusy
from dualpace.runtime.structured import Structure
from tests.runtime.engine.forms_case import SevensCompiler

Story = Callable[[Forms, SevensCompiler], Coroutine[Any, Any, None]]


def form(text: str) -> Structure:
    return Structure("regex", text, "here")


def play(story: Story, **limits: Any) -> list[str]:
    """What has been compiled, in order."""
    compiler = SevensCompiler()

    async def run() -> None:
        await story(Forms(lambda: compiler, **limits), compiler)

    asyncio.run(run())
    return compiler.compiled


def test_one_form_is_compiled_once_whoever_asks() -> None:
    async def story(forms: Forms, compiler: SevensCompiler) -> None:
        guides = await asyncio.gather(*(forms.guide(form(text)) for text in ("1 9", "1 9", "2 9")))
        again = await forms.guide(form("1 9")._replace(asked_as="elsewhere"))
        assert guides[0].follow(1) and again.allows(1) and guides[1].allows(1)
        assert not guides[0].allows(1) and guides[2].allows(2)

    assert sorted(play(story)) == ["1 9", "2 9"]


def test_the_longest_unused_are_forgotten() -> None:
    async def story(forms: Forms, compiler: SevensCompiler) -> None:
        for text in ("1 9", "2 9", "1 9", "3 9", "1 9", "2 9"):
            await forms.guide(form(text))

    assert play(story, kept_bytes=250) == ["1 9", "2 9", "3 9", "2 9"]


def test_a_bad_one_is_refused_and_not_tried_again() -> None:
    async def story(forms: Forms, compiler: SevensCompiler) -> None:
        for _ in range(2):
            with pytest.raises(FormRefused, match="it is bad"):
                await forms.guide(form("bad"))

    assert play(story) == ["bad"]


def test_a_slow_one_is_refused_stops_no_other_and_is_ready_later() -> None:
    async def story(forms: Forms, compiler: SevensCompiler) -> None:
        with pytest.raises(FormRefused, match="more than 0 s to compile"):
            await forms.guide(form("slow 1 9"))
        forms._limit_s = 60
        assert (await forms.guide(form("2 9"))).allows(2)
        compiler.may_go_on.set()
        assert (await forms.guide(form("slow 1 9"))).allows(1)

    assert play(story, limit_s=0) == ["slow 1 9", "2 9"]


def test_who_waits_for_a_thread_is_not_told_to_be_simpler() -> None:
    async def story(forms: Forms, compiler: SevensCompiler) -> None:
        slow = [asyncio.create_task(forms.guide(form(f"slow {i} 9"))) for i in (1, 2)]
        while len(compiler.compiled) < 2:
            await asyncio.sleep(0)
        with pytest.raises(FormsBusy, match="send it again"):
            await forms.guide(form("3 9"))
        compiler.may_go_on.set()
        await asyncio.gather(*slow)
        forms._queue_limit_s = 60
        assert (await forms.guide(form("4 9"))).allows(4)

    assert sorted(play(story, queue_limit_s=0.01)) == ["4 9", "slow 1 9", "slow 2 9"]


def test_forms_over_the_limit_make_room_up_to_a_bound() -> None:
    async def story(forms: Forms, compiler: SevensCompiler) -> None:
        for i in range(4):
            with pytest.raises(FormRefused, match="to compile"):
                await forms.guide(form(f"slow {i} 9"))
        forms._queue_limit_s = 0.01
        with pytest.raises(FormsBusy):
            await forms.guide(form("5 9"))
        compiler.may_go_on.set()
        forms._queue_limit_s = forms._limit_s = 60
        assert (await forms.guide(form("6 9"))).allows(6)

    assert sorted(play(story, limit_s=0)) == ["6 9", *(f"slow {i} 9" for i in range(4))]


def test_who_gives_up_takes_nothing_from_the_others() -> None:
    async def story(forms: Forms, compiler: SevensCompiler) -> None:
        first, second = (asyncio.create_task(forms.guide(form("slow 1 9"))) for _ in range(2))
        while not compiler.compiled:
            await asyncio.sleep(0)
        first.cancel()
        compiler.may_go_on.set()
        assert (await second).allows(1) and first.cancelled()

    assert play(story) == ["slow 1 9"]


def test_every_request_hears_why_nothing_can_be_compiled() -> None:
    def load() -> SevensCompiler:
        raise FormRefused("there is no library")

    async def run() -> None:
        forms = Forms(load)
        for _ in range(2):
            with pytest.raises(FormRefused, match="no library"):
                await forms.guide(form("1 9"))

    asyncio.run(run())
