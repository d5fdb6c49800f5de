"""A plugin: says after a run how long each test file took, by the clock and by the processor.

The processor's seconds include those of child processes that have ended; they tell on a busy
machine too what a file costs.
"""

import resource
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

SHOWN_S = 1.0  # files below this are one line together


class FileTimes:
    """Lives in each process that runs tests, and in the one that reports them."""

    def __init__(self) -> None:
        self._files: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self._before = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._before = processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        now = processor_s()
        report.processor_s = now - self._before  # travels with the report to another process
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        entry = self._files[report.nodeid.partition("::")[0]]
        entry[0] += report.when == "call"
        entry[1] += report.duration
        entry[2] += report.processor_s

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if len(self._files) < 2:
            return
        terminalreporter.section("seconds by the clock and of a processor, tests, file")
        rows = sorted(self._files.items(), key=lambda row: -row[1][1])
        long = [row for row in rows if max(row[1][1:]) >= SHOWN_S]
        short = [entry for _, entry in rows if max(entry[1:]) < SHOWN_S]
        sums = [sum(column) for column in zip(*short, strict=True)] or [0, 0.0, 0.0]
        for name, (tests, clock, processor) in [*long, (f"{len(short)} other files", sums)]:
            terminalreporter.line(f"{clock:7.1f} {processor:7.1f} {tests:5d}  {name}")


def processor_s() -> float:
    """Seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileTimes(), "file-times")
