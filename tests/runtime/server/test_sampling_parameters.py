"""Parameters of sampling through OpenAI's client: what arrives at the engine, what ends an answer,
what is refused."""

import json
from pathlib import Path

import pytest

from dualpace import SamplingParams
from dualpace.runtime.server.openai import ChatRequest, CompletionRequest

EOS = 256
API = Path(__file__).resolve().parents[3] / "docs" / "api.md"
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"50": -100, "7": 2.5}}
EXTRA = {"repetition_penalty": 1.1, "min_p": 0.05, "min_tokens": 3, "stop_token_ids": [1, 2]}
EXTRA |= {"allowed_token_ids": [2, 3]}


def complete(client, prompt, extra=None, **more):
    return client.completions.create(
        model="tiny", prompt=prompt, extra_body=extra, **{"max_tokens": 400, **more}
    )


def text_of(client, prompt, extra, **more):
    """Text and finish reason, the same whether it is streamed or not."""
    choice = complete(client, prompt, extra, **more).choices[0]
    chunks = list(complete(client, prompt, extra, stream=True, **more))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    return choice.text, choice.finish_reason


def refusal(server, body):
    answer = server.http.post("/v1/completions", json={"prompt": "hi", **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_all_that_openai_and_vllm_clients_send_arrives(client):
    wanted = {**PENALTIES, **EXTRA, "logit_bias": [[50, -100], [7, 2.5]]}
    seen = json.loads(complete(client, "params", EXTRA, **PENALTIES).choices[0].text)
    assert seen["rules"] == wanted
    messages = [{"role": "user", "content": "params"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, extra_body=EXTRA, **PENALTIES
    )
    assert json.loads(answer.choices[0].message.content)["rules"] == wanted


def test_requests_of_one_message_keep_their_own(client):
    """Answers to several prompts are submitted together."""
    answer = complete(client, ["params", "params"], {"min_p": 0.5}, n=2)
    assert [json.loads(c.text)["rules"] for c in answer.choices] == [{"min_p": 0.5}] * 4


def test_values_that_ask_for_nothing_say_nothing(client):
    neutral = {"repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0, "stop_token_ids": []}
    none = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    answer = complete(client, "params", neutral | {"skip_special_tokens": True}, **none)
    assert json.loads(answer.choices[0].text)["rules"] == {}


def test_a_stop_token_ends_the_answer_and_is_no_text_unless_asked_for(client):
    ends = {"stop_token_ids": [ord("d"), ord("x")]}
    assert text_of(client, "abcdefg", ends) == ("abc", "stop")
    shown = ends | {"include_stop_str_in_output": True}
    assert text_of(client, "abcdefg", shown) == ("abcd", "stop")
    assert text_of(client, "abcdefg", ends | {"ignore_eos": True}) == ("abc", "stop")
    answer = complete(client, "abcdefg", ends)
    assert answer.usage.completion_tokens == 4  # the stop token is one


def test_a_stop_string_is_text_if_asked_for(client):
    include = {"include_stop_str_in_output": True}
    assert text_of(client, "one END two", include, stop="END") == ("one END", "stop")
    assert text_of(client, "one END two", {}, stop="END") == ("one ", "stop")


STRING = ("one END two", {"stop": ["two", "END"]}, "END")
TOKEN = ("abcdefg", {"stop_token_ids": [ord("x"), ord("d")]}, ord("d"))
END_OF_SEQUENCE = ("hi", {"stop": "END", "stop_token_ids": [EOS]}, None)
NAMED_END = ("hi", {"stop_token_ids": [ord("i")], "ignore_eos": True}, ord("i"))
LENGTH = ("abcdefg", {"max_tokens": 3, "stop": "END"}, None)


@pytest.mark.parametrize(
    ("prompt", "asked", "reason"), [STRING, TOKEN, END_OF_SEQUENCE, NAMED_END, LENGTH]
)
def test_an_answer_says_what_ended_it(server, prompt, asked, reason):
    asked = {"max_tokens": 400, **asked}
    for route, body in (
        ("completions", {"prompt": prompt}),
        ("chat/completions", {"messages": [{"role": "user", "content": prompt}]}),
    ):
        whole = server.http.post(f"/v1/{route}", json={**body, **asked}).json()
        assert whole["choices"][0]["stop_reason"] == reason
        streamed = server.http.post(f"/v1/{route}", json={**body, **asked, "stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.split("\n\n") if "{" in line]
        reasons = [event["choices"][0]["stop_reason"] for event in events]
        assert reasons == [None] * (len(events) - 1) + [reason]


def test_no_stop_string_ends_an_answer_before_its_least_length(client):
    assert text_of(client, "ab ab ab", {"min_tokens": 2}, stop="ab") == ("ab ", "stop")
    assert text_of(client, "ab ab ab", {"min_tokens": 4}, stop="ab") == ("ab ", "stop")
    assert text_of(client, "ab ab ab", {"min_tokens": 8}, stop="ab") == ("ab ab ab", "stop")


def test_special_tokens_are_text_if_asked_for(client):
    end = {"include_stop_str_in_output": True}
    assert text_of(client, "hi", end) == ("hi", "stop")
    assert text_of(client, "hi", end | {"skip_special_tokens": False}) == ("hi<end>", "stop")
    assert text_of(client, "hi", {"skip_special_tokens": False}) == ("hi", "stop")


def test_the_least_length_is_cut_to_the_context_as_the_most_is(client):
    asked = {"min_tokens": 10**6}
    seen = json.loads(complete(client, "params", asked, max_tokens=10**6).choices[0].text)
    assert seen["rules"]["min_tokens"] == seen["max_tokens"] == 4096 - len("params")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"min_p": 1.5}, "min_p=1.5 is out of range: use 0 to 1."),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5 is out of range: use -2 to 2."),
        ({"frequency_penalty": -3}, "frequency_penalty=-3.0 is out of range: use -2 to 2."),
        ({"repetition_penalty": 0}, "repetition_penalty=0.0 is out of range: use 0.01 to 100,"),
        ({"min_tokens": -1}, "min_tokens=-1 is out of range: use 0 or more, at most max_tokens=16"),
        ({"min_tokens": 17}, "at most max_tokens=16."),
        ({"min_tokens": 1, "allowed_token_ids": [EOS]}, "min_tokens=1 forbids every token"),
        ({"logit_bias": {"5": 101}}, "logit_bias has 101.0 for token 5: use -100 to 100."),
        ({"logit_bias": {"x": 1}}, 'logit_bias has the key "x": use token ids as strings, such as'),
        ({"logit_bias": {"10": 5, "010": -5}}, 'logit_bias has the key "010": use token ids as'),
        ({"logit_bias": {"00": 1}}, 'logit_bias has the key "00"'),
        ({"logit_bias": {"1\n": 1}}, "logit_bias has the key"),
        ({"logit_bias": {"-1": 1}}, "use token ids"),
        ({"logit_bias": {"257": 1}}, "logit_bias names token 257: this model has 0 to 256."),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "has 301 tokens: use at most 300."),
        ({"allowed_token_ids": [256, -1]}, "allowed_token_ids names token -1"),
        ({"allowed_token_ids": [0] * 301}, "has 301 tokens: use at most 300."),
        ({"stop_token_ids": [3, 300]}, "stop_token_ids names token 300: this model has 0 to 256."),
        ({"stop_token_ids": [-1]}, "stop_token_ids names token -1"),
        ({"stop_token_ids": [0] * 129}, "has 129 tokens: use at most 128."),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"min_p": "0.5"}, "min_p"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ],
)
def test_what_is_out_of_range_is_refused_with_its_limit(server, body, sentence):
    error = refusal(server, body)
    assert sentence in error["message"] and next(iter(body)) in error["param"]


def test_the_list_of_parameters_is_complete():
    names = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    names |= set(SamplingParams.__dataclass_fields__)
    text = API.read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
