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
from functools import partial
from typing import Protocol, TypeVar

from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.structured import Structure

T = TypeVar("T")

COMPILE_LIMIT_S = 30.0  # then a request is refused; what it asked for is still compiled and kept
_NUM_THREADS = 2  # that compile: one slow form does not stop the others
_KEPT_BYTES = 256 << 20


class FormRefused(ValueError):
    """No answer can be held to this form; the text says why."""


class Form(Protocol):
    @property
    def nbytes(self) -> int: ...

    def guide(self) -> Guide:
        """For an answer that begins."""


class Compiler(Protocol):
    def compile(self, kind: str, text: str) -> Form:
        """Of `structured.Structure`. Raises FormRefused."""


class Forms:
    """All of one engine. Its methods are called on the event loop."""

    def __init__(
        self,
        load: Callable[[], Compiler],
        limit_s: float = COMPILE_LIMIT_S,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        """`load` is called in a thread when the first form comes; it may raise FormRefused."""
        self._load = load
        self._limit_s = limit_s
        self._kept_bytes = kept_bytes
        self._compiler: asyncio.Future[Compiler] | None = None
        self._forms: OrderedDict[tuple[str, str], asyncio.Task[Form]] = OrderedDict()
        self._free_threads = asyncio.Semaphore(_NUM_THREADS)

    async def guide(self, structure: Structure) -> Guide:
        """Raises FormRefused, also where compiling takes too long. May be cancelled."""
        if self._compiler is None:
            self._compiler = _in_thread(self._load)
        await asyncio.wait({self._compiler})
        compiler = self._compiler.result()
        key = structure.kind, structure.text
        if key not in self._forms:
            self._forms[key] = asyncio.create_task(self._compile(compiler, *key))
        self._forms.move_to_end(key)
        task = self._forms[key]
        await asyncio.wait({task}, timeout=self._limit_s)
        self._forget_the_oldest()
        if not task.done():
            raise FormRefused(
                f"it takes more than {self._limit_s:g} s to compile: make it simpler, or send it "
                f"again when it may be ready"
            )
        return task.result().guide()

    async def _compile(self, compiler: Compiler, kind: str, text: str) -> Form:
        async with self._free_threads:
            return await _in_thread(partial(compiler.compile, kind, text))

    def _forget_the_oldest(self) -> None:
        """But never the one that was asked for last."""
        total = sum(map(_size, self._forms.items()))
        while total > self._kept_bytes and len(self._forms) > 1:
            total -= _size(self._forms.popitem(last=False))


def _size(kept: tuple[tuple[str, str], "asyncio.Task[Form]"]) -> int:
    (_, text), task = kept
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
