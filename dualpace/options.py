"""`key=value` words of the measuring scripts that take no settings, or few beside their own."""

import sys
from collections.abc import Sequence


def key_values(words: Sequence[str], text: str) -> dict[str, str]:
    """The words as a dict; a repeated key has its last value. `--help` prints `text`, the caller's
    docstring, and ends; a word of another form ends with a sentence and status 1."""
    if {"--help", "-h"} & set(words):
        print(text.strip())
        raise SystemExit(0)
    for word in words:
        if word.startswith("-") or not word.partition("=")[1]:
            sys.exit(
                f"{word} cannot be read: options are written key=value, and --help lists them."
            )
    return dict(word.split("=", 1) for word in words)
