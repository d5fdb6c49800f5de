"""The types that sampling parameters take, for callers from Python, whom no JSON model checks.

What is of another type would be found out by the engine, for all requests of a message together.
Knows nothing about ranges.
"""

import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dualpace.runtime.structured import StructuredOutputsParams


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_list_of(kind: Callable[[object], bool], value: object) -> bool:
    """Tuples and sets are lists here, texts and mappings are none."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        return False
    return all(map(kind, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bias(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(map(is_int, value)) and all(map(is_number, value.values()))


_NUMBER = ("a number", is_number)
_INT = ("an integer", is_int)
_OPTIONAL_INT = ("an integer or None", lambda value: value is None or is_int(value))
_SWITCH = ("True or False", lambda value: isinstance(value, bool))
_TOKENS = ("a list of token ids", lambda value: is_list_of(is_int, value))
_TAKES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INT,
    "min_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "logit_bias": ("a dict of token ids and numbers", _is_bias),
    "allowed_token_ids": _TOKENS,
    "seed": _OPTIONAL_INT,
    "max_tokens": _OPTIONAL_INT,
    "min_tokens": _INT,
    "stop": (
        "a string or a list of strings",
        lambda value: _is_text(value) or is_list_of(_is_text, value),
    ),
    "stop_token_ids": _TOKENS,
    "include_stop_str_in_output": _SWITCH,
    "skip_special_tokens": _SWITCH,
    "logprobs": _OPTIONAL_INT,
    "ignore_eos": _SWITCH,
    "structured_outputs": (
        "StructuredOutputsParams or None",
        lambda value: value is None or isinstance(value, StructuredOutputsParams),
    ),
}


def wrong_type(params: object) -> tuple[str, str] | None:
    """The first parameter of `params` that is of a wrong type, and the sentence for it."""
    for name, (what, fits) in _TAKES.items():
        value = getattr(params, name)
        if not fits(value):
            return name, f"{name} must be {what}, not {reprlib.repr(value)}."
    return None
