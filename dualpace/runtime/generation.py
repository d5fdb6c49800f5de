"""From a prompt's token ids to pieces of text: detokenizing, stop strings, the end of an answer.

Shared by the server and the offline API. Knows nothing about HTTP.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dualpace.runtime.alignment import Alignment, ToldToken
from dualpace.runtime.engine_client import EngineClient
from dualpace.runtime.logprobs import TokenLogprobs
from dualpace.runtime.sampling_params import InvalidParameter, SamplingParams
from dualpace.runtime.token_stream import Admission, Update

MAX_TOKEN_CHARS = 256  # no vocabulary has a longer token


class Detokenizer(Protocol):
    """Text of one answer, token by token; holds back what later tokens may still change."""

    def push(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """What a front needs of `graphs.tokenizer`."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of the model that `model.source` names."""
    from dualpace.graphs.source import resolve_source
    from dualpace.graphs.tokenizer import load_tokenizer

    return load_tokenizer(resolve_source(source))


def encode_text(
    tokenizer: Tokenizer, text: str, max_context: int, add_special_tokens: bool = True
) -> list[int]:
    """The prompt that `text` is. Raises InvalidParameter, before any work, for one that no
    tokenizer takes or that cannot fit."""
    _check_text(text, max_context)
    return tokenizer.encode(text, add_special_tokens)


