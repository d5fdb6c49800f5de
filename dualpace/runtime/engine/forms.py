"""Forms of answers, tried and then compiled for the model's vocabulary, beside the loops: a large
one takes seconds.

What is compiled is kept, and so is why something cannot be. Knows nothing about requests, nor about
the library that compiles, nor where forms are tried.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.structured import Structure

T = TypeVar("T")

_QUEUE_LIMIT_S = 30.0  # to wait for a trial
_NUM_TRIALS = 2  # at once, of forms that take as long as most
_USUAL_S = 2.0  # they take less, and others wait for them no longer
_NUM_SLOW = 2  # trials beside those, of forms that take more
_KEPT_BYTES = 256 << 20
_KEPT_FORMS = 1000  # small ones, and refusals, take more than their bytes


class FormRefused(ValueError):
    """No answer can be held to this form; the text says why."""


class FormsBusy(FormRefused):
    """Not now; the form is not to blame."""


class Form(Protocol):
    @property
    def nbytes(self) -> int: ...

    def guide(self) -> Guide:
        """For an answer that begins."""


class Compiler(Protocol):
    def compile(self, kind: str, text: str) -> Form:
        """Of `structured.Structure`. Raises FormRefused."""


class Trials(Protocol):
    """Where a form may do what it likes before it is compiled here."""

    async def start(self) -> None:
        """Returns when there is such a place, or none to be had."""

    async def attempt(self, kind: str, text: str) -> None:
        """Raises FormRefused, also for what ends in no time or not well, and FormsBusy. May be
        cancelled."""

    def close(self) -> None: ...


@dataclass(eq=False)
class _Kept:
    """A form that is compiled, or is to be."""

    began: "asyncio.Future[None]"  # done when its trial has begun
    task: "asyncio.Task[Form]" = field(init=False)
    num_waiting: int = 0
    is_tried: bool = False


class Forms:
    """All of one engine. Its methods are called on the event loop."""

    def __init__(
        self,
        load: Callable[[], Compiler],
        trials: Trials,
        queue_limit_s: float = _QUEUE_LIMIT_S,
        usual_s: float = _USUAL_S,
        kept_bytes: int = _KEPT_BYTES,
        kept_forms: int = _KEPT_FORMS,
    ) -> None:
        """`load` is called in a thread when the first form comes; it may raise FormRefused."""
        self._load = load
        self._trials = trials
        self._queue_limit_s = queue_limit_s
        self._usual_s = usual_s
        self._kept_bytes = kept_bytes
        self._kept_forms = kept_forms
        self._compiler: asyncio.Future[Compiler] | None = None
        self._forms: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._places = asyncio.Semaphore(_NUM_TRIALS)
        self._slow_places = asyncio.Semaphore(_NUM_SLOW)

    def close(self) -> None:
        """Nobody waits any more."""
        for kept in self._forms.values():
            kept.task.cancel()
        self._trials.close()

    async def guide(self, structure: Structure) -> Guide:
        """Raises FormRefused, also where compiling takes too long, and FormsBusy. May be
        cancelled."""
        key = structure.kind, structure.text
        compiler = await self._loaded(key)
        if key not in self._forms:
            kept = _Kept(asyncio.get_running_loop().create_future())
            kept.task = asyncio.create_task(self._make(compiler, key, kept))
            self._forms[key] = kept
        self._forms.move_to_end(key)
        kept = self._forms[key]
        kept.num_waiting += 1
        try:
            return (await self._made(kept)).guide()
        finally:
            kept.num_waiting -= 1
            if not (kept.num_waiting or kept.is_tried or kept.task.done()):
                kept.task.cancel()  # nobody waits, so those behind it need not either
                self._forget(key, kept)

    async def _loaded(self, key: tuple[str, str]) -> Compiler:
        """With a place for the form's trial, if it is new."""
        if self._compiler is None:
            self._compiler = _in_thread(self._load)
        if key not in self._forms:
            await self._trials.start()
        await asyncio.wait({self._compiler})
        return self._compiler.result()

    async def _made(self, kept: _Kept) -> Form:
        either: set[asyncio.Future[Any]] = {kept.began, kept.task}
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait(either, timeout=self._queue_limit_s, return_when=first)
        if not kept.began.done():
            raise FormsBusy("other forms are being compiled: send it again in some seconds")
        await asyncio.wait({kept.task})
        self._forget_the_oldest()
        return kept.task.result()

    async def _make(self, compiler: Compiler, key: tuple[str, str], kept: _Kept) -> Form:
        """There are not many threads at a time: each takes as long as a trial has taken."""
        try:
            await self._try(key, kept)
        except FormsBusy:
            self._forget(key, kept)
            raise
        kept.is_tried = True
        return await _in_thread(partial(compiler.compile, *key))

    async def _try(self, key: tuple[str, str], kept: _Kept) -> None:
        await self._places.acquire()
        kept.began.set_result(None)
        trial = asyncio.create_task(self._trials.attempt(*key))
        try:
            try:
                await asyncio.wait({trial}, timeout=self._usual_s)
            finally:
                self._places.release()
            if trial.done():
                return trial.result()
            if self._slow_places.locked():
                what = f"it takes more than {self._usual_s:g} s to compile, as others do just now"
                raise FormsBusy(f"{what}: make it simpler, or send it again later")
            async with self._slow_places:
                await trial
        finally:
            trial.cancel()

    def _forget(self, key: tuple[str, str], kept: _Kept) -> None:
        if self._forms.get(key) is kept:
            del self._forms[key]

    def _forget_the_oldest(self) -> None:
        """But never the one that was asked for last."""
        total = sum(map(_size, self._forms.items()))
        while len(self._forms) > 1 and (
            total > self._kept_bytes or len(self._forms) > self._kept_forms
        ):
            total -= _size(self._forms.popitem(last=False))


def _size(item: tuple[tuple[str, str], _Kept]) -> int:
    (_, text), task = item[0], item[1].task
    is_there = task.done() and not task.cancelled() and task.exception() is None
    return 4 * len(text) + (task.result().nbytes if is_there else 0)


def _in_thread(function: Callable[[], T]) -> "asyncio.Future[T]":
    """In one that nobody waits for when the engine ends."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # raised again where the result is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="forms", daemon=True).start()
    return asyncio.wrap_future(done)
