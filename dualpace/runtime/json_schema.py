"""Which JSON schemas can be held to: what would be left out silently is refused by name and place.

Read are the keywords of the 2020-12 draft; what is no assertion (titles, defaults, names of others)
is passed over, as the draft says. Knows nothing about grammars or tokens.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dualpace.runtime.regex_syntax import UnsupportedRegex, plain_regex
from dualpace.runtime.schema_values import fault_in_values

# By the type of the values that they bear on.
_OF_TYPE: Mapping[str, Sequence[str]] = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_FOR_A_TYPE = [name for names in _OF_TYPE.values() for name in names]
_VALUES = ("enum", "const")
_OTHER_SCHEMAS = ("$ref", "anyOf", "oneOf", "allOf")
_ASSERTIONS = ("type", *_VALUES, *_OTHER_SCHEMAS, *_FOR_A_TYPE)
MAX_DEPTH = 64  # schemas in schemas: compiling takes the time of its cube
_UNSUPPORTED = (
    *("not", "if", "patternProperties", "propertyNames", "uniqueItems"),
    *("contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
# JSON escapes them, a pattern does not: " and \ and control characters, or their codes.
_ESCAPED_IN_JSON = re.compile(
    r'["\x00-\x1f]|\\(?:[\\nrtfv0c]|x(?:22|5c|[01].)|u00(?:22|5c|[01].))', re.IGNORECASE
)
_SHOWN = 60  # characters of a deep place
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)


class UnsupportedSchema(ValueError):
    """The schema asks for what cannot be enforced; the text says what and where."""


def check_schema(schema: Any) -> None:
    """Raises UnsupportedSchema for the first place of `schema`, as JSON gives it, that is no
    schema or cannot be held to. Whether places fit together is left to who compiles it. Writes
    patterns in it plainly, as `regex_syntax.plain_regex` does."""
    open_ = [("$", schema, 1)]
    while open_:  # no recursion: a schema may be nested more deeply than Python's stack
        where, part, depth = open_.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise UnsupportedSchema(f"{where} is no schema: it must be an object or a boolean")
        if depth > MAX_DEPTH:
            limit = f"nests more than {MAX_DEPTH} schemas in each other: nest them less"
            raise UnsupportedSchema(f"{where[:_SHOWN]}... {limit}, or name parts in '$defs'")
        try:
            _check_place(part)
        except UnsupportedSchema as error:
            raise UnsupportedSchema(f"{error} at {where}") from None
        open_ += reversed([(f"{where}.{name}", inner, depth + 1) for name, inner in _inner(part)])


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("properties", "$defs", "definitions"):
        if isinstance(named := schema.get(name, {}), dict):
            yield from ((f"{name}.{key}", each) for key, each in named.items())
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(listed := schema.get(name, []), list):
            yield from ((f"{name}[{at}]", each) for at, each in enumerate(listed))
    yield from (
        (name, schema[name]) for name in ("items", "additionalProperties") if name in schema
    )


def _check_place(schema: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if schema.get(name, False) is not False:
            raise UnsupportedSchema(f"'{name}' cannot be enforced")
    if fault := fault_in_values(schema):
        raise UnsupportedSchema(fault)
    asserted = [name for name in _ASSERTIONS if name in schema]
    for name in _OTHER_SCHEMAS:
        if name in schema and len(asserted) > 1:
            (other, *_) = (each for each in asserted if each != name)
            raise UnsupportedSchema(f"'{name}' beside '{other}' cannot be enforced")
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name) == []:
            raise UnsupportedSchema(f"'{name}' has no schema")
    if isinstance(branches := schema.get("allOf"), list) and len(branches) > 1:
        raise UnsupportedSchema("'allOf' of several schemas cannot be enforced")
    if not str(schema.get("$ref", "#")).startswith("#/") and schema.get("$ref", "#") != "#":
        raise UnsupportedSchema("'$ref' leads out of the schema: it must start with '#/'")
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or ("type" in schema and not types):
        raise UnsupportedSchema("'type' must be a string or a list of strings")
    if any(name in schema for name in _VALUES):
        _check_values(schema, types, asserted)
    elif not types and (untyped := [name for name in asserted if name in _FOR_A_TYPE]):
        raise UnsupportedSchema(f"'{untyped[0]}' needs a 'type' beside it")
    _check_pairs(schema, types)


def _check_values(schema: Mapping[str, Any], types: list[Any], asserted: list[str]) -> None:
    (name, *others) = [each for each in (*_VALUES, *asserted) if each in schema and each != "type"]
    if others := [each for each in others if each != name]:
        raise UnsupportedSchema(f"'{name}' beside '{others[0]}' cannot be enforced")
    values = [schema["const"]] if name == "const" else schema["enum"]
    if types and isinstance(values, list) and not all(_is_of(value, types) for value in values):
        raise UnsupportedSchema(f"'{name}' has a value that is not of the 'type' beside it")


def _check_pairs(schema: dict[str, Any], types: list[Any]) -> None:
    """What the compiler reads singly, but not together."""

    def both(name: str, others: Sequence[str]) -> None:
        for other in others:
            if name in schema and other in schema:
                raise UnsupportedSchema(f"'{name}' beside '{other}' cannot be enforced")

    if "string" in types:
        both("pattern", ("format", "minLength", "maxLength"))
        both("format", ("minLength", "maxLength"))
        if _ESCAPED_IN_JSON.search(str(schema.get("pattern", ""))):
            what = "quotes, backslashes or control characters"
            raise UnsupportedSchema(f"'pattern' with {what} cannot be enforced")
        try:
            if "pattern" in schema:
                schema["pattern"] = plain_regex(schema["pattern"])
        except UnsupportedRegex as error:
            raise UnsupportedSchema(f"in 'pattern' {error}") from None
        if "format" in schema and schema["format"] not in _FORMATS:
            known = ", ".join(_FORMATS)
            raise UnsupportedSchema(f"'format' is none of {known}")
    if "integer" in types or "number" in types:
        both("multipleOf", [name for name in _OF_TYPE["number"] if name != "multipleOf"])
        if "multipleOf" in schema and "number" in types:
            raise UnsupportedSchema("'multipleOf' can be enforced of integers only")
    if "object" in types and isinstance(names := schema.get("required", []), list):
        missing = [name for name in names if name not in schema.get("properties", {})]
        if missing:
            raise UnsupportedSchema(f"'required' names {missing[0]!r}, which 'properties' lacks")


def _is_of(value: Any, types: list[Any]) -> bool:
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return "integer" in types or "number" in types
        case float():
            return "number" in types or (value.is_integer() and "integer" in types)
        case str():
            return "string" in types
        case _:
            return ("array" if isinstance(value, list) else "object") in types
