"""/tokenize and /detokenize, with a tokenizer of bytes."""

import pytest

CHAT = [{"role": "user", "content": "hi"}]


def post(server, route, **body):
    return server.http.post(f"/{route}", json=body)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "hé", "model": "tiny"}, "hé"),
        ({"prompt": "", "add_special_tokens": False}, ""),
        ({"messages": CHAT}, "hi"),
        ({"messages": CHAT, "add_generation_prompt": False, "prompt": None}, "closed: hi"),
    ],
)
def test_a_text_is_counted_as_it_would_be_served(server, body, text):
    answer = post(server, "tokenize", **body)
    ids = list(text.encode())
    assert answer.json() == {
        "count": len(ids),
        "max_model_len": 4096,
        "tokens": ids,
        "token_strs": None,
    }


def test_ids_are_spelled_out_with_special_tokens(server):
    answer = post(server, "detokenize", tokens=[104, 105, 256], model="tiny")
    assert answer.json() == {"prompt": "hi<end>"}
    assert post(server, "detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("body", "code"),
    [({}, "missing_required_parameter"), ({"prompt": "a", "messages": CHAT}, "invalid_value")],
)
def test_neither_prompt_nor_messages_are_missing_and_both_are_wrong(server, body, code):
    assert post(server, "tokenize", **body).json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("route", "body", "param", "said"),
    [
        ("tokenize", {}, "prompt", "Send one of 'prompt' and 'messages'."),
        ("tokenize", {"prompt": "a", "messages": CHAT}, "prompt", "Send one of"),
        ("tokenize", {"prompt": 5}, "prompt", "'prompt' must be a string, not 5."),
        ("tokenize", {"prompt": "a", "colour": 1}, "colour", "Unknown parameter 'colour'."),
        ("tokenize", {"prompt": "a", "promt": "a"}, "promt", "'promt': did you mean 'prompt'?"),
        ("tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs", "leave"),
        ("detokenize", {"tokens": [1], "colour": 1}, "colour", "Unknown parameter 'colour'."),
        ("tokenize", {"messages": []}, "messages", "'messages' is empty"),
        ("tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ("tokenize", {"prompt": "x" * 2_000_000}, "prompt", "2000000 characters"),
        ("detokenize", {}, "tokens", "'tokens' is missing."),
        ("detokenize", {"tokens": [1, 257]}, "tokens[1]", "is 257: token ids are 0 to 256."),
        ("detokenize", {"tokens": [-1]}, "tokens[0]", "is -1"),
        ("detokenize", {"tokens": [1, "a"]}, "tokens[1]", 'must be an integer, not "a".'),
    ],
)
def test_what_cannot_be_tokenized_is_named(server, route, body, param, said):
    answer = post(server, route, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


def test_what_asks_for_nothing_is_passed_over(server):
    asked = {"return_token_strs": False, "continue_final_message": False, "tools": [], "user": "a"}
    assert post(server, "tokenize", prompt="hi", **asked).json()["tokens"] == [104, 105]


def test_another_model_is_not_here(server):
    assert post(server, "tokenize", prompt="hi", model="other").status_code == 404


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_ping_is_health_by_another_name(server, method):
    assert server.http.request(method, "/ping").status_code == 200
