"""What each setting means: the comment that its schema carries, beside its type and default.

Help texts and docs/configuration.md are made of it, so that a meaning is written once. A comment
stands behind its field, going on below it, or above a field that has none behind it.
"""

import inspect
import io
import tokenize
import typing
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Meaning:
    """Of one field of a schema."""

    type: str  # as people write it: int, float or nothing
    default: Any  # MISSING: it has to be given
    text: str  # empty where the name says it


def meanings(schema: type) -> dict[str, Meaning]:
    """By field, those of bases first."""
    texts: dict[str, str] = {}
    for base in reversed(schema.__mro__[:-1]):
        texts |= _comments(base)
    hints = typing.get_type_hints(schema)
    return {
        field.name: Meaning(
            type=_type_name(hints[field.name]),
            default=_default(field),
            text=texts.get(field.name, "").replace("None", "null"),
        )
        for field in fields(schema)
    }


def summary(schema: type) -> str:
    """The first paragraph of its docstring on one line."""
    first = (inspect.getdoc(schema) or "").split("\n\n")[0]
    return " ".join(first.split()).replace("None", "null")


def _default(field: Any) -> Any:
    made = field.default_factory
    return field.default if made is MISSING else made()


def _type_name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    arguments = [_type_name(argument) for argument in typing.get_args(hint)]
    if not arguments:
        return str(hint.__name__)
    if typing.get_origin(hint) in (list, dict):
        return f"{typing.get_origin(hint).__name__} of {arguments[-1]}"
    return " or ".join(arguments)


def _comments(schema: type) -> dict[str, str]:
    """By the fields that the class itself names."""
    behind: dict[str, list[str]] = defaultdict(list)
    above: list[str] = []
    last = ""  # the field that a comment on a line of its own may go on from
    for name, comment, alone in _lines(inspect.getsource(schema)):
        if name:
            behind[last if comment else name] += above
            behind[name] += [comment] if comment else []
            above, last = [], name
        elif alone:
            above.append(comment)
    behind[last] += above
    return {name: " ".join(parts) for name, parts in behind.items() if name and parts}


def _lines(source: str) -> Iterable[tuple[str, str, bool]]:
    """(field that the line defines, its comment, whether the comment stands alone)."""
    by_line: dict[int, list[tokenize.TokenInfo]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.COMMENT):
            by_line[token.start[0]].append(token)
    for tokens in by_line.values():
        comment = tokens[-1].string.lstrip("# ") if tokens[-1].type == tokenize.COMMENT else ""
        code = [token.string for token in tokens if token.type != tokenize.COMMENT]
        is_field = len(code) > 2 and code[1] == ":"
        yield code[0] if is_field else "", comment, not code
