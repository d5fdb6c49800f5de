"""Log-probabilities of a served model against the reference's `log_softmax` in float32."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import openai

from dualpace import Logprob
from tests.e2e.routes import ask

TOLERANCE = 1e-4  # docs/api.md
ASKED: dict[str, Any] = {
    "max_tokens": 12,
    "temperature": 0.8,
    "seed": 3,
    "presence_penalty": 0.5,
    "extra_body": {"return_tokens_as_token_ids": True, "top_k": 20},
}
PROMPT = "The three primary colours are red, and the four seasons of the year begin with"
MESSAGES = [{"role": "user", "content": "Write one sentence about the ocean and the moon."}]
Told = list[dict[int, float]]  # of each token, the generated one first


def check_output(output: Any, asked: int | None, reference: Any) -> None:
    """`reference` [T, V]: log-probabilities of the tokens in the places of the output's."""
    if asked is None:
        assert output.logprobs is None
        return
    told: list[dict[int, Logprob]] = output.logprobs
    assert [next(iter(each)) for each in told] == output.token_ids, "each token once"
    check([{token: one.logprob for token, one in each.items()} for each in told], reference)
    for each, row in zip(told, reference, strict=True):
        best = row.topk(asked).values.tolist()
        found = sorted((one.logprob for one in each.values() if one.rank <= asked), reverse=True)
        assert all(abs(a - b) < TOLERANCE for a, b in zip(best, found, strict=True))


def check(told: Told, reference: Any) -> None:
    for each, row in zip(told, reference, strict=True):
        for token, logprob in each.items():
            assert abs(float(row[token]) - logprob) < TOLERANCE


def check_routes(llm: Any, judge: Any) -> None:
    """Both routes, whole and streamed, of a sampled answer whose logits are edited."""
    whole, streamed, chat, chat_streamed, chat_prompt = ask(
        llm, partial(_answers, llm.plan.model.name)
    )
    prompt = llm._tokenizer.encode(PROMPT)
    for told, ids in ((whole, prompt), (streamed, prompt), (chat, chat_prompt)):
        tokens = [next(iter(each)) for each in told]
        assert 0 < len(tokens) <= ASKED["max_tokens"] and all(len(each) >= 3 for each in told)
        check(told, judge(ids, tokens).logprobs)
    assert streamed == whole and chat_streamed == chat


async def _answers(
    model: str, client: openai.AsyncOpenAI
) -> tuple[Told, Told, Told, Told, list[int]]:
    complete, chat = client.completions.create, client.chat.completions.create
    wanted: dict[str, Any] = {**ASKED, "model": model, "prompt": PROMPT, "logprobs": 3}
    whole = await complete(**wanted)
    stream = await complete(**wanted, stream=True)
    pieces = [chunk.choices[0].logprobs async for chunk in stream]
    wanted = {**ASKED, "model": model, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    answer = await chat(**wanted)
    parts = [chunk.choices[0].logprobs async for chunk in await chat(**wanted, stream=True)]
    root = client.with_options(base_url="http://engine")
    seen: Any = await root.post("/tokenize", body={"messages": MESSAGES}, cast_to=object)
    return (
        _of_lists([whole.choices[0].logprobs]),
        _of_lists(pieces),
        _of_content([answer.choices[0].logprobs]),
        _of_content(parts),
        seen["tokens"],
    )


def _of_lists(pieces: Iterable[Any]) -> Told:
    return [
        {_id(token): logprob} | _by_id(top)
        for piece in pieces
        if piece is not None
        for token, logprob, top in zip(
            piece.tokens, piece.token_logprobs, piece.top_logprobs, strict=True
        )
    ]


def _of_content(pieces: Iterable[Any]) -> Told:
    return [
        {_id(one.token): one.logprob} | _by_id({o.token: o.logprob for o in one.top_logprobs})
        for piece in pieces
        if piece is not None
        for one in piece.content
    ]


def _by_id(by_name: Mapping[str, float]) -> dict[int, float]:
    return {_id(name): logprob for name, logprob in by_name.items()}


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
