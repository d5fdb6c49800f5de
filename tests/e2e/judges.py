"""Who says whether an answer is right, and never saw a batch, a pool or a worker.

One forward over prompt and answer says what would have been generated: if each token is the right
one after all those before, by induction the whole answer is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dualpace import Output, SamplingParams
from tests.e2e.logprobs import check_output
from tests.graphs.uniform import uniform
from tests.runtime.worker.reference import Reference, draw, edit
from tests.runtime.worker.talks import Talk


@dataclass(frozen=True)
class Judgement:
    """How far an answer is the reference's greedy one."""

    decided: int  # tokens that the reference decides; a tie of its best logits ends the comparison
    wrong: int | None  # place of the first token that is not the reference's
    logprobs: torch.Tensor = field(repr=False, compare=False)  # [T, V], in the places of its tokens


class Judge:
    """Greedy decoding by transformers in float32."""

    def __init__(self, model: Any, tie: float = 1e-4) -> None:
        torch.set_num_threads(1)  # as each worker has
        self._model = model
        self._tie = tie  # design.md, Graphs
        self._known: dict[tuple[int, ...], Judgement] = {}

    def __call__(self, prompt: list[int], tokens: list[int]) -> Judgement:
        key = (*prompt, -1, *tokens)
        if key not in self._known:
            self._known[key] = self._judge(prompt, tokens)
        return self._known[key]

    def _judge(self, prompt: list[int], tokens: list[int]) -> Judgement:
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.inference_mode():
            logits = self._model(ids).logits[0, len(prompt) - 1 :]
        best, logprobs = logits.topk(2), logits.log_softmax(-1)
        for place, token in enumerate(tokens):
            if best.values[place, 0] - best.values[place, 1] < self._tie:
                return Judgement(place, None, logprobs)
            if int(best.indices[place, 0]) != token:
                return Judgement(place, place, logprobs)
        return Judgement(len(tokens), None, logprobs)


class TinyJudge(Reference):
    """Our own stages of `random:tiny`, by what was asked: the very tokens, drawn ones too."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        super().__init__("random:tiny")

    @torch.inference_mode()
    def check(self, outputs: Sequence[Output], params: Sequence[SamplingParams]) -> None:
        """Of answers that only their length ends."""
        for output, asked in zip(outputs, params, strict=True):
            prompt, tokens = output.prompt_token_ids, output.token_ids
            logits = self.logits([*prompt, *tokens[:-1]], len(prompt) - 1)
            check_output(output, asked.logprobs, logits.log_softmax(-1))
            assert tokens == self._answer(logits, prompt, tokens, asked), asked
            assert len(tokens) == asked.max_tokens and output.finish_reason == "length", asked

    def _answer(
        self, logits: torch.Tensor, prompt: list[int], tokens: list[int], asked: SamplingParams
    ) -> list[int]:
        """What is right after all that was said before, token by token."""
        assert asked.ignore_eos and asked.seed is not None
        assert asked.top_k == 0 and asked.top_p == 1 and asked.min_tokens == 0
        talk = Talk(0, prompt, asked.temperature, rules=asked.rules)
        text, right = prompt + tokens, []
        for place, row in enumerate(logits, start=len(prompt)):
            edit(row, talk, text[:place])
            right.append(draw(row, asked.temperature, uniform(asked.seed, place)))
        return right
