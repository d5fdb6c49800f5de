"""Words of the measuring scripts that take no settings, or few beside their own: read, checked, and
refused in a sentence. Knows none of them by name."""

import argparse
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dualpace.errors import ConfigError


@contextmanager
def sentences() -> Iterator[None]:
    """A ConfigError of what is done inside ends the process with its text and status 1, Ctrl-C with
    a word and the shell's status."""
    try:
        yield
    except ConfigError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def key_values(words: Sequence[str], text: str, known: Collection[str] = ()) -> dict[str, str]:
    """The `key=value` words as a dict; a repeated key has its last value. `--help` prints `text`,
    the caller's docstring, and ends; a word of another form, or a key that is not `known` where any
    are given, ends with a sentence and status 1."""
    if {"--help", "-h"} & set(words):
        print(text.strip())
        raise SystemExit(0)
    for word in words:
        key, sign, _ = word.partition("=")
        if word.startswith("-") or not sign:
            sys.exit(
                f"{word} cannot be read: options are written key=value, and --help lists them."
            )
        if known and key not in known:
            sys.exit(f"{key} is no option: choose of {', '.join(known)}.")
    return dict(word.split("=", 1) for word in words)


def whole(options: Mapping[str, str], key: str, default: int) -> int:
    """ConfigError for a value that is no whole number from 1 on."""
    if key not in options:
        return default
    value = options[key]
    if not (value.isascii() and value.isdigit() and int(value)):
        raise ConfigError(f"{key}={value} is no whole number from 1 on.")
    return int(value)


def number(options: Mapping[str, str], key: str, default: float) -> float:
    """ConfigError for a value that is no number from 0 on."""
    try:
        value = float(options.get(key, default))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{key}={options[key]} is no number from 0 on.")
    return value


def several(options: Mapping[str, str], key: str, choices: Collection[str]) -> list[str]:
    """Names with commas between; all where the key is not there. ConfigError for an unknown one."""
    names = options.get(key, ",".join(choices)).split(",")
    if unknown := [name for name in names if name not in choices]:
        raise ConfigError(f"{key}={','.join(unknown)} is unknown: choose of {', '.join(choices)}.")
    return names


def whole_number(text: str) -> int:
    """For argparse."""
    try:
        return whole({"": text}, "", 0)
    except ConfigError:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on") from None
