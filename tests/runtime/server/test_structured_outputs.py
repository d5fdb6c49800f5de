"""Forms of answers over HTTP: OpenAI's words and vLLM's come to one thing, and what does not fit is
a 400 with a sentence."""

import json

import pytest

from tests.runtime.server.asking import CHAT, COMPLETION, post, refusal

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def arrives(client, **body):
    """What the engine is told of the form."""
    answer = client.completions.create(
        model="tiny", prompt="params", max_tokens=999, extra_body=body
    )
    return json.loads(answer.choices[0].text)["rules"].get("structure")


def test_openais_words_arrive(client):
    name, text = "response_format.json_schema.schema", json.dumps(SCHEMA)
    assert arrives(client, response_format=FORMAT) == ["compact", text, name]
    anything = ["json", '{"type": "object"}', "response_format"]
    assert arrives(client, response_format={"type": "json_object"}) == anything
    assert arrives(client, response_format={"type": "text"}) is None
    messages = [{"role": "user", "content": "params"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, response_format=FORMAT)
    structure = json.loads(chat.choices[0].message.content)["rules"]["structure"]
    assert structure == ["compact", text, name]


@pytest.mark.parametrize(
    ("way", "value", "kind", "meant"),
    [
        ("json", SCHEMA, "compact", json.dumps(SCHEMA)),
        ("json", json.dumps(SCHEMA), "compact", json.dumps(SCHEMA)),
        ("regex", "a+", "regex", "a+"),
        ("choice", ["a", "b"], "grammar", 'root ::= "a" | "b"'),
        ("grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
    ],
)
def test_vllms_words_arrive(client, way, value, kind, meant):
    asked = {way: value, "structural_tag": None, "disable_fallback": False}
    assert arrives(client, structured_outputs=asked) == [kind, meant, "structured_outputs"]
    assert arrives(client, **{f"guided_{way}": value}) == [kind, meant, f"guided_{way}"]


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "must be "),
        ({"response_format": {}}, "response_format.type", "is missing"),
        ({"response_format": "json"}, "response_format", "must be an object"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "'response_format.json_schema' is missing.",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": 5}}},
            "response_format.json_schema.schema",
            "'response_format.json_schema.schema' must be a JSON schema, not 5.",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema",
            "'response_format.schema' is not supported by this server; leave it out.",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "contains": {}}},
                }
            },
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: in the schema 'contains' cannot be enforced at $.",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "takes exactly one of json, "),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "not json and"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice is empty: "),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "a string"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "a JSON schema, or its"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "is not supported by this server",
        ),
        ({"guided_regex": ""}, "guided_regex", "guided_regex is empty: "),
        (
            {"guided_regex": "a", "response_format": FORMAT},
            "guided_regex",
            "'response_format' and 'guided_regex' cannot both be used: send one.",
        ),
    ],
)
def test_what_is_no_form_is_refused(server, body, param, sentence):
    for route, rest in (("completions", COMPLETION), ("chat/completions", CHAT)):
        error = refusal(post(server, route, rest | body))
        assert error["param"] == param and sentence in error["message"], error


def test_the_engines_refusal_blames_the_form(server):
    body = {"prompt": "refuse", "response_format": {"type": "json_object"}}
    for stream in (False, True):
        error = refusal(post(server, "completions", body | {"stream": stream}))
        assert (error["param"], error["code"]) == ("response_format", "invalid_value")


def test_a_form_that_found_no_thread_may_be_sent_again(server):
    body = {"prompt": "busy", "response_format": {"type": "json_object"}}
    response = post(server, "completions", body)
    assert response.headers["Retry-After"] == "1"
    error = refusal(response, 503)
    assert (error["param"], error["code"]) == ("response_format", "busy")
