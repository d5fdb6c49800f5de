"""Forms of answers: what a request may ask for, which schemas can be held to, what is refused."""

import json
from typing import Any

import pytest

from dualpace import SamplingParams, StructuredOutputsParams
from dualpace.runtime.json_schema import MAX_DEPTH, UnsupportedSchema, check_schema
from dualpace.runtime.logit_rules import LogitRules
from dualpace.runtime.sampling_params import InvalidParameter
from dualpace.runtime.structured import MAX_CHARS

PERSON = {
    "title": "Person",
    "description": "as a validation library writes it",
    "type": "object",
    "properties": {
        "name": {"type": "string", "default": "x"},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
        "age": {"type": ["integer", "null"], "minimum": 0},
        "kind": {"enum": ["a", 1, None]},
        "tag": {"const": "t", "type": "string"},
        "name2": {"type": "string", "pattern": r"[A-Z]\w+(\.|\s|[\x20-\x7e])\d"},
        "born": {"type": "string", "format": "date"},
        "even": {"type": "integer", "multipleOf": 2},
        "friend": {"anyOf": [{"$ref": "#/$defs/Friend"}, {"type": "null"}], "default": None},
        "pets": {"type": "array", "items": {"$ref": "#/$defs/Friend"}, "uniqueItems": False},
        "pair": {"type": "array", "prefixItems": [{"type": "number"}, {}], "items": False},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"Friend": {"type": "object", "properties": {"if": {"type": "string"}}}},
}


def form(**asked: Any) -> Any:
    return StructuredOutputsParams(**asked).structure


def test_a_schema_is_handed_on_in_its_order() -> None:
    for schema in (PERSON, json.dumps(PERSON)):
        made = form(json=schema)
        assert (made.kind, made.asked_as) == ("compact", "structured_outputs")
        assert json.loads(made.text) == PERSON
        assert made.text.index('"name"') < made.text.index('"born"') < made.text.index('"pair"')
    assert form(json=True).text == "true"
    asked = {"type": "string", "pattern": r"a\:\ \d"}
    assert json.loads(form(json=asked).text)["pattern"] == r"a: \d"
    assert asked["pattern"] == r"a\:\ \d"


def test_the_other_ways() -> None:
    assert form(regex="a+")[:2] == ("regex", "a+")
    assert form(grammar='root ::= "a"')[:2] == ("grammar", 'root ::= "a"')
    assert form(choice=["yes", 'a"b\n', "é"])[:2] == (
        "grammar",
        'root ::= "yes" | "a\\"b\\n" | "é"',
    )
    assert form(json_object=True)[:2] == ("json", '{"type": "object"}')
    assert form(json=True, disable_any_whitespace=False)[:2] == ("json", "true")


