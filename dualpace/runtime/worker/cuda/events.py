"""Events of a CUDA device as the worker polls them, and when they were on the machine's clock."""

# mypy: allow-untyped-calls

import time

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
