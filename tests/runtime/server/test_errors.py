"""What is refused, and how: OpenAI's shape, the parameter's name, nothing ignored."""

import json
import threading

import openai
import pytest

from tests.runtime.server.asking import CHAT, COMPLETION, post, refusal

PROMPTS = "a string, a list of strings, a list of token ids or a list of such lists"
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt_logprobs", 1),
        ("return_token_ids", True),
        ("suffix", "end"),
        ("best_of", 2),
    ],
)
def test_what_is_not_built_is_refused_by_name(server, param, value):
    error = refusal(post(server, "completions", {**COMPLETION, param: value}))
    assert error["param"] == param and param in error["message"]
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("continue_final_message", True),
    ],
)
def test_chat_refuses_by_name_too(server, param, value):
    error = refusal(post(server, "chat/completions", {**CHAT, param: value}))
    assert error["param"] == param and param in error["message"]


def test_an_unknown_parameter_is_refused_by_name(server):
    error = refusal(post(server, "completions", {**COMPLETION, "temprature": 0.5}))
    assert error["param"] == "temprature" and error["code"] == "unknown_parameter"
    assert error["message"] == "Unknown parameter 'temprature': did you mean 'temperature'?"


def test_values_that_ask_for_nothing_pass(server):
    nothing = {
        "logprobs": None,
        "echo": False,
        "suffix": None,
        "best_of": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "n": None,
        "temperature": None,
        "stop": None,
        "seed": None,
        "stream": None,
        "stream_options": None,
        "user": "ann",
        "something_new": None,
    }
    assert post(server, "completions", COMPLETION | nothing).status_code == 200
    tools = {"tools": None, "tool_choice": "none", "parallel_tool_calls": True, "store": False}
    assert post(server, "chat/completions", CHAT | tools).status_code == 200


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", "7"),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", "10"),
        ("n", 0),
        ("n", 1000),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [str(i) for i in range(17)]),
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", 5),
        ("prompt", [-1]),
        ("prompt", [257]),
        ("model", 3),
    ],
)
def test_bad_values_name_their_parameter(server, param, value):
    error = refusal(post(server, "completions", {**COMPLETION, param: value}))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("param", "value", "sentence"),
    [
        ("model", 3, "'model' must be a string, not 3."),
        ("stream", "yes", "'stream' must be true or false, not \"yes\"."),
        ("max_tokens", 2.5, "'max_tokens' must be an integer, not 2.5."),
        ("top_p", True, "'top_p' must be a number, not true."),
        ("stream_options", [1], "'stream_options' must be an object, not a list."),
        ("prompt", 5, f"'prompt' must be {PROMPTS}, not 5."),
        (
            "prompt",
            ["a", None],
            f"'prompt[1]' must be a string, not null: 'prompt' takes {PROMPTS}.",
        ),
        ("prompt", ["a", 1], f"'prompt[1]' must be a string, not 1: 'prompt' takes {PROMPTS}."),
        ("prompt", [[1], "a"], f"'prompt[1]' must be a list, not \"a\": 'prompt' takes {PROMPTS}."),
        ("store", True, "store=true is not supported by this server; leave 'store' out."),
        ("suffix", "x", "suffix=\"x\" is not supported by this server; leave 'suffix' out."),
    ],
)
def test_types_and_values_are_said_in_words_and_as_json(server, param, value, sentence):
    assert refusal(post(server, "completions", {**COMPLETION, param: value}))["message"] == sentence


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "[1].role"),
        ({"role": "king", "content": "x"}, "[1].role"),
        ({"role": "user"}, "[1].content"),
        ({"role": "user", "content": 5}, "[1].content"),
        ({"content": "x"}, "[1].role"),
        ("hello", "[1]"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "[1].tool_calls"),
        ({"role": "user", "content": [TEXT, IMAGE]}, "[1].content[1]"),
        ({"role": "user", "content": [TEXT, "x"]}, "[1].content[1]"),
        ({"role": "user", "content": [{"text": "x"}]}, "[1].content[0].type"),
        ({"role": "user", "content": [TEXT, {"type": "text"}]}, "[1].content[1].text"),
        ({"role": "user", "content": [TEXT, {**TEXT, "text": 5}]}, "[1].content[1].text"),
        ({"role": "user", "content": [{**TEXT, "colour": "red"}]}, "[1].content[0].colour"),
    ],
)
def test_a_bad_message_is_named_to_its_part(server, message, param):
    messages = [{"role": "system", "content": "x"}, message]
    error = refusal(post(server, "chat/completions", {**CHAT, "messages": messages}))
    assert error["param"] == f"messages{param}" and f"'messages{param}'" in error["message"]