def test_it_goes_with_the_rules_to_the_engine() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert params.rules.edits_logits and params.rules.needs_last_token
    assert LogitRules.of(json.loads(json.dumps(params.rules.asked()))) == params.rules


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, "takes exactly one of json, json_object, regex, choice and grammar."),
        ({"json_object": False}, "takes exactly one of"),
        ({"regex": "a", "choice": ["a"]}, "and grammar, not regex and choice."),
        ({"regex": ""}, "structured_outputs.regex is empty: say what the answer may be, or leave"),
        ({"choice": []}, "structured_outputs.choice is empty: "),
        ({"grammar": " "}, "structured_outputs.grammar is empty: "),
        ({"regex": "a^b"}, "structured_outputs: in the regular expression '^' inside cannot be"),
        ({"json": "[" * 50_000}, "structured_outputs: the schema is nested too deeply: nest it"),
        ({"json": "{"}, "structured_outputs: the schema is no JSON: Expecting property name"),
        ({"json": ""}, "the schema is no JSON"),
        ({"json": "[1]"}, "in the schema $ is no schema: it must be an object or a boolean."),
        ({"json": {"a": {1}}}, "the schema is no JSON: Object of type set"),
        ({"json": False}, "the schema false allows no answer."),
        ({"json": '{"const": "\\ud800"}'}, "the schema has half a surrogate pair"),
        ({"regex": 5}, "structured_outputs.regex must be a string."),
        ({"grammar": ["root ::= a"]}, "structured_outputs.grammar must be a string."),
        ({"choice": "yes"}, "structured_outputs.choice must be a list of strings."),
        ({"choice": ["yes", 1]}, "structured_outputs.choice must be a list of strings."),
        ({"json": {"not": {}}}, "in the schema 'not' cannot be enforced at $."),
        ({"regex": "a" * (MAX_CHARS + 1)}, "has 100,001 characters: use at most 100,000."),
        ({"regex": r"\A" + "a" * MAX_CHARS}, "has 100,002 characters: use at most 100,000."),
        ({"json": {"not": {}, "title": "a" * MAX_CHARS}}, "has 100,024 characters: use at most"),
        ({"choice": ["a"] * MAX_CHARS}, "has 200,000 characters: use at most 100,000."),
    ],
)
def test_what_is_no_form_is_refused(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        SamplingParams(structured_outputs=StructuredOutputsParams(asked_as="here", **asked))
    assert refusal.value.param == "here"
    assert sentence.replace("structured_outputs", "here") in str(refusal.value)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "object", "properties": {"a": {"if": {}}}}, "'if' cannot be enforced at $.pro"),
        ({"items": {"anyOf": [{}, {"not": {}}]}, "type": "array"}, "at $.items.anyOf[1]"),
        ({"$defs": {"a": {"contains": {}}}}, "'contains' cannot be enforced at $.$defs.a"),
        ({"type": "object", "patternProperties": {}}, "'patternProperties' cannot"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' cannot be enforced"),
        ({"$ref": "http://x/y"}, "'$ref' leads out of the schema"),
        ({"$ref": "#a"}, "'$ref' leads out of the schema"),
        ({"$ref": "#/$defs/a", "minimum": 3}, "'$ref' beside 'minimum' cannot be enforced"),
        ({"anyOf": [{}], "oneOf": [{}]}, "'anyOf' beside 'oneOf' cannot be enforced"),
        ({"oneOf": []}, "'oneOf' has no schema"),
        ({"type": "string", "pattern": 'a"'}, "'pattern' with quotes"),
        ({"type": "string", "pattern": "\\\\n"}, "'pattern' with quotes"),
        ({"type": "string", "pattern": "\\x22"}, "'pattern' with quotes"),
        ({"type": "string", "pattern": "\\u001F"}, "'pattern' with quotes"),
        ({"allOf": [{}, {}]}, "'allOf' of several schemas cannot be enforced"),
        ({"type": "string", "enum": ["a"], "minLength": 2}, "'enum' beside 'minLength'"),
        ({"type": "integer", "enum": [1, "a"]}, "'enum' has a value that is not of the 'type'"),
        ({"type": "string", "const": True}, "'const' has a value that is not of the 'type'"),
        ({"minLength": 3}, "'minLength' needs a 'type' beside it"),
        ({"type": []}, "'type' must be a string or a list of strings"),
        ({"type": "string", "pattern": "a", "maxLength": 1}, "'pattern' beside 'maxLength'"),
        ({"type": "string", "format": "date", "minLength": 1}, "'format' beside 'minLength'"),
        ({"type": "string", "format": "colour"}, "'format' is none of date, time"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf' can be enforced of integers only"),
        ({"type": "integer", "multipleOf": 2, "minimum": 0}, "'multipleOf' beside 'minimum'"),
        ({"type": "object", "required": ["b"]}, "'required' names 'b', which 'properties' lacks"),
        ({"type": "object", "properties": {"a": 5}}, "$.properties.a is no schema"),
        ({"type": "string", "pattern": "a^b"}, "in 'pattern' '^' inside cannot be enforced"),
        ({"type": "string", "pattern": 5}, "'pattern' is 5: it must be a string at $"),
        ({"type": "string", "minLength": -1}, "'minLength' is -1: it must be an integer from 0"),
        ({"type": "string", "maxLength": 2**63}, "is 9223372036854775808: it must be an integer"),
        ({"type": "array", "minItems": True}, "'minItems' is true: it must be an integer"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "must be at most 'maxLength', which"),
        ({"type": "array", "minContains": 2}, "'minContains' cannot be enforced at $"),
        ({"$ref": 5}, "'$ref' is 5: it must be a string at $"),
        ({"type": "object", "properties": []}, "'properties' is []: it must be an object"),
        ({"type": "object", "required": [1]}, "'required' is [1]: it must be a list of strings"),
        ({"enum": []}, "'enum' is []: it must be a list of one value or more"),
        ({"type": "integer", "minimum": "a"}, "'minimum' is \"a\": it must be a number"),
        ({"type": "integer", "maximum": 2**64}, "it must be from -9223372036854775807 to 9223"),
        ({"type": "integer", "multipleOf": 0}, "'multipleOf' is 0: it must be an integer above 0"),
        ({"type": "strin"}, "'type' is \"strin\": it must be of object, array"),
    ],
)
def test_what_a_schema_asks_for_in_vain_is_named(schema: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedSchema) as refusal:
        check_schema(schema)
    assert sentence in str(refusal.value)


def test_a_deep_schema_is_refused() -> None:
    schema: Any = {}
    for depth in range(1, 5000):
        if depth == MAX_DEPTH:
            check_schema(schema)
        schema = {"type": "array", "items": schema}
    with pytest.raises(UnsupportedSchema, match="nests more than 64 schemas in each other"):
        check_schema(schema)
