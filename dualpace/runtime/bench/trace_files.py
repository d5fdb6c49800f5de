"""Lengths and times from files: Azure's CSV traces, ShareGPT's JSON.

What cannot be read is a ConfigError that names the file, the line or the item, and what is expected
there. Knows nothing about rates or arrivals.
"""

import csv
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualpace.errors import ConfigError
from dualpace.runtime.bench.config import (
    AzureWorkloadConfig,
    ShareGptWorkloadConfig,
    WorkloadConfig,
)

log = logging.getLogger(__name__)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TIME, PROMPT, OUTPUT = AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST = 2**31  # tokens; what no request has
_TOKENS = "a whole number of tokens, at least 1"
_SHOWN = 60  # characters of a value in a sentence


@dataclass(frozen=True, slots=True)
class Lengths:
    """Raw lengths (tokens, at least 1) of n requests, and their own times (s) where the source has
    them."""

    prompt: Ints
    output: Ints
    times: Floats | None = None


def azure(config: WorkloadConfig) -> Lengths:
    """`TIMESTAMP,ContextTokens,GeneratedTokens`; fractions of a second may have any length, and the
    2024 files add a UTC offset."""
    assert isinstance(config, AzureWorkloadConfig)
    path = _existing(config.path)
    rows = list(islice(_azure_rows(path), config.num_requests))
    times, prompt, output = zip(*rows, strict=True) if rows else ((), (), ())
    return Lengths(np.array(prompt, np.int64), np.array(output, np.int64), np.array(times))


def _azure_rows(path: Path) -> Iterator[tuple[float, int, int]]:
    where = f"workload.path={path}"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or ()
            if missing := [name for name in AZURE if name not in names]:
                raise ConfigError(
                    f"{where} is no Azure trace: its first line has no column "
                    f"{' and no '.join(missing)}; expected are {', '.join(AZURE)}."
                )
            for row in reader:
                yield _azure_row(f"{where}, line {reader.line_num}", row)
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is no Azure trace: it is no UTF-8 text.") from None
    except csv.Error as error:
        raise ConfigError(f"{where}, line {reader.line_num} is no CSV: {error}.") from None


def _azure_row(where: str, row: dict[str, Any]) -> tuple[float, int, int]:
    if None in row:
        raise ConfigError(f"{where} has more values than the first line has columns.")
    try:
        time_s = seconds(row[TIME] or "")
    except ValueError:
        raise _wrong(f"{where}: {TIME}", row[TIME], "a time like 2023-11-16 18:15:46.68") from None
    prompt, output = (_tokens(f"{where}: {name}", row[name]) for name in (PROMPT, OUTPUT))
    return time_s, prompt, output


def seconds(stamp: str) -> float:
    """Seconds since the epoch of `2023-11-16 18:15:46.6805900` or `2024-05-10 00:00:00.01+00:00`.

    The fraction is parsed by hand: its seven decimals are more than the standard library accepts.
    ValueError for anything else.
    """
    moment = datetime.fromisoformat(stamp[:19]).replace(tzinfo=UTC)
    rest = re.fullmatch(r"(\.\d+)?(?:Z|\+\d\d:?\d\d)?", stamp[19:])
    if rest is None:
        raise ValueError(stamp)
    return moment.timestamp() + float(rest[1] or 0)


def sharegpt(config: WorkloadConfig) -> Lengths:
    """A JSON list whose items give `prompt_len` and `output_len`, or `conversations` as ShareGPT's
    do (the first two turns; lengths by characters per token). Conversations of fewer turns, or with
    an empty one, ask for nothing and are passed over."""
    assert isinstance(config, ShareGptWorkloadConfig)
    path = _existing(config.path)
    where = f"workload.path={path}"
    pairs: list[tuple[int, int]] = []
    passed_over = 0
    for at, item in enumerate(_items(path)):
        if len(pairs) == config.num_requests:
            break
        if (pair := _item_lengths(f"{where}: [{at}]", item, config.chars_per_token)) is None:
            passed_over += 1
        else:
            pairs.append(pair)
    if passed_over:
        log.warning("%s: conversations without two turns passed over: %d", where, passed_over)
    prompt, output = zip(*pairs, strict=True) if pairs else ((), ())
    return Lengths(np.array(prompt, np.int64), np.array(output, np.int64))


def _items(path: Path) -> list[Any]:
    problem = "it holds something else"
    try:
        items = json.loads(path.read_text(encoding="utf-8-sig"))
        if isinstance(items, list):
            return items
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except UnicodeDecodeError:
        problem = "it is no UTF-8 text"
    except (RecursionError, ValueError):  # Python's own bound on the digits of an integer
        problem = "it is nested too deeply or has a number of too many digits"
    raise ConfigError(
        f"workload.path={path} is no JSON list of conversations or lengths: {problem}."
    )


def _item_lengths(where: str, item: Any, chars_per_token: float) -> tuple[int, int] | None:
    """`where` is the item's place."""
    if not isinstance(item, dict):
        raise _wrong(where, item, "an object with prompt_len and output_len, or conversations")
    if "prompt_len" in item or "output_len" in item:
        prompt, output = (
            _tokens(f"{where}.{key}", item.get(key)) for key in ("prompt_len", "output_len")
        )
        return prompt, output
    turns = item.get("conversations")
    if not isinstance(turns, list):
        raise _wrong(f"{where}.conversations", turns, "a list of turns")
    if len(turns) < 2:
        return None
    for at, turn in enumerate(turns[:2]):
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(text, str):
            raise _wrong(f"{where}.conversations[{at}].value", text, "a text")
    asked, answer = (len(turn["value"]) for turn in turns[:2])
    if not asked or not answer:
        return None
    return max(1, round(asked / chars_per_token)), max(1, round(answer / chars_per_token))


def _tokens(where: str, value: Any) -> int:
    """Of a cell or of JSON's number. ConfigError for what is no length."""
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not (1 <= number < _MOST and number.is_integer()):
        raise _wrong(where, value, _TOKENS)
    return int(number)


def _wrong(where: str, value: Any, expected: str) -> ConfigError:
    if value is None or value == "":
        return ConfigError(f"{where} is missing: it must be {expected}.")
    shown = json.dumps(value, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return ConfigError(f"{where} is {shown}: it must be {expected}.")


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ConfigError(f"workload.path={path} is not a file; give the trace's path.")
    return Path(path)