@pytest.mark.parametrize(
    ("asked", "param", "sentence"),
    [
        (
            {"messages": [{"role": "king", "content": "x"}]},
            "messages[0].role",
            '\'messages[0].role\' must be "system", "developer", "user" or "assistant", '
            'not "king".',
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            '\'response_format.type\' must be "text", "json_object" or "json_schema", not "xml".',
        ),
        (
            {"max_tokens": 5, "max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens=0 is out of range: use at least 1.",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_those_that_are_taken(server, asked, param, sentence):
    error = refusal(post(server, "chat/completions", {**CHAT, **asked}))
    assert (error["message"], error["param"]) == (sentence, param)
    assert error["code"] == "invalid_value"


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize(("content", "said"), [(None, "null"), ([], "an empty list")])
def test_a_message_without_text_is_refused_as_such(server, role, content, said):
    messages = [{"role": role, "content": content}, {"role": "user", "content": "x"}]
    error = refusal(post(server, "chat/completions", {**CHAT, "messages": messages}))
    assert error["message"] == (
        f"'messages[0].content' must be a string or a list of text parts, not {said}."
    )


def test_a_token_id_that_is_none_is_named(server):
    error = refusal(post(server, "completions", {**COMPLETION, "prompt": [2, 257]}))
    assert error["message"] == "The prompt has the token id 257: ids are 0 to 256."
    error = refusal(post(server, "completions", {**COMPLETION, "prompt": [[1], [2, 257]]}))
    assert error["message"] == "'prompt[1]' has the token id 257: ids are 0 to 256."
    assert error["param"] == "prompt[1]"


def test_an_empty_prompt_is_named_with_the_remedy(server):
    remedy = "is empty: send some text, or at least one token id."
    for prompt, what in (("", "The prompt"), ([], "The prompt"), (["a", ""], "'prompt[1]'")):
        error = refusal(post(server, "completions", {**COMPLETION, "prompt": prompt}))
        assert error["message"] == f"{what} {remedy}" and error["code"] == "invalid_value"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max_completion_tokens", "max_tokens"),
        ("n_predict", "max_tokens"),
        ("max_tokns", "max_tokens"),
    ],
)
def test_words_of_other_servers_are_told_ours(server, name, ours):
    error = refusal(post(server, "completions", {**COMPLETION, name: 5}))
    assert error["message"] == f"Unknown parameter '{name}': did you mean '{ours}'?"


def test_messages_that_the_template_refuses(server):
    messages = [{"role": "assistant", "content": "x"}]
    error = refusal(post(server, "chat/completions", {**CHAT, "messages": messages}))
    assert error["param"] == "messages" and error["message"].startswith("The last message")
    assert refusal(post(server, "chat/completions", {**CHAT, "messages": []}))


def test_missing_fields(server):
    error = refusal(post(server, "completions", {"model": "tiny"}))
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")
    error = refusal(post(server, "chat/completions", {"model": "tiny"}))
    assert error["param"] == "messages"


@pytest.mark.parametrize(("prompts", "n"), [(1025, 1), (9, 128)])
def test_one_request_cannot_bring_any_number_of_prompts(server, prompts, n):
    error = refusal(post(server, "completions", {**COMPLETION, "prompt": ["a"] * prompts, "n": n}))
    assert error["param"] == "prompt"
    assert f"{prompts} prompts" in error["message"] and "at most 1024" in error["message"]


def test_a_prompt_that_fills_the_context(server, client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 4096)
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in caught.value.message and "4095" in caught.value.message
    answer = client.completions.create(model="tiny", prompt="x" * 4095)
    assert answer.usage.completion_tokens == 1


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(server):
    error = refusal(post(server, "completions", {**COMPLETION, "prompt": " " * 3_000_000}))
    assert error["code"] == "context_length_exceeded"
    assert "3000000 characters" in error["message"]


def test_unknown_model(server, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="hi")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/nothing", "no route /v1/nothing. It has POST /v1/completions, "),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/completion", "did you mean /v1/completions?"),
        ("//v1/models", "did you mean /v1/models?"),
        ("/v1/completions/", "did you mean /v1/completions?"),
        ("/" + "a" * 5000, f"no route /{'a' * 99}. It has"),
    ],
)
def test_an_unknown_route_is_answered_with_those_there_are(server, path, hint):
    error = refusal(server.http.post(f"{server.url}{path}"), 404)
    assert error["code"] == "no_such_route" and hint in error["message"]
    for route in ("POST /v1/chat/completions", "GET /v1/models/MODEL", "GET /metrics"):
        assert route in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models/tiny", "GET")],
)
def test_a_wrong_method_names_the_right_one(server, method, path, allowed):
    answer = server.http.request(method, path)
    assert refusal(answer, 405)["message"] == f"{path} takes {allowed}, not {method}."
    assert answer.headers["allow"] == allowed


def test_probes_may_use_head(server):
    assert server.http.head("/ready").status_code == server.http.head("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_is_a_400(server, stream):
    error = refusal(
        post(server, "completions", {**COMPLETION, "prompt": "refuse me", "stream": stream})
    )
    assert "more memory" in error["message"]


def test_one_refused_prompt_ends_the_whole_request(server):
    prompts = ["hang on", "refuse me"]
    refusal(post(server, "completions", {**COMPLETION, "prompt": prompts}))
    assert server.metric('dualpace_kv_blocks_used{pool="gpu"}') == 0


def test_a_long_text_does_not_hold_up_others(server):
    """Long texts are tokenized in a thread; the error that follows is the same."""
    errors = []

    def ask():
        errors.append(refusal(post(server, "completions", {**COMPLETION, "prompt": "x" * 10**6})))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert json.loads(server.http.get("/health").text)["status"] == "alive"
    for thread in threads:
        thread.join()
    assert {error["code"] for error in errors} == {"context_length_exceeded"}


def test_a_long_name_is_cut(server):
    error = refusal(post(server, "completions", {**COMPLETION, "k" * 100_000: 1}))
    assert error["code"] == "unknown_parameter"
    assert len(error["message"]) < 2100 and len(error["param"]) < 110
