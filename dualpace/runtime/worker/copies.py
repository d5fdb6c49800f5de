"""Copies that run beside the compute, each with an event: the stand-in for a device's copy stream.

Knows nothing about KV: a copy is a closure over memory that the caller keeps untouched until the
event has fired. Imports no torch, so that a test's own worker module can build on it before the
thread counts are set.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from dualpace.runtime.channel import ring


class Event(Protocol):
    """What a copy, or anything else that a device is busy with, ends with."""

    def is_done(self) -> bool: ...


class CopyEvent:
    """Fires once, when its copy has ended."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def fire(self, error: BaseException | None = None) -> None:
        self._error = error
        self._ended.set()

    def is_done(self) -> bool:
        """Raises what the copy raised."""
        if not self._ended.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self) -> None:
        """Blocks until the copy has ended. Raises what it raised."""
        self._ended.wait()
        self.is_done()


def all_done(events: Iterable[Event]) -> bool:
    return all(event.is_done() for event in events)


@dataclass(slots=True)
class CopyJob:
    """One copy and its event; `run` does the one and fires the other."""

    copy: Callable[[], None]
    event: CopyEvent = field(default_factory=CopyEvent)

    def run(self) -> None:
        try:
            self.copy()
        except Exception as error:  # the worker meets it when it looks at the event
            self.event.fire(error)
        else:
            self.event.fire()


class CopyEngine:
    """Runs copies in order on a thread of its own and rings `doorbell` after each.

    Nobody may rely on the order: a test's subclass overrides `dispatch` to hold, delay or reorder
    jobs.
    """

    def __init__(self, doorbell: int) -> None:
        self._doorbell = doorbell
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def submit(self, copy: Callable[[], None]) -> CopyEvent:
        """The event of `copy`, which may run from now on."""
        job = CopyJob(copy)
        self.dispatch(job)
        return job.event

    def dispatch(self, job: CopyJob) -> None:
        """Lets `job` run."""
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread after the copies that were dispatched."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            ring(self._doorbell)
