"""What a sweep shows while it runs: a bar on a terminal, a log line a point elsewhere.

Looks at files that children write; decides nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dualpace.runtime.profile.child import point_file
from dualpace.runtime.profile.points import Point

log = logging.getLogger(__name__)
WIDTH = 52


class SweepBar:
    """Counts the points of one run."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn(f"{{task.description:<{WIDTH}.{WIDTH}}}", markup=False),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=total)
        self._done, self._total = 0, total

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def watch(self, points: Sequence[Point], folder: Path, log_file: Path) -> Callable[[], None]:
        """A look at the child that measures `points`: what is finished, and what it is at now."""
        started, waiting = time.time(), list(points)

        def look() -> None:
            for point in [p for p in waiting if is_newer(point_file(folder, p), started)]:
                waiting.remove(point)
                self._advance(point)
            if waiting:
                text = f"{waiting[0].name}: {last_line(log_file)}"
                self._bar.update(self._task, description=text)

        return look

    def _advance(self, point: Point) -> None:
        self._done += 1
        self._bar.advance(self._task)
        if not self._console.is_terminal:  # a bar is drawn once there, at the end
            log.info("%s measured, %d of %d", point.name, self._done, self._total)


def is_newer(file: Path, than_s: float) -> bool:
    return file.is_file() and file.stat().st_mtime >= than_s


def last_line(file: Path) -> str:
    """The last thing that a child has said."""
    text = file.read_text(errors="replace") if file.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
