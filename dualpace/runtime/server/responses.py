"""The JSON of answers: whole and in pieces, for completions and for chat."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dualpace.runtime.types import ENGINES

Logprobs = dict[str, Any] | None  # of a choice; None: not asked for, or no token yet


class End(NamedTuple):
    """Why an answer ended; nothing while it goes on."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None  # vLLM's: the stop string or token


class Shape(Protocol):
    """What differs between the two routes."""

    prefix: str
    whole: str  # `object` of a whole answer
    part: str  # `object` of a piece

    def choice(self, index: int, text: str, end: End, logprobs: Logprobs) -> dict[str, Any]: ...

    def delta(self, index: int, text: str, end: End, logprobs: Logprobs) -> dict[str, Any]: ...

    def opening(self, index: int) -> dict[str, Any] | None: ...


class CompletionShape:
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: str, end: End, logprobs: Logprobs) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, **end._asdict()}

    delta = choice

    def opening(self, index: int) -> None:
        return None


class ChatShape:
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, end: End, logprobs: Logprobs) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._with(index, end, logprobs, message=message)

    def delta(self, index: int, text: str, end: End, logprobs: Logprobs) -> dict[str, Any]:
        return self._with(index, end, logprobs, delta={"content": text})

    def opening(self, index: int) -> dict[str, Any]:
        return self._with(index, End(), None, delta={"role": "assistant", "content": ""})

    @staticmethod
    def _with(index: int, end: End, logprobs: Logprobs, **body: Any) -> dict[str, Any]:
        return {"index": index, **body, "logprobs": logprobs, **end._asdict()}


@dataclass(slots=True)
class Usage:
    """Token counts of one request: each prompt once, each answer's tokens, and who made those."""

    prompt_tokens: int
    completion_tokens: int = 0
    by_engine: list[int] = field(default_factory=lambda: [0] * len(ENGINES))

    def count(self, engines: Sequence[int]) -> None:
        self.completion_tokens += len(engines)
        for engine in engines:
            self.by_engine[engine] += 1

    def fields(self) -> dict[str, Any]:
        """`usage` as OpenAI defines it; who made the tokens stands beside it, under our name."""
        return {
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            },
            "dualpace": {"tokens_by_engine": dict(zip(ENGINES, self.by_engine, strict=True))},
        }


class Envelope:
    """What all JSON of one answer shares."""

    def __init__(self, shape: Shape, model: str) -> None:
        self.shape = shape
        self._common = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            **self._common,
            "object": self.shape.whole,
            "choices": choices,
            **usage.fields(),
        }

    def part(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._common, "object": self.shape.part, "choices": choices, **more}
