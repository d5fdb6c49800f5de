"""New requests on their way from a front to the engine, many in one message: written and read here.

Knows token ids and sampling parameters, no text and no queue.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualpace.runtime.logit_rules import LogitRules
from dualpace.runtime.messages import Submit, asks_for
from dualpace.runtime.sampling_params import SamplingParams

_MAX_TOKENS = 2**31 - 1
_NO_RULES = LogitRules()


@dataclass(slots=True)
class Submission:
    """A request as a front has it. `params` have a seed; max_tokens None means as many as fit."""

    request_id: int
    arrival_s: float  # of `time.monotonic()`
    prompt: Sequence[int]
    params: SamplingParams


@dataclass(slots=True, frozen=True)
class Submitted:
    """A request as the engine has it."""

    request_id: int
    arrival_s: float
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    rules: LogitRules
    logprobs: int  # `messages.asks_for`


def encode(batch: Sequence[Submission]) -> Submit:
    params = [s.params for s in batch]
    offsets = np.zeros(len(batch) + 1, np.int64)
    np.cumsum([len(s.prompt) for s in batch], out=offsets[1:])
    rules = _runs([p.rules.asked() for p in params])
    return Submit(
        request_ids=np.array([s.request_id for s in batch], np.int64),
        arrivals_s=np.array([s.arrival_s for s in batch], np.float64),
        offsets=offsets,
        tokens=np.concatenate([np.asarray(s.prompt, np.int32) for s in batch]),
        max_tokens=np.array([min(p.max_tokens or _MAX_TOKENS, _MAX_TOKENS) for p in params]),
        ignore_eos=np.array([p.ignore_eos for p in params], np.uint8),
        temperature=np.array([p.drawn_at for p in params], np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        seeds=np.array([p.seed for p in params], np.int64),
        rules=json.dumps(rules) if rules else "",
        logprobs=np.array([asks_for(p.logprobs) for p in params], np.uint8),
    )


def _runs(asked: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """(place, what is asked from there on): the answers to one prompt ask the same, which may hold
    a schema of 100,000 characters."""
    runs: list[tuple[int, dict[str, Any]]] = []
    before: dict[str, Any] = {}
    for place, one in enumerate(asked):
        if one != before:
            runs.append((place, one))
            before = one
    return runs


def decode(message: Submit) -> Iterator[Submitted]:
    runs = dict(json.loads(message.rules)) if message.rules else {}
    rules = _NO_RULES
    for i, request_id in enumerate(message.request_ids.tolist()):
        if i in runs:
            rules = LogitRules.of(runs[i])
        yield Submitted(
            request_id=request_id,
            arrival_s=float(message.arrivals_s[i]),
            prompt=message.tokens[message.offsets[i] : message.offsets[i + 1]].tolist(),
            max_tokens=int(message.max_tokens[i]),
            ignore_eos=bool(message.ignore_eos[i]),
            temperature=float(message.temperature[i]),
            top_k=int(message.top_k[i]),
            top_p=float(message.top_p[i]),
            seed=int(message.seeds[i]),
            rules=rules,
            logprobs=int(message.logprobs[i]),
        )
