"""Where rounds and requests are written down: files if they are named, and the last rounds here."""

import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from dualpace.errors import ConfigError
from dualpace.runtime.schedule.log import request_record
from dualpace.runtime.schedule.rounds import CpuStep, GpuStep
from dualpace.runtime.types import Request

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


class RoundLog:
    """One record a round, in the order of their application; JSON lines when a file is named."""

    def __init__(self, path: str | None) -> None:
        self.last: deque[dict[str, Any]] = deque(maxlen=_KEPT_ROUNDS)  # for when a loop fails
        self._file = _open("runtime.round_log", path) if path else None

    def write(self, record: dict[str, Any]) -> None:
        self.last.append(record)
        if self._file:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        if self._file:
            self._file.flush()


class RequestLog:
    """One entry a request, written as a JSON list at the end."""

    def __init__(self, path: str | None) -> None:
        self._file = _open("runtime.request_log", path) if path else None
        self._entries: list[dict[str, Any]] = []

    def write(self, request: Request, num_output: int, **how: bool) -> None:
        """`how`: refused or cancelled, where it has not ended by itself."""
        if self._file:
            self._entries.append(request_record(request, num_output, **how))

    def close(self) -> None:
        if self._file:
            json.dump(self._entries, self._file)
            self._file.close()
