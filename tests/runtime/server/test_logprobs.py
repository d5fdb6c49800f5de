"""Log-probabilities over HTTP: both shapes, whole and streamed, beside the text that is shown."""

import json

import pytest
from byte_tokenizer import EOS
from likely import DRAWN_LOGPROB, likeliest

from dualpace.runtime.alignment import LikelyToken, ToldToken
from dualpace.runtime.server.logprobs import LogprobForm
from tests.runtime.server.asking import post, refusal

UNTIL_END = {"max_tokens": 100}


def complete(client, prompt, best, **more):
    return client.completions.create(model="tiny", prompt=prompt, logprobs=best, **UNTIL_END | more)


def chat(client, text, best, **more):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model="tiny", messages=messages, logprobs=True, top_logprobs=best, **UNTIL_END | more
    )


def streamed_completion(client, prompt, best, **more):
    """The lists, put together from pieces, and the text that had been shown with each token."""
    whole, text, shown = {}, "", []
    for chunk in complete(client, prompt, best, stream=True, **more):
        choice = chunk.choices[0]
        text += choice.text
        if choice.logprobs is not None:
            shown += [text] * len(choice.logprobs.tokens)
            for name, part in choice.logprobs.to_dict().items():
                whole[name] = part if part is None else whole.get(name, []) + part
    return whole, shown


def streamed_chat(client, text, best, **more):
    content = []
    for chunk in chat(client, text, best, stream=True, **more):
        choice = chunk.choices[0]
        if choice.logprobs is not None:
            assert choice.logprobs.content, "a piece without tokens has no list"
            content += choice.logprobs.content
    return content


def name(token):
    return "<end>" if token == EOS else bytes([token]).decode(errors="replace")


def test_a_completion_tells_each_token_and_the_likeliest(client):
    answer = complete(client, "hi you", 3)
    told = answer.choices[0].logprobs
    tokens = [*b"hi you", EOS]
    assert told.tokens == [name(token) for token in tokens]
    assert told.token_logprobs == [DRAWN_LOGPROB] * 7
    assert told.text_offset == [0, 1, 2, 3, 4, 5, 6]
    assert told.top_logprobs == [{name(t): p for t, p in likeliest(t, 3)} for t in tokens]
    assert len(told.tokens) == answer.usage.completion_tokens
    assert streamed_completion(client, "hi you", 3)[0] == told.to_dict()


def test_the_generated_token_is_told_among_the_likeliest_even_if_it_is_none_of_them(client):
    told = complete(client, "b", 1, max_tokens=1).choices[0].logprobs
    assert told.top_logprobs == [{"c": -0.5, "b": DRAWN_LOGPROB}]
    told = complete(client, "b", 0, max_tokens=1).choices[0].logprobs
    assert told.top_logprobs is None and told.token_logprobs == [DRAWN_LOGPROB]


def test_a_chat_answer_tells_each_token_and_the_likeliest(client):
    answer = chat(client, "hello", 2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [*"hello", "<end>"]
    assert [entry.logprob for entry in content] == [DRAWN_LOGPROB] * 6
    for entry, token in zip(content, b"hello", strict=False):
        assert entry.bytes == [token]
        top = [(one.token, one.bytes, one.logprob) for one in entry.top_logprobs]
        assert top == [(name(t), [t], p) for t, p in likeliest(token, 2)]
    assert content[-1].bytes is None, "the end of sequence is no text"
    assert streamed_chat(client, "hello", 2) == content


def test_openais_own_reader_of_streams_puts_the_lists_together(client):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    with client.chat.completions.stream(**asked, logprobs=True, top_logprobs=2) as stream:
        content = stream.get_final_completion().choices[0].logprobs.content
    assert content == chat(client, "hello", 2).choices[0].logprobs.content


def test_without_likeliest_tokens_a_chat_answer_has_an_empty_list_of_them(client):
    content = chat(client, "ab", None).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in content] == [[], [], []]


def test_who_does_not_ask_is_told_nothing(client):
    messages = [{"role": "user", "content": "hi"}]
    for more in ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}):
        answer = client.chat.completions.create(model="tiny", messages=messages, **more)
        assert answer.choices[0].logprobs is None
    assert client.completions.create(model="tiny", prompt="hi").choices[0].logprobs is None


TEXTS = ["naïve café", "日本語", "🙂👩‍👧 end"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_cut_characters_join_to_the_text(client, text):
    """Each token is a byte here, so no token of such a character is text by itself."""
    content = chat(client, text, 1).choices[0].logprobs.content
    data = b"".join(bytes(entry.bytes or ()) for entry in content)
    assert data.decode() == text
    assert {entry.token for entry in content if entry.bytes and entry.bytes[0] > 127} == {"\ufffd"}
    assert streamed_chat(client, text, 1) == content


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_count_characters_and_tokens_come_with_theirs(client, text):
    told, shown = streamed_completion(client, text, 1)
    characters = [at for at, character in enumerate(text) for _ in character.encode()]
    assert told["text_offset"] == [*characters, len(text)]
    for offset, so_far in zip(characters, shown, strict=False):
        assert len(so_far) > offset, "a token is told when its character is shown, not before"
    assert complete(client, text, 1).choices[0].logprobs.to_dict() == told


def test_a_character_that_the_limit_cuts_is_told(client):
    content = chat(client, "aé", 0, max_tokens=2).choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in content] == [("a", [97]), ("\ufffd", [0xC3])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "asked", "tokens"),
    [
        ("one END two", {"stop": "END"}, [*"one "]),
        ("all of EN", {"stop": "END"}, [*"all of EN", "<end>"]),
        ("x日y", {"stop": "日"}, ["x"]),
        ("END", {"stop": "END"}, []),
        ("aEND", {"stop": "END", "extra_body": {"include_stop_str_in_output": True}}, [*"aEND"]),
        ("abcd", {"extra_body": {"stop_token_ids": [ord("c")]}}, [*"abc"]),
        ("ab", {"extra_body": {"skip_special_tokens": False}}, [*"ab", "<end>"]),
    ],
)
def test_tokens_go_where_their_text_goes(client, stream, prompt, asked, tokens):
    if stream:
        content = streamed_chat(client, prompt, 0, **asked)
    else:
        content = chat(client, prompt, 0, **asked).choices[0].logprobs.content
    assert [entry.token for entry in content] == tokens


