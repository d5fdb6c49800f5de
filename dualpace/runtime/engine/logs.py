"""Where rounds and requests are written down: files if they are named, and the last rounds here."""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from dualpace.errors import ConfigError
from dualpace.runtime.schedule.log import request_record
from dualpace.runtime.schedule.rounds import CpuStep, GpuStep
from dualpace.runtime.types import Request

log = logging.getLogger(__name__)

_KEPT_ROUNDS = 8
_SHOWN_IDS = 8


def lost_rounds(steps: Iterable[GpuStep | CpuStep]) -> str:
    """What a lost worker had in hand, for people: `round 7 of requests 1, 2, 5`."""
    texts = []
    for step in steps:
        ids = [str(row.request.id) for row in step.all_rows]
        more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
        texts.append(f"round {step.number} of requests {', '.join(ids[:_SHOWN_IDS])}{more}")
    return "; ".join(texts) or "no round"


def _open(key: str, path: str) -> TextIO:
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be written: {error.strerror}") from None


class LogFile:
    """A file of records beside the work. One that cannot be written any more, as where its disk is
    full, ends with a line in the log, and the work goes on. Raises ConfigError if it cannot be
    opened.
    """

    def __init__(self, key: str, path: str) -> None:
        self._name = f"{key}={path}"
        self._file: TextIO | None = _open(key, path)

    def write(self, text: str) -> None:
        self._try(lambda file: file.write(text))

    def flush(self) -> None:
        self._try(lambda file: file.flush())

    def close(self) -> None:
        self._try(lambda file: file.close())
        self._file = None

    def _try(self, act: Callable[[TextIO], object]) -> None:
        if self._file is None:
            return
        try:
            act(self._file)
        except OSError as error:
            log.error("%s has ended, its last lines are lost: %s", self._name, error.strerror)
            with suppress(OSError):  # closing tries once more to write what is left
                self._file.close()
            self._file = None


class RoundLog:
    """One record a round, in the order of their application; JSON lines when a file is named."""

    def __init__(self, path: str | None) -> None:
        self.last: deque[dict[str, Any]] = deque(maxlen=_KEPT_ROUNDS)  # for when a loop fails
        self._file = LogFile("runtime.round_log", path) if path else None

    def write(self, record: dict[str, Any]) -> None:
        self.last.append(record)
        if self._file:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        if self._file:
            self._file.flush()


class RequestLog:
    """One entry a request, as they end: a JSON list, whole once it is closed."""

    def __init__(self, path: str | None) -> None:
        self._file = LogFile("runtime.request_log", path) if path else None
        self._before = "["

    def write(self, request: Request, num_output: int, **how: bool) -> None:
        """`how`: refused or cancelled, where it has not ended by itself."""
        if self._file:
            entry = json.dumps(request_record(request, num_output, **how))
            self._file.write(self._before + entry)
            self._before = ",\n"

    def close(self) -> None:
        if self._file:
            self._file.write("]" if self._before == ",\n" else "[]")
            self._file.close()
