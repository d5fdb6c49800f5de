"""What clients may ask for. Types are strict; what this server cannot do is refused by name.

A parameter that is known but not built passes only with the value that means "not used", since
clients send those; anything else would be ignored silently, which is worse than a refusal.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, field_validator

from dualpace.runtime.logit_rules import MAX_LOGIT_BIAS
from dualpace.runtime.sampling_params import MAX_LOGPROBS, InvalidParameter, SamplingParams
from dualpace.runtime.server.conversation import ChatMessage
from dualpace.runtime.server.errors import APIError
from dualpace.runtime.server.lists import FIRST_FAULT, Texts, TokenIds
from dualpace.runtime.server.logprobs import LogprobForm
from dualpace.runtime.server.streams import UsageParts
from dualpace.runtime.server.structured import (
    ResponseFormat,
    StructuredOutputs,
    structured_params,
)
from dualpace.runtime.server.wording import shown

MAX_CHOICES = 128  # answers to one prompt
MAX_ANSWERS = 1024  # of one request
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_LONGEST_NAME = 100  # that may be a known one, misspelled
# Words of other routes and servers that no spelling leads to ours from.
_OURS = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
    "json_schema": "response_format",
    "grammar": "guided_grammar",
}
_GUIDED = ("json", "regex", "choice", "grammar")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")

# Labels for the client's own books; they ask nothing of a server.
_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key", "request_id"}
# Values that leave a parameter unused, beside null.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "add_generation_prompt": [True],
    "add_special_tokens": [],
    "audio": [],
    "bad_words": [[]],
    "best_of": [1],
    "chat_template": [],
    "continue_final_message": [False],
    "documents": [[]],
    "echo": [False],
    "function_call": ["none"],
    "functions": [[]],
    "length_penalty": [1],
    "modalities": [["text"]],
    "parallel_tool_calls": [True],
    "prediction": [],
    "priority": [0],
    "prompt_logprobs": [],
    "reasoning_effort": [],
    "return_token_ids": [False],
    "return_token_strs": [False],
    "service_tier": ["auto", "default"],
    "spaces_between_special_tokens": [True],
    "store": [False],
    "suffix": [""],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "top_logprobs": [0],
    "truncate_prompt_tokens": [],
    "use_beam_search": [False],
    "verbosity": [],
    "web_search_options": [],
}


def _is_one_of(value: Any, neutral: Sequence[Any]) -> bool:
    """Like `in`, but 1 is not True."""
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


def _unsupported(param: str, value: Any) -> APIError:
    text = f"The parameter '{param}' is not supported by this server; leave it out."
    if isinstance(value, bool | int | float | str):
        text = f"{param}={shown(value)} is not supported by this server; leave '{param}' out."
    return APIError(400, text, param, "unsupported_parameter")


def _near(name: str, known: Collection[str]) -> list[str]:
    """The one that was meant, if any; a name of megabytes would take seconds to compare."""
    if name in _OURS and _OURS[name] in known:
        return [_OURS[name]]
    return difflib.get_close_matches(name, known, 1) if len(name) <= _LONGEST_NAME else []


class Strict(BaseModel):
    """A body, or an object in one."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def refuse_extra(self) -> None:
        """Raises APIError for the first parameter that is not a field and asks for something."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _LABELS:
                continue
            if name not in _NEUTRAL:
                near = _near(name, type(self).model_fields)
                hint = f": did you mean '{near[0]}'?" if near else "."
                text = f"Unknown parameter '{name}'{hint}"
                raise APIError(400, text, name, "unknown_parameter")
            if not _is_one_of(value, _NEUTRAL[name]):
                raise _unsupported(name, value)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: in every piece, not in the last alone


class _Sampled(Strict):
    """What both routes have in common; null is the same as absent."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _is_short(cls, bias: Any) -> Any:
        """Before its entries are looked at: as of lists, a fault of each would be told."""
        if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
            text = f"logit_bias has {len(bias)} tokens: use at most {MAX_LOGIT_BIAS}."
            raise APIError(400, text, "logit_bias", "invalid_value")
        return bias

    def check(self) -> None:
        """Raises APIError for what cannot be done, apart from ranges of sampling parameters."""
        self.refuse_extra()
        if self.stream_options is not None:
            if not self.stream:
                raise APIError(
                    400, "'stream_options' needs stream=true.", "stream_options", "invalid_value"
                )
            if extra := self.stream_options.model_extra:
                refused = [name for name, value in extra.items() if value]
                if refused:
                    raise _unsupported(f"stream_options.{refused[0]}", True)
        if not 1 <= self.num_answers <= MAX_CHOICES:
            raise InvalidParameter("n", f"n={self.n} is out of range: use 1 to {MAX_CHOICES}.")

    @property
    def num_answers(self) -> int:
        """To each prompt."""
        return 1 if self.n is None else self.n

    @property
    def usage_parts(self) -> UsageParts:
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats:
            return "all"
        return "last" if options.include_usage else "none"

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell beside each generated one; None: tell nothing."""
        return None

    @property
    def logprob_form(self) -> LogprobForm | None:
        best = self.num_logprobs
        return None if best is None else LogprobForm(best, bool(self.return_tokens_as_token_ids))

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """Raises InvalidParameter for values out of range."""
        given = ((name, getattr(self, name)) for name in _SAMPLING)
        asked: dict[str, Any] = {name: value for name, value in given if value is not None}
        if self.logit_bias is not None:
            asked["logit_bias"] = _token_ids(self.logit_bias)
        guided = {way: getattr(self, f"guided_{way}") for way in _GUIDED}
        asked["structured_outputs"] = structured_params(
            self.response_format, self.structured_outputs, guided
        )
        return SamplingParams(max_tokens=max_tokens, logprobs=self.num_logprobs, **asked)


_SAMPLING = (_Sampled.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()) - {
    "max_tokens",  # each route has its own default
    "logit_bias",  # JSON has no integers for keys
    "structured_outputs",  # there are other words for it
}


def _token_ids(bias: Mapping[str, float]) -> dict[int, float]:
    """Raises InvalidParameter for a key that is no number, or not written as JSON writes it: two
    spellings of one token would hide each other."""
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidParameter(
                "logit_bias",
                f'logit_bias has the key {shown(key)}: use token ids as strings, such as "10".',
            )
    return {int(key): value for key, value in bias.items()}


class CompletionRequest(_Sampled):
    """POST /v1/completions"""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], FIRST_FAULT]
    echo: bool | None = None
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            text = "echo=true with 'logprobs' is not supported: tokens of prompts have none."
            raise APIError(400, text, "echo", "unsupported_parameter")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def params(self) -> SamplingParams:
        return self.sampling(COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens)

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry a prompt. Raises InvalidParameter for more than one request may bring."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts: list[str] | list[list[int]] = [prompt] if is_one else prompt
        if len(prompts) * self.num_answers > MAX_ANSWERS:
            each = f" with n={self.num_answers}" if self.num_answers > 1 else ""
            raise InvalidParameter(
                "prompt",
                f"The request has {len(prompts)} prompts{each}: ask for at most {MAX_ANSWERS} "
                f"answers at a time, and send the rest in further requests.",
            )
        return prompts


class ChatRequest(_Sampled):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], FIRST_FAULT]
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        super().check()
        best = self.top_logprobs or 0
        if not 0 <= best <= MAX_LOGPROBS:
            raise InvalidParameter(
                "top_logprobs", f"top_logprobs={best} is out of range: use 0 to {MAX_LOGPROBS}."
            )
        if best and not self.logprobs:
            raise InvalidParameter("top_logprobs", "'top_logprobs' needs logprobs=true.")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def params(self) -> SamplingParams:
        limit = self.max_completion_tokens
        if limit is not None and limit < 1:
            raise InvalidParameter(
                "max_completion_tokens",
                f"max_completion_tokens={limit} is out of range: use at least 1.",
            )
        return self.sampling(self.max_tokens if limit is None else limit)
