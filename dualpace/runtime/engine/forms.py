"""Forms of answers, compiled for the model's vocabulary beside the loops: a large one takes
seconds.

What is compiled is kept, and so is why something cannot be. Knows nothing about requests, nor about
the library that compiles.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.structured import Structure

T = TypeVar("T")

COMPILE_LIMIT_S = 30.0  # then a request is refused; what it asked for is still compiled and kept
_QUEUE_LIMIT_S = 30.0  # to wait for a thread
_NUM_THREADS = 2  # that compile: one slow form does not stop the others
_MAX_ASIDE = 2  # threads beyond these, for forms over the limit: others need not wait for them
_KEPT_BYTES = 256 << 20


class FormRefused(ValueError):
    """No answer can be held to this form; the text says why."""


class FormsBusy(FormRefused):
    """Not now: all threads compile other forms."""


class Form(Protocol):
    @property
    def nbytes(self) -> int: ...

    def guide(self) -> Guide:
        """For an answer that begins."""


class Compiler(Protocol):
    def compile(self, kind: str, text: str) -> Form:
        """Of `structured.Structure`. Raises FormRefused."""


@dataclass(eq=False)
class _Kept:
    """A form that is compiled, or is to be."""

    task: "asyncio.Task[Form]"
    began: "asyncio.Future[None]"  # done when it has got a thread
    num_waiting: int = 0


class Forms:
    """All of one engine. Its methods are called on the event loop."""

    def __init__(
        self,
        load: Callable[[], Compiler],
        limit_s: float = COMPILE_LIMIT_S,
        queue_limit_s: float = _QUEUE_LIMIT_S,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        """`load` is called in a thread when the first form comes; it may raise FormRefused."""
        self._load = load
        self._limit_s = limit_s
        self._queue_limit_s = queue_limit_s
        self._kept_bytes = kept_bytes
        self._compiler: asyncio.Future[Compiler] | None = None
        self._forms: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._free_threads = asyncio.Semaphore(_NUM_THREADS)
        self._num_aside = 0

    async def guide(self, structure: Structure) -> Guide:
        """Raises FormRefused, also where compiling takes too long, and FormsBusy. May be
        cancelled."""
        if self._compiler is None:
            self._compiler = _in_thread(self._load)
        await asyncio.wait({self._compiler})
        compiler = self._compiler.result()
        key = structure.kind, structure.text
        if key not in self._forms:
            began = asyncio.get_running_loop().create_future()
            work = self._compile(partial(compiler.compile, *key), began)
            self._forms[key] = _Kept(asyncio.create_task(work), began)
        self._forms.move_to_end(key)
        kept = self._forms[key]
        kept.num_waiting += 1
        try:
            return (await self._made(kept)).guide()
        finally:
            kept.num_waiting -= 1
            if not kept.num_waiting and not kept.began.done():
                kept.task.cancel()  # nobody waits, so those behind it need not either
                if self._forms.get(key) is kept:
                    del self._forms[key]

    async def _made(self, kept: _Kept) -> Form:
        await asyncio.wait({kept.began}, timeout=self._queue_limit_s)
        if not kept.began.done():
            raise FormsBusy("other forms are being compiled: send it again in some seconds")
        await asyncio.wait({kept.task}, timeout=self._limit_s)
        self._forget_the_oldest()
        if not kept.task.done():
            raise FormRefused(
                f"it takes more than {self._limit_s:g} s to compile: make it simpler, or send it "
                f"again when it may be ready"
            )
        return kept.task.result()

    async def _compile(self, make: Callable[[], Form], began: "asyncio.Future[None]") -> Form:
        await self._free_threads.acquire()
        began.set_result(None)
        made = _in_thread(make)
        await asyncio.wait({made}, timeout=self._limit_s)
        is_aside = not made.done() and self._num_aside < _MAX_ASIDE
        if is_aside:
            self._num_aside += 1
            self._free_threads.release()
        try:
            return await made
        finally:
            if is_aside:
                self._num_aside -= 1
            else:
                self._free_threads.release()

    def _forget_the_oldest(self) -> None:
        """But never the one that was asked for last."""
        total = sum(map(_size, self._forms.items()))
        while total > self._kept_bytes and len(self._forms) > 1:
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