_OURS = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """What the model's template makes of a conversation, given `variables` of its own. Raises
    InvalidParameter, and the tokenizer's ChatError for what the template refuses."""
    if taken := sorted(_OURS.intersection(variables or {})):
        raise InvalidParameter(
            "chat_template_kwargs",
            f"chat_template_kwargs.{taken[0]} is set by the server: leave it out.",
        )
    return tokenizer.chat(
        messages, add_generation_prompt=add_generation_prompt, variables=variables
    )


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    max_context: int,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The prompt of a conversation. Raises as `encode_text` and `chat_text` do."""
    text = chat_text(tokenizer, messages, variables)
    _check_text(text, max_context)
    return tokenizer.encode(text, add_special_tokens=False)


def _check_text(text: str, max_context: int) -> None:
    if len(text) > max_context * MAX_TOKEN_CHARS:
        raise InvalidParameter(
            "prompt",
            f"The prompt has {len(text)} characters, more than this server's context of "
            f"{max_context} tokens can hold.",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            "prompt",
            f"The prompt has half a surrogate pair at character {error.start}, which is no text.",
        ) from None


class StopMatcher:
    """Cuts streamed text before the first stop string that completes, or after it.

    Which one that is depends on the text alone, never on how it was cut into pieces: the one whose
    end comes first, and of those the longest. Text that may still become one is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string is shown."""
        assert all(stops)
        self._stops = stops
        self._include = include
        self.completed: str | None = None  # the stop string that ended it
        self._held = ""
        self._exempt = 0  # of what is held, in which no stop string may end any more

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string has completed); where it may not stop,
        stop strings that end in `text` are text like any other."""
        if not self._stops:
            return text, False
        text = self._held + text
        if not may_stop:
            self._exempt = len(text)
        elif found := self._ends(text):
            self._held = ""
            end, start = min(found)
            self.completed = text[start:end]
            return text[: end if self._include else start], True
        keep = max(self._longest_start(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        self._exempt = max(0, self._exempt - (len(text) - keep))
        return text[: len(text) - keep], False

    def _ends(self, text: str) -> list[tuple[int, int]]:
        """(end, start) of each stop string's first place in `text` that counts."""
        places = ((text.find(s, max(0, self._exempt - len(s) + 1)), len(s)) for s in self._stops)
        return [(at + length, at) for at, length in places if at >= 0]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _longest_start(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` could begin with."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


@dataclass(slots=True)
class Piece:
    """What one update adds to an answer. The last one has a finish reason: stop | length; and if
    it was a stop string or a stop token, `stop_reason` is that."""

    text: str
    token_ids: list[int]
    engines: list[int]  # who made each token, index into `types.ENGINES`
    made_s: list[float]  # when each token was made; of `time.monotonic()`
    finish_reason: str | None
    stop_reason: str | int | None = None
    admission: Admission | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, where asked for
    told: list[ToldToken] = field(default_factory=list)  # of those whose text is shown now


def check_prompt(
    prompt: Sequence[int], max_context: int, vocab: int, place: str = "prompt"
) -> None:
    """Raises InvalidParameter for a prompt that cannot be run; `place` says which of several."""
    what = "The prompt" if place == "prompt" else f"'{place}'"
    if not prompt:
        text = f"{what} is empty: send some text, or at least one token id."
        raise InvalidParameter(place, text)
    if len(prompt) >= max_context:
        raise InvalidParameter(
            place,
            f"{what} has {len(prompt)} tokens; this server's context of {max_context} tokens "
            f"takes prompts of at most {max_context - 1}.",
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        wrong = next(token for token in prompt if not 0 <= token < vocab)
        raise InvalidParameter(place, f"{what} has the token id {wrong}: ids are 0 to {vocab - 1}.")


def output_limit(params: SamplingParams, prompt_len: int, max_context: int) -> int:
    """Tokens that an answer may have: as asked, or as many as the context has room for."""
    room = max_context - prompt_len
    return room if params.max_tokens is None else min(params.max_tokens, room)


async def generate(
    client: EngineClient,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    params: SamplingParams,
    max_context: int,
) -> AsyncGenerator[Piece, None]:
    """One answer, of at most as many tokens as `max_context` leaves room for.

    Closing the generator gives the request up. Raises as TokenStream does.
    """
    limit = output_limit(params, len(prompt), max_context)
    least = min(params.min_tokens, limit)
    stream = client.submit(prompt, replace(params, max_tokens=limit, min_tokens=least))
    eos = client.plan.model.eos_token_ids
    text = _AnswerText(tokenizer, params, eos)
    try:
        async for update in stream:
            piece = text.piece(update)
            piece.admission = stream.admission
            if piece.finish_reason is not None:
                stream.close()
            yield piece
            if piece.finish_reason is not None:
                return
    finally:
        stream.close()


class _AnswerText:
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eos: Sequence[int]) -> None:
        skip_special = params.skip_special_tokens
        self._detokenizer = tokenizer.detokenizer(skip_special)
        self._alignment: Alignment | None = None
        if params.logprobs is not None:
            self._alignment = Alignment(tokenizer, params.logprobs, skip_special)
        self._include = params.include_stop_str_in_output
        self._stops = StopMatcher(params.stops, self._include)
        self._exempt = params.min_tokens  # tokens left that no stop string may end with
        self._ends = {*params.stop_token_ids, *eos}
        # Of these the end of sequence is none, unless it is one only because it was named.
        self._named = {*params.stop_token_ids}.difference(() if params.ignore_eos else eos)

    def piece(self, update: Update) -> Piece:
        """Tokens after the one that completes a stop string are dropped."""
        assert self._alignment is None or len(update.logprobs) == len(update.token_ids)
        shown: list[str] = []
        for index in range(len(update.token_ids)):
            text, stopped = self._stops.push(self._text(update, index), self._exempt <= 0)
            self._exempt -= 1
            shown.append(text)
            if stopped:
                return self._made(update, index + 1, shown, "stop", self._stops.completed)
        last, reason, stopped = update.token_ids[-1], update.finish_reason, False
        if reason is not None:
            text, stopped = self._stops.push(self._detokenizer.flush(), self._exempt < 0)
            shown.append(text if stopped else text + self._stops.flush())
            reason = "stop" if stopped else reason
        named = reason == "stop" and last in self._named
        stop_reason = self._stops.completed or (last if named else None)
        is_all = reason is not None and not stopped
        return self._made(update, len(update.token_ids), shown, reason, stop_reason, is_all)

    def _text(self, update: Update, index: int) -> str:
        """What the index-th token completes."""
        token_id = update.token_ids[index]
        is_last = index == len(update.token_ids) - 1
        # The token that ends a sequence is no text, whatever the tokenizer would print for it,
        # unless asked for. An answer with a form may end with any.
        is_end = is_last and update.finish_reason == "stop" and token_id in self._ends
        is_hidden = is_end and not self._include
        text = "" if is_hidden else self._detokenizer.push([token_id])
        if self._alignment is not None:
            self._alignment.add(update.logprobs[index], len(text), is_hidden)
        return text

    def _made(
        self,
        update: Update,
        count: int,
        shown: Sequence[str],
        finish_reason: str | None,
        stop_reason: str | int | None,
        is_all: bool = False,
    ) -> Piece:
        """A piece of the first `count` tokens; `is_all`: of no token the text is cut off."""
        text = "".join(shown)
        return Piece(
            text,
            update.token_ids[:count],
            update.engines[:count],
            update.made_s[:count],
            finish_reason,
            stop_reason,
            logprobs=update.logprobs[:count],
            told=[] if self._alignment is None else self._alignment.take(len(text), is_all),
        )


async def merge(
    answers: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of several answers as they come, each with its answer's index. Closes them."""
    if len(answers) == 1:  # the usual case needs no tasks
        async with contextlib.aclosing(answers[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def follow(index: int, answer: AsyncGenerator[Piece, None]) -> None:
        try:
            async with contextlib.aclosing(answer) as pieces:
                async for piece in pieces:
                    queue.put_nowait((index, piece))
            queue.put_nowait((index, None))
        except Exception as error:  # raised again where the pieces are read
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(follow(i, answer)) for i, answer in enumerate(answers)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
