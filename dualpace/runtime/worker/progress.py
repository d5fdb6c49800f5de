"""What a worker says while it is built: the phase it is in, and how long each took.

Imports no torch: a worker's thread counts hold only for libraries that are loaded after them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# By part of a layer: (rows or tokens, seconds).
Times = dict[str, list[tuple[int, float]]]

SECONDS_BETWEEN_REPORTS = 2.0


@dataclass(slots=True)
class Progress:
    """Reports phases through `say` and keeps their seconds, for the `Ready` message."""

    say: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    layer_times: Times = field(default_factory=dict)  # where the policy predicts

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        self.say(text)
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 3)

    def steps(self, text: str) -> Callable[[int, int], None]:
        """A function that reports (steps done, steps in all), now and then."""
        said = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > SECONDS_BETWEEN_REPORTS:
                said = time.monotonic()
                self.say(f"{text}: {done} of {total}")

        return report
