"""Events of a CUDA device as the worker polls them, and when they were on the machine's clock."""

# mypy: allow-untyped-calls

import math
import time
from collections import deque
from collections.abc import Callable

import torch


class DeviceEvent:
    """Marks a place in a stream; fires when the device has come by."""

    def __init__(self, stream: torch.cuda.Stream | None = None, timed: bool = False) -> None:
        """At the end of what `stream` (None: the current one) has been given so far."""
        self.event = torch.cuda.Event(enable_timing=timed)
        self.event.record(stream if stream is not None else torch.cuda.current_stream())

    def is_done(self) -> bool:
        """Raises what the device raised."""
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def holds(self, stream: torch.cuda.Stream) -> None:
        """What `stream` is given from now on runs after the event."""
        stream.wait_event(self.event)

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Device time between two timed events that have fired."""
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class Lead:
    """How many stage tasks may be queued behind the one that the device is at.

    A stream takes only so many launches: a thread that queues more waits inside the driver, a task
    of the device at a time, and looks for assists no sooner. The last `always` tasks of a round are
    queued at once, so that preparing the next one is hidden.
    """

    def __init__(
        self, most: int, always: int, mark: Callable[[], DeviceEvent] = DeviceEvent
    ) -> None:
        self._always, self._mark = always, mark
        self._marks: deque[DeviceEvent] = deque(maxlen=most + 1)

    def blockers(self, tasks_left: int) -> list[DeviceEvent]:
        """Called when a task has been queued: what must have ended before the next one may be."""
        self._marks.append(self._mark())
        is_full = len(self._marks) == self._marks.maxlen
        return [self._marks[0]] if is_full and tasks_left > self._always else []


class Lately:
    """True for a while after each `mark`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._until_s = -math.inf

    def mark(self) -> None:
        self._until_s = self._clock() + self._seconds

    def __bool__(self) -> bool:
        return self._clock() < self._until_s


class DeviceClock:
    """Seconds of `time.monotonic` at which rounds ran, one after another.

    A device that had nothing to do starts a round when it is launched; else the time since the
    end of the round before is the device's own, so that the gap between two rounds is what it
    idled.
    """

    def __init__(self) -> None:
        self._last: DeviceEvent | None = None
        self._last_s = 0.0

    def interval(
        self, launched_s: float, was_idle: bool, start: DeviceEvent, end: DeviceEvent
    ) -> tuple[float, float]:
        """(start, duration) of the next round, whose events have fired."""
        if self._last is None or was_idle:
            start_s = max(launched_s, self._last_s)
        else:
            start_s = self._last_s + max(start.seconds_since(self._last), 0.0)
        duration_s = max(end.seconds_since(start), 0.0)
        self._last, self._last_s = end, min(start_s + duration_s, max(time.monotonic(), start_s))
        return start_s, self._last_s - start_s
