"""Whether the keywords of a JSON schema have values that they can have.

Knows nothing of what can be enforced.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from dualpace.runtime.regex_syntax import MAX_COUNT

_MAX_INTEGER = 2**63 - 1
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_BOUNDS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_COUNTS = tuple(name for pair in _BOUNDS for name in pair)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_KIND: Mapping[type, tuple[str, tuple[str, ...]]] = {
    str: ("a string", ("$ref", "pattern", "format")),
    dict: ("an object", ("properties", "$defs", "definitions")),
    list: ("a list", ("enum", "required", "prefixItems", "anyOf", "oneOf", "allOf")),
}
_SHOWN = 60  # characters of a value in a sentence


def fault_in_values(schema: Mapping[str, Any]) -> str:
    """What is wrong with the first keyword that has a wrong value; nothing: the empty string."""

    def wrong(name: str, what: str) -> str:
        value = json.dumps(schema[name], ensure_ascii=False)
        value = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        return f"'{name}' is {value}: it must be {what}"

    for kind, (what, names) in _OF_KIND.items():
        for name in names:
            if not isinstance(schema.get(name, kind()), kind):
                return wrong(name, what)
    for name in _COUNTS:
        if not _is_integer(schema.get(name, 0), 0, MAX_COUNT):
            return wrong(name, f"an integer from 0 to {MAX_COUNT}")
    for low, high in (*_BOUNDS, ("minimum", "maximum")):
        if low in schema and high in schema and _is_above(schema[low], schema[high]):
            return wrong(low, f"at most '{high}', which is {json.dumps(schema[high])}")
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    for name in _NUMBERS:
        value = schema.get(name, 1)
        if not _is_number(value):
            return wrong(name, "a number")
        if "integer" in types and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
            return wrong(name, f"from -{_MAX_INTEGER} to {_MAX_INTEGER} for integers")
    if "integer" in types and not _is_integer(schema.get("multipleOf", 1), 1, _MAX_INTEGER):
        return wrong("multipleOf", "an integer above 0")
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        return wrong("required", "a list of strings")
    if schema.get("enum") == []:
        return wrong("enum", "a list of one value or more")
    if any(each not in _TYPES for each in types):
        return wrong("type", f"of {', '.join(_TYPES)}")
    return ""


def _is_integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_above(low: Any, high: Any) -> bool:
    return _is_number(low) and _is_number(high) and bool(low > high)
