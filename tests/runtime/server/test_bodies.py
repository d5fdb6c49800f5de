"""Bodies that are no request: what is said of their bytes, their JSON, their headers and size."""

import http.client
import json

import httpx
import pytest
from pydantic import ValidationError

from dualpace.runtime.server.errors import APIError
from dualpace.runtime.server.openai import ChatRequest, CompletionRequest
from dualpace.runtime.server.tokens import DetokenizeRequest, TokenizeRequest
from tests.runtime.server.asking import COMPLETION, refusal
from tests.servers import PATIENCE_S


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("{", "it ends too early, at line 1, column 2"),
        ('{"prompt": "h', "a string is never closed that begins at line 1, column 12"),
        ('{"prompt": "hi",\n"stop": None}', "null is written None, as Python does, at line 2"),
        ('{"prompt": "hi", "stream": True}', "true is written True"),
        ("{'prompt': 'hi'}", "a string stands in ' instead of \" at line 1, column 2"),
        ('{"prompt": "hi",}', "a comma stands after the last entry"),
        ('{"prompt": "h\ni"}', "a line break or tab stands inside of a string"),
        ('{"prompt": "hi"}}', "more follows after the object's end at line 1, column 17"),
        ('{"seed": 1' + "0" * 5000 + "}", "more than 4,300 digits"),
        ("", "is empty: it must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ('"text"', "must be a JSON object"),
        ('{"prompt": "hi", "top_p": NaN}', "top_p"),
        (b'{"prompt": "\xff"}', "not UTF-8 text: byte 12 is 0xff."),
        (b"\xff\xfe{", "not UTF-8 text: byte 0 is 0xff (it looks like UTF-16)"),
        ('{"prompt": "hi"}'.encode("utf-16-be"), "it looks like UTF-16 or UTF-32"),
        ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_bodies_that_are_no_request(server, body, sentence):
    headers = {"content-type": "application/json"}
    answer = server.http.post("/v1/completions", content=body, headers=headers)
    assert sentence in refusal(answer)["message"]


def test_a_client_that_goes_before_its_body_is_sent_is_no_fault_of_ours(start_server):
    server = start_server()
    server.wait_for("/ready")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "500")
    connection.endheaders(b"{")
    server.wait_for("/health")  # by now it waits for the rest
    connection.close()
    assert server.http.post("/v1/completions", json=COMPLETION).status_code == 200
    server.process.terminate()
    status, _, log = server.end()
    assert status == 0 and "Traceback" not in log


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": "fine H end"}', "prompt"),
        ('{"prompt": ["é", "H"]}', "prompt[1]"),
        (
            '{"prompt": "hi", "stop": ["a"], "guided_json": [[1], {}, [{"é": ["H"]}]]}',
            "guided_json[2][0].é[0]",
        ),
        ('{"prompt": "hi", "stop": "H"}', "stop"),
        ('{"prompt": "hi", "stop": ["a", "H"]}', "stop[1]"),
        ('{"prompt": "hi", "model": "H"}', "model"),
        ('{"prompt": "hi", "guided_json": {"enum": [1, "H"]}}', "guided_json.enum[1]"),
        ('{"prompt": "hi", "user": "H"}', "user"),
        ('{"prompt": "hi", "logit_bias": {"H": 1}}', "logit_bias.?"),
        ('{"messages": [{"role": "user", "content": "H"}]}', "messages[0].content"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}]}]}',
            "messages[0].content[0].text",
        ),
    ],
)
@pytest.mark.parametrize("half", ["\\ud800", "\\udfff"])
def test_half_a_surrogate_pair_is_no_text(server, body, param, half):
    """JSON can spell it, no text can hold it; the answer must not quote it either."""
    route = "chat/completions" if "messages" in body else "completions"
    headers = {"Content-Type": "application/json"}
    answer = server.http.post(f"/v1/{route}", content=body.replace("H", half), headers=headers)
    error = refusal(answer)
    assert error["param"] == param and "half a surrogate pair" in error["message"]


MANY = [None] * 1000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": MANY}),
        (CompletionRequest, {"prompt": [MANY] * 1000}),
        (CompletionRequest, {"prompt": "hi", "stop": MANY}),
        (CompletionRequest, {"prompt": "hi", "stop_token_ids": MANY}),
        (CompletionRequest, {"prompt": "hi", "allowed_token_ids": MANY}),
        (CompletionRequest, {"prompt": "hi", "guided_choice": MANY}),
        (CompletionRequest, {"prompt": "hi", "structured_outputs": {"choice": MANY}}),
        (ChatRequest, {"messages": MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": MANY}]}),
        (TokenizeRequest, {"messages": MANY}),
        (DetokenizeRequest, {"tokens": MANY}),
    ],
)
def test_a_list_is_judged_by_its_first_fault(kind, body):
    """A body has room for millions; a complaint about each would take all memory."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= 4  # one a type that it may be of


def test_too_many_biases_are_refused_unseen():
    with pytest.raises(APIError, match="logit_bias has 1000 tokens: use at most 300"):
        CompletionRequest.model_validate({"prompt": "hi", "logit_bias": dict(enumerate(MANY))})


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "sent with Content-Type: application/json."),
        ({"Content-Type": "text/plain; charset=utf-8"}, "not text/plain."),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "gzip: send it as it"),
    ],
)
def test_bodies_are_announced_as_what_they_are(server, headers, said):
    body = b'{"prompt": "hi"}'
    assert (
        said
        in refusal(server.http.post("/v1/completions", content=body, headers=headers))["message"]
    )
    given = {"Content-Type": "application/json; charset=utf-8"}
    assert server.http.post("/v1/completions", content=body, headers=given).status_code == 200


def test_a_body_that_is_too_large_is_refused_by_its_announcement_and_by_its_size(server):
    """And the server goes on serving others."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(10**11))
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, json.load(answer)["error"]["code"]) == (413, "body_too_large")
    connection.close()

    def pieces():
        for _ in range(40):
            yield b" " * 2**20

    try:
        sent = server.http.post(
            "/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
        )
    except httpx.WriteError:  # the answer came before all was sent
        pass
    else:
        assert refusal(sent, 413)["code"] == "body_too_large"
    assert server.http.get("/health").status_code == 200
