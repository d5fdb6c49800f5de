"""The form that an answer is to have: a request's words for it, and what the engine is told.

Knows nothing about tokens, nor about who enforces it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dualpace.runtime.json_schema import UnsupportedSchema, check_schema
from dualpace.runtime.regex_syntax import UnsupportedRegex, plain_regex

MAX_CHARS = 100_000  # of a schema, a regular expression, a grammar, all choices together
_ANY_OBJECT = '{"type": "object"}'
_WAYS = ("json", "json_object", "regex", "choice", "grammar")


class MalformedStructure(ValueError):
    """What was asked for is no form that an answer could have; the text says why."""


class Structure(NamedTuple):
    """A form, ready to be compiled. `kind`: json (a schema) | compact (the same, on one line) |
    regex | grammar (EBNF)."""

    kind: str
    text: str
    asked_as: str  # the parameter that brought it, for complaints


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """One of the first five, the others None. `SamplingParams` checks it.

    A regular expression and a choice are the whole answer; a grammar is in the EBNF of GBNF, with
    the rule `root`.
    """

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema, or its text
    json_object: bool | None = None  # True: any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None
    # Whether JSON is kept to one line. None: where a schema says what comes, since small models
    # that may indent what they like indent without end; not where any object may come, since they
    # write better ones if they may.
    disable_any_whitespace: bool | None = None
    asked_as: str = "structured_outputs"  # what complaints call it

    @cached_property
    def structure(self) -> Structure:
        """Raises MalformedStructure."""
        self._check_types()
        given = [name for name in _WAYS if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise MalformedStructure(f"{self.asked_as}: the schema false allows no answer.")
        if len(given) != 1:
            found = f", not {' and '.join(given)}" if given else ""
            names = f"{', '.join(_WAYS[:-1])} and {_WAYS[-1]}"
            raise MalformedStructure(f"{self.asked_as} takes exactly one of {names}{found}.")
        place = self.asked_as if given[0] in self.asked_as else f"{self.asked_as}.{given[0]}"
        kind, text = self._kind_and_text(place)
        if not text or (kind == "grammar" and text.isspace()):
            remedy = "say what the answer may be, or leave it out."
            raise MalformedStructure(f"{place} is empty: {remedy}")
        _check_size(place, len(text))
        return Structure(kind, text, self.asked_as)

    def _check_types(self) -> None:
        """Of what are texts: a choice that is one would be read as its letters."""
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise MalformedStructure(f"{self.asked_as}.{name} must be a string.")
        choice: Any = () if self.choice is None else self.choice
        if isinstance(choice, str) or not all(isinstance(text, str) for text in choice):
            raise MalformedStructure(f"{self.asked_as}.choice must be a list of strings.")

    def _kind_and_text(self, place: str) -> tuple[str, str]:
        """What is too long is refused before it is looked at, which takes seconds a megabyte."""
        if self.regex is not None:
            _check_size(place, len(self.regex))
            try:
                return "regex", plain_regex(self.regex)
            except UnsupportedRegex as error:
                where = "the regular expression"
                raise MalformedStructure(f"{self.asked_as}: in {where} {error}.") from None
        if self.choice is not None:
            _check_size(place, sum(map(len, self.choice)) + len(self.choice))
            return "grammar", _one_of(self.choice)
        if self.grammar is not None:
            return "grammar", self.grammar
        on_one_line = self.disable_any_whitespace
        if on_one_line is None:
            on_one_line = not self.json_object
        text = _ANY_OBJECT if self.json_object else self._schema(place)
        return "compact" if on_one_line else "json", text

    def _schema(self, place: str) -> str:
        try:
            schema = json.loads(self.json if isinstance(self.json, str) else json.dumps(self.json))
            text = json.dumps(schema, ensure_ascii=False)
            text.encode()
            _check_size(place, len(text))
            check_schema(schema)
            return json.dumps(schema)  # the order of properties is that of the answer
        except MalformedStructure:
            raise
        except UnsupportedSchema as error:
            raise MalformedStructure(f"{self.asked_as}: in the schema {error}.") from None
        except RecursionError:
            text = "the schema is nested too deeply: nest it less."
            raise MalformedStructure(f"{self.asked_as}: {text}") from None
        except UnicodeEncodeError:
            text = "the schema has half a surrogate pair, which is no text."
            raise MalformedStructure(f"{self.asked_as}: {text}") from None
        except (ValueError, TypeError) as error:
            raise MalformedStructure(f"{self.asked_as}: the schema is no JSON: {error}.") from None


def _check_size(place: str, num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        size = f"{num_chars:,} characters: use at most {MAX_CHARS:,}."
        raise MalformedStructure(f"{place} has {size}")


def _one_of(texts: Sequence[str]) -> str:
    """A grammar of these alone; no text for none."""
    quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return f"root ::= {quoted}" if quoted else ""
