"""Bodies of requests: from bytes to a checked model, or a sentence that says where they are wrong.

Knows nothing about what the models mean.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from dualpace.runtime.server.errors import APIError
from dualpace.runtime.server.wording import of_validation, path

Body = TypeVar("Body", bound=BaseModel)
Place = tuple[str | int, ...]

_LONG_LISTS = ("prompt", "tokens")  # of token ids, in which nobody has to look for texts
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as escapes spell them; UTF-8 has none
_PYTHONS = {"None": "null", "True": "true", "False": "false"}


async def read(request: Request, kind: type[Body]) -> Body:
    """The request's JSON object as a `kind`. Raises APIError for any other body."""
    media, _, _ = request.headers.get("content-type", "").partition(";")
    if not media.strip().lower().endswith(("/json", "+json")):
        sent = f", not {media.strip()}" if media else ""
        raise _unreadable(f"must be a JSON object, sent with Content-Type: application/json{sent}.")
    coding = request.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise _unreadable(f"comes with Content-Encoding: {coding}: send it as it is.")
    try:
        data = await request.body()
    except ClientDisconnect:  # nobody will read the answer
        raise _unreadable("ended before its announced length.") from None
    text = _decode(data)
    value = _parse(text)
    if not isinstance(value, dict):
        raise _unreadable("must be a JSON object.")
    if _SURROGATE.search(text):
        _check_texts(value)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise of_validation(error) from None


def _decode(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        hint = " (it looks like UTF-16)" * wide
        at, byte = error.start, data[error.start]
        raise _unreadable(f"is not UTF-8 text: byte {at} is {byte:#04x}{hint}.") from None
    if "\0" in text[:4]:
        raise _unreadable("is not UTF-8 text: it looks like UTF-16 or UTF-32.")
    return text


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise _unreadable("is empty: it must be a JSON object.") from None
        where = f"at line {error.lineno}, column {error.colno}"
        raise _unreadable(f"is not valid JSON: {_problem(error)} {where}.") from None
    except RecursionError:
        raise _unreadable("is nested too deeply.") from None
    except ValueError:  # Python's own bound on the digits of an integer
        raise _unreadable("has a number of more than 4,300 digits.") from None


def _problem(error: json.JSONDecodeError) -> str:
    """What people and languages write in JSON's place, before the parser's own words."""
    rest, before = error.doc[error.pos :], error.doc[: error.pos].rstrip()
    if word := re.match(r"(None|True|False)\b", rest):
        return f"{_PYTHONS[word[0]]} is written {word[0]}, as Python does,"
    if rest.startswith("'"):
        return "a string stands in ' instead of \""
    if re.match(r"(,\s*)?[}\]]", rest) and (before.endswith(",") or rest[0] == ","):
        return "a comma stands after the last entry"
    if rest.startswith(("\n", "\r", "\t")) and "control character" in error.msg:
        return "a line break or tab stands inside of a string, where it is written \\n or \\t,"
    if error.msg == "Extra data":
        return "more follows after the object's end"
    if "Unterminated" in error.msg:
        return "a string is never closed that begins"
    if not rest.strip():
        return "it ends too early,"
    return error.msg[0].lower() + error.msg[1:].removesuffix(" at")


def _check_texts(body: dict[str, Any]) -> None:
    """JSON can spell half a surrogate pair, which no text, hence no answer, can hold."""
    levels: list[tuple[Place, Iterator[tuple[str | int, Any]]]] = [((), _entries(body))]
    while levels:
        where, entries = levels.pop()
        for key, item in entries:
            if isinstance(item, str):
                if not item.isascii():
                    _check_text((*where, key), item)
            elif isinstance(item, (dict, list)) and not _is_ids((*where, key), item):
                levels += [(where, entries), ((*where, key), _entries(item))]
                break


def _entries(value: dict[str, Any] | list[Any]) -> Iterator[tuple[str | int, Any]]:
    """Keys are texts, too. Nothing is copied: there may be millions."""
    if isinstance(value, list):
        return enumerate(value)
    return chain(zip(value, value, strict=True), value.items())


def _check_text(where: Place, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        name = path(where)
        what = f"'{name}' has half a surrogate pair at character {error.start}, which is no text."
        raise APIError(400, what, name, "invalid_value") from None


def _is_ids(where: Place, value: dict[str, Any] | list[Any]) -> bool:
    if isinstance(value, dict) or where[0] not in _LONG_LISTS:
        return False
    return bool(value) and isinstance(value[0], int)


def _unreadable(problem: str) -> APIError:
    return APIError(400, f"The body {problem}", None, "json")
