"""The OpenAI routes through OpenAI's own client."""

import json

import openai
import pytest


def complete(client: openai.OpenAI, prompt, **more):
    return client.completions.create(model="tiny", prompt=prompt, **{"max_tokens": 400, **more})


def streamed(client: openai.OpenAI, prompt, **more):
    return list(complete(client, prompt, stream=True, **more))


def chat(client: openai.OpenAI, text: str, **more):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tiny", messages=messages, **more)


def test_completion(client):
    answer = complete(client, "hello")
    assert answer.object == "text_completion" and answer.model == "tiny"
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)
    assert answer.model_extra["dualpace"] == {"tokens_by_engine": {"gpu": 3, "cpu": 3}}


def test_completion_stops_at_16_tokens_unless_told_otherwise(client):
    answer = client.completions.create(model="tiny", prompt="x" * 40)
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16


def test_stream_comes_in_pieces_and_has_no_usage_unless_asked(client):
    chunks = streamed(client, "slow hello")
    assert "".join(c.choices[0].text for c in chunks) == "slow hello"
    assert 1 < len(chunks) <= 11  # a chunk a token, unless two came while the loop was busy
    reasons = [c.choices[0].finish_reason for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_stream_ends_with_usage_when_asked(client):
    chunks = streamed(client, "hello", stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert all(c.usage is None and c.choices for c in chunks[:-1])


def test_each_piece_says_its_usage_when_asked(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = streamed(client, "slow hi", stream_options=options)
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts) and counts[0] >= 1
    assert counts[-1] == last.usage.completion_tokens == 8 and last.choices == []


def test_raw_stream_is_server_sent_events(server):
    body = {"model": "tiny", "prompt": "ab", "stream": True}
    response = server.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-2])


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["one", "two"], ["one", "two"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [111, 107]], ["hi", "ok"]),
    ],
)
def test_prompt_forms(client, prompt, texts):
    answer = complete(client, prompt)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert answer.usage.completion_tokens == sum(map(len, texts)) + len(texts)


def test_several_prompts_stream_side_by_side(client):
    texts = {0: "", 1: ""}
    for chunk in streamed(client, ["first", "second one"]):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "first", 1: "second one"}


def test_n_answers_have_seeds_of_their_own(client):
    answer = complete(client, "params", n=3, seed=7)
    seeds = [json.loads(choice.text)["seeds"] for choice in answer.choices]
    assert seeds == [7, 8, 9]
    assert answer.usage.prompt_tokens == len("params")


def test_sampling_parameters_arrive(client):
    extra = {"top_k": 5, "ignore_eos": False}
    asked = {"temperature": 0.25, "top_p": 0.5, "seed": 2**62 + 1, "extra_body": extra}
    seen = json.loads(complete(client, "params", max_tokens=500, **asked).choices[0].text)
    assert seen == {
        "max_tokens": 500,
        "ignore_eos": 0,
        "temperature": 0.25,
        "top_k": 5,
        "top_p": 0.5,
        "seeds": 2**62 + 1,
        "rules": {},
    }


def test_sampling_defaults_are_openais(client):
    first, second = (json.loads(complete(client, "params").choices[0].text) for _ in range(2))
    assert (first["temperature"], first["top_p"], first["top_k"]) == (1, 1, 0)
    assert first["seeds"] != second["seeds"]


def test_ignore_eos_runs_to_the_limit(client):
    answer = complete(client, "ab", max_tokens=7, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == "abababa"
    assert answer.choices[0].finish_reason == "length"


def test_max_tokens_is_clipped_to_the_context(client):
    seen = json.loads(complete(client, "params", max_tokens=10**6).choices[0].text)
    assert seen["max_tokens"] == 4096 - len("params")


def test_chat_runs_to_the_context_unless_told_otherwise(client):
    seen = json.loads(chat(client, "params").choices[0].message.content)
    assert seen["max_tokens"] == 4096 - len("params")
    seen = json.loads(chat(client, "params", max_completion_tokens=300).choices[0].message.content)
    assert seen["max_tokens"] == 300


def test_chat(client):
    answer = chat(client, "hello")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello"
    assert answer.usage.completion_tokens == 6


def test_chat_stream(client):
    chunks = list(chat(client, "hello", stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].object == "chat.completion.chunk"
    text = "".join(c.choices[0].delta.content for c in chunks if c.choices)
    assert text == "hello"
    assert chunks[-1].usage.prompt_tokens == 5


def test_the_template_gets_its_variables(client):
    thinks = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = chat(client, "x", extra_body=thinks)
    assert json.loads(answer.choices[0].message.content) == {"enable_thinking": False}
    with pytest.raises(openai.BadRequestError, match="messages is set by the server"):
        chat(client, "x", extra_body={"chat_template_kwargs": {"messages": []}})


def test_chat_template_gets_roles_names_and_joined_parts(client):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    assert json.loads(answer.choices[0].message.content) == [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "a\nb", "name": "ann"},
    ]


@pytest.mark.parametrize("text", ["naïve café", "日本語テキスト", "🙂👩‍👩‍👧 end", "mixed é🙂x"])
def test_characters_are_never_cut(client, text):
    """Every token is one byte, so most chunks end inside a character."""
    pieces = [c.choices[0].text for c in streamed(client, text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_by_the_limit_is_marked(client):
    answer = complete(client, "aé", max_tokens=2)
    assert answer.choices[0].text == "a\ufffd"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "stop", "text", "tokens"),
    [
        ("one END two", "END", "one ", 7),
        ("one END two", ["nothing", " two"], "one END", 11),
        ("aab aac", "aac", "aab ", 7),
        ("ENEND", ["END"], "EN", 5),
        ("all of EN", "END", "all of EN", 10),  # held back, never completed
        ("x日y", "日", "x", 4),
    ],
)
def test_stop_strings(client, server, stream, prompt, stop, text, tokens):
    options = {"include_usage": True} if stream else openai.omit
    answer = complete(client, prompt, stop=stop, stream=stream, stream_options=options)
    if stream:
        chunks = list(answer)
        got = "".join(c.choices[0].text for c in chunks if c.choices)
        reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        got, reason = answer.choices[0].text, answer.choices[0].finish_reason
        usage = answer.usage
    assert (got, reason) == (text, "stop")
    assert usage.completion_tokens == tokens
    assert server.metric('dualpace_kv_blocks_used{pool="gpu"}') == 0


def test_models(client, server):
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny"]
    assert models[0].model_extra["max_model_len"] == 4096
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_the_model_may_be_left_out(server):
    answer = server.http.post("/v1/completions", json={"prompt": "hi"})
    assert answer.json()["model"] == "tiny"


def test_the_request_of_vllm_bench_serve(server):
    body = {
        "model": "tiny",
        "prompt": "hello",
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    response = server.http.post("/v1/completions", json=body, headers={"x-request-id": "7"})
    chunks = [json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n")[:-2]]
    assert all(chunk["choices"] for chunk in chunks[:-1]) and chunks[-1]["choices"] == []
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "hellohel"
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_version_and_health(server):
    about = server.http.get("/version").json()
    assert about["version"] and about["profile"] is None
    assert server.http.get("/health").json() == {"status": "alive"}
    assert server.http.get("/ready").json() == {"status": "ready"}
