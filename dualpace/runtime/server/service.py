"""From a checked request to a job: admission, tokenizing, clipping. What the routes share."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

from dualpace.runtime.engine_client import EngineClient
from dualpace.runtime.generation import (
    Piece,
    Tokenizer,
    check_prompt,
    encode_chat,
    encode_text,
    generate,
    merge,
    output_limit,
)
from dualpace.runtime.sampling_params import SamplingParams
from dualpace.runtime.server.conversation import FRAME_CHARS, conversation
from dualpace.runtime.server.errors import APIError
from dualpace.runtime.server.health import Condition, condition
from dualpace.runtime.server.metrics import Metrics
from dualpace.runtime.server.openai import ChatRequest, CompletionRequest
from dualpace.runtime.server.request_metrics import Asked
from dualpace.runtime.server.responses import ChatShape, CompletionShape, Envelope, Shape, Usage
from dualpace.runtime.server.streams import Job, Pieces, ToldAs
from dualpace.runtime.server.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from dualpace.runtime.server.wording import shown

T = TypeVar("T")

# Shorter texts are tokenized on the event loop: they take less than handing them to a thread.
_INLINE_CHARS = 2000


class Service:
    """State of a server: its engine, its tokenizer once loaded, whether it still takes requests."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.metrics = Metrics(client)
        self.tokenizer: Tokenizer | None = None
        self.drain_start_s: float | None = None  # set: no new requests, the answers may finish
        self.num_answers = 0  # being made or sent
        self._seen = Condition("ready", "ready", client.start_s)  # when last asked

    @property
    def model(self) -> str:
        return self.client.plan.model.name

    async def condition(self) -> Condition:
        """What /ready says."""
        client = self.client
        if self.drain_start_s is not None:
            running = f"answers still running: {self.num_answers}"
            return Condition("draining", running, self.drain_start_s)
        if (phase := self._starting()) is not None:
            return Condition("starting", phase, client.start_s)
        found = await condition(client)
        if found.status != self._seen.status:
            self._seen = found
        return replace(found, since_s=self._seen.since_s)

    def _starting(self) -> str | None:
        """What the start waits for; None once it is over."""
        if not self.client.has_started:
            return self.client.phase
        return "loading tokenizer" if self.tokenizer is None else None

    def admit(self, model: str | None) -> Tokenizer:
        """The tokenizer for a request that may run now. Raises APIError for one that may not."""
        if self.drain_start_s is not None:
            raise APIError(503, "The server is shutting down.", code="shutting_down")
        if (phase := self._starting()) is not None or self.tokenizer is None:
            raise APIError(503, f"The server is starting: {phase}.", code="starting")
        if not self.client.is_ready:
            raise APIError(503, "The server ends: its engine is gone.", code="engine_gone")
        if model is not None and model != self.model:
            raise APIError(
                404,
                f"The model {shown(model)} does not exist; this server has {shown(self.model)}.",
                "model",
                "model_not_found",
            )
        return self.tokenizer

    @property
    def _max_context(self) -> int:
        return self.client.plan.model.max_context

    async def completion(self, request: CompletionRequest) -> Job:
        arrival_s = time.monotonic()
        tokenizer = self.admit(request.model)
        request.check()
        params = request.params()
        prompts, given = [], request.prompts()
        for prompt in given:
            if isinstance(prompt, str):
                encoded = _off_loop(len(prompt), encode_text, tokenizer, prompt, self._max_context)
                prompts.append(await encoded)
            else:
                prompts.append(prompt)
        if not prompts:
            prompts = [[]]  # refused as one that is empty
        form = request.logprob_form
        told_as = None if form is None else form.completion
        shape, echoes = CompletionShape(), given if request.echo else []
        return self._job(shape, tokenizer, prompts, params, request, arrival_s, told_as, echoes)

    async def chat(self, request: ChatRequest) -> Job:
        arrival_s = time.monotonic()
        tokenizer = self.admit(request.model)
        request.check()
        params = request.params()
        messages = conversation(request.messages)
        size = sum(len(message["content"]) + FRAME_CHARS for message in messages)
        variables, limit = request.chat_template_kwargs, self._max_context
        prompt = await _off_loop(size, encode_chat, tokenizer, messages, limit, variables)
        form = request.logprob_form
        told_as = None if form is None else form.chat
        return self._job(ChatShape(), tokenizer, [prompt], params, request, arrival_s, told_as)

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        tokenizer = self.admit(request.model)
        request.refuse_extra()
        return await _off_loop(request.size, tokenize, tokenizer, request, self._max_context)

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, str]:
        tokenizer = self.admit(request.model)
        request.refuse_extra()
        vocab = self.client.plan.model.vocab
        return await _off_loop(len(request.tokens), detokenize, tokenizer, request, vocab)

    def _job(
        self,
        shape: Shape,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request: CompletionRequest | ChatRequest,
        arrival_s: float,
        told_as: ToldAs | None,
        echoes: Sequence[str | list[int]] = (),
    ) -> Job:
        """`echoes`: each prompt as it was given, if the answers shall repeat it."""
        model = self.client.plan.model
        params.check_tokens(model.vocab, model.eos_token_ids)
        for number, prompt in enumerate(prompts):
            place = f"prompt[{number}]" if len(prompts) > 1 else "prompt"
            check_prompt(prompt, model.max_context, model.vocab, place)
        answers = []
        for prompt, echo in zip_longest(prompts, echoes):
            limit = output_limit(params, len(prompt), model.max_context)
            asked = Asked(len(prompt), limit, request.num_answers, arrival_s)
            for i in range(request.num_answers):
                seeded = params.seeded(i)
                pieces = generate(self.client, tokenizer, prompt, seeded, model.max_context)
                pieces = self.metrics.requests.observe(pieces, asked)
                answers.append(pieces if echo is None else _after(echo, tokenizer, pieces))
        return Job(
            envelope=Envelope(shape, model.name),
            pieces=self._counted(merge(answers)),
            num_choices=len(answers),
            usage=Usage(sum(map(len, prompts))),
            stream=bool(request.stream),
            usage_parts=request.usage_parts,
            told_as=told_as,
        )

    async def _counted(self, pieces: Pieces) -> AsyncGenerator[tuple[int, Piece], None]:
        self.num_answers += 1
        try:
            async for item in pieces:
                yield item
        finally:
            await pieces.aclose()
            self.num_answers -= 1


async def _after(
    prompt: str | list[int], tokenizer: Tokenizer, pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[Piece, None]:
    """The pieces, the first of them with the prompt before its text; closes them."""
    async with contextlib.aclosing(pieces):
        echo = prompt
        if not isinstance(echo, str):
            echo = await _off_loop(len(echo), tokenizer.decode, echo, False)
        async for piece in pieces:
            yield replace(piece, text=echo + piece.text)
            echo = ""


async def _off_loop(size: int, function: Callable[..., T], *arguments: object) -> T:
    """`function(*arguments)`, in a thread if the text of `size` characters is long."""
    if size <= _INLINE_CHARS:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)