def test_what_is_held_back_is_told_when_it_is_shown(client):
    told, shown = streamed_completion(client, "slow ENENx", 0, stop="END")
    text = "slow ENENx"
    assert "".join(told["tokens"]) == f"{text}<end>"
    for offset, so_far in zip(told["text_offset"], shown, strict=True):
        assert len(so_far) > offset or so_far == text


def test_a_token_that_is_no_text_has_no_bytes(client):
    content = chat(client, "abc", 0, extra_body={"stop_token_ids": [ord("c")]})
    entries = content.choices[0].logprobs.content
    assert [entry.bytes for entry in entries] == [[97], [98], None]
    shown = {"stop_token_ids": [ord("c")], "include_stop_str_in_output": True}
    entries = chat(client, "abc", 0, extra_body=shown).choices[0].logprobs.content
    assert entries[-1].bytes == [99]


def test_tokens_may_be_named_by_their_ids(client):
    ids = {"return_tokens_as_token_ids": True}
    told = complete(client, "é", 2, extra_body=ids).choices[0].logprobs
    assert told.tokens == ["token_id:195", "token_id:169", f"token_id:{EOS}"]
    assert told.top_logprobs[0] == {"token_id:196": -0.5, "token_id:195": DRAWN_LOGPROB}
    content = chat(client, "a", 1, extra_body=ids).choices[0].logprobs.content
    assert (content[0].token, content[0].top_logprobs[0].token) == ("token_id:97", "token_id:98")
    assert content[0].bytes == [97]


def test_of_tokens_with_one_name_the_likeliest_is_told(client):
    told = complete(client, "é", 2, max_tokens=1).choices[0].logprobs
    assert told.top_logprobs == [{"\ufffd": -0.5}] and told.token_logprobs == [DRAWN_LOGPROB]


def test_each_of_several_answers_has_its_own(client):
    answer = complete(client, ["ab", "xyz"], 1, n=2)
    texts = ["".join(choice.logprobs.tokens) for choice in answer.choices]
    assert texts == ["ab<end>", "ab<end>", "xyz<end>", "xyz<end>"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "text"), [("hi ", "hi hi "), ([104, 105, EOS], "hi<end>hi")])
def test_an_echo_has_the_prompt_before_the_answer(client, stream, prompt, text):
    asked = {"max_tokens": 100 if isinstance(prompt, str) else 2, "echo": True, "stream": stream}
    answer = client.completions.create(model="tiny", prompt=prompt, **asked)
    got = answer.choices[0].text if not stream else "".join(c.choices[0].text for c in answer)
    assert got == text


def test_each_answer_echoes_its_own_prompt(client):
    answer = client.completions.create(model="tiny", prompt=["a", "b"], echo=True, n=2)
    assert [choice.text for choice in answer.choices] == ["aa", "aa", "bb", "bb"]


@pytest.mark.parametrize(
    ("route", "asked", "param", "sentence"),
    [
        ("completions", {"logprobs": 21}, "logprobs", "logprobs=21 is out of range: use 0 to 20."),
        ("completions", {"logprobs": -1}, "logprobs", "use 0 to 20"),
        ("completions", {"logprobs": True}, "logprobs", "must be an integer, not true"),
        ("completions", {"logprobs": 1, "echo": True}, "echo", "echo=true with 'logprobs'"),
        ("completions", {"prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs=1"),
        ("completions", {"top_logprobs": 1}, "top_logprobs", "top_logprobs=1 is not supported"),
        ("chat/completions", {"logprobs": 5}, "logprobs", "must be true or false, not 5"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ("chat/completions", {"top_logprobs": 21, "logprobs": True}, "top_logprobs", "0 to 20"),
        ("chat/completions", {"top_logprobs": -1, "logprobs": True}, "top_logprobs", "0 to 20"),
        ("chat/completions", {"echo": True}, "echo", "echo=true is not supported"),
    ],
)
def test_what_cannot_be_told_is_refused(server, route, asked, param, sentence):
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in route else {"prompt": "x"}
    )
    error = refusal(post(server, route, prompt | asked))
    assert error["param"] == param and sentence in error["message"]


def test_what_is_next_to_impossible_is_told_as_openai_does():
    never = LikelyToken(5, float("-inf"), "x", b"x")
    for body in (
        LogprobForm(1).chat([ToldToken(never, [never], 0)]),
        LogprobForm(1).completion([ToldToken(never, [never], 0)]),
    ):
        assert "-9999.0" in json.dumps(body, allow_nan=False)
