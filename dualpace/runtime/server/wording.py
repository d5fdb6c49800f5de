"""What the validator of request models reports, as one sentence with the parameter's name; and
values and places as JSON writes them. Knows nothing about HTTP.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from dualpace.runtime.server.errors import APIError

# What a field of several types takes; the validator alone would complain once for each of them.
_EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of text parts",
    "schema": "a JSON schema",
    "json": "a JSON schema, or its text",
    "guided_json": "a JSON schema, or its text",
}
# By the validator's kind of complaint.
_TYPES = {
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of usual size",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
_SHOWN = 60  # characters of a value in a sentence


def path(location: Iterable[str | int]) -> str:
    """`messages[2].content[1]`"""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def shown(value: Any) -> str:
    """`value` as JSON writes it, if that is short."""
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, str) and len(value) > _SHOWN:
        return json.dumps(f"{value[:_SHOWN]}...", ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def of_validation(error: ValidationError) -> APIError:
    """The answer to a body that is not what its model says; for its first fault."""
    errors = error.errors(include_url=False)
    location, kind = errors[0]["loc"], errors[0]["type"]
    if kind == "missing":
        param = path(location)
        return APIError(400, f"'{param}' is missing.", param, "missing_required_parameter")
    for depth, part in enumerate(location[:-1]):
        if part in _EXPECTED:
            same = [e for e in errors if e["loc"][: depth + 1] == location[: depth + 1]]
            return _of_several_types(location[: depth + 1], str(part), same)
    param = path(location)
    code = "invalid_value" if kind == "literal_error" else "invalid_type"
    return APIError(400, f"'{param}' {_fault(errors[0])}.", param, code)


def _of_several_types(field: Sequence[str | int], name: str, errors: Sequence[Any]) -> APIError:
    """A list with a wrong entry is told by that entry: of the types that are lists, the one with
    the fewest faults was meant, and of several the one that went well for longest."""
    branches: dict[Any, list[Any]] = {}
    for each in errors:
        branches.setdefault(each["loc"][len(field)], []).append(each)
    lists = [found for found in branches.values() if len(found[0]["loc"]) > len(field) + 1]
    whole = path(field)
    if not lists:
        text = f"'{whole}' must be {_EXPECTED[name]}, not {shown(errors[0]['input'])}."
        return APIError(400, text, whole, "invalid_type")
    fault = min(lists, key=lambda found: (len(found), -found[0]["loc"][len(field) + 1]))[0]
    param = path([*field, *fault["loc"][len(field) + 1 :]])
    text = f"'{param}' {_fault(fault)}: '{whole}' takes {_EXPECTED[name]}."
    return APIError(400, text, param, "invalid_type")


def _fault(error: Any) -> str:
    if error["type"] in _TYPES:
        return f"must be {_TYPES[error['type']]}, not {shown(error['input'])}"
    if error["type"] == "literal_error":
        choices = error["ctx"]["expected"].replace("'", '"')
        return f"must be {choices}, not {shown(error['input'])}"
    return f"cannot be used: {error['msg']}"
