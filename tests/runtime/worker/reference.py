"""The model as plainly as can be: no pools, no batches, no workers."""

import torch

from dualpace.graphs.attention import causal_prefill
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.executor import Stages
from dualpace.graphs.load import load_weights
from dualpace.graphs.sampling import SamplingRows, sample
from dualpace.graphs.source import resolve_source
from tests.runtime.worker.talks import Talk


class Reference:
    """Every token from the whole text before it."""

    def __init__(self, source: str, dtype: torch.dtype = torch.float32) -> None:
        found = resolve_source(source)
        self._spec = found.spec
        self._stages: Stages = GraphCache().build(
            found.spec, load_weights(found, dtype), max_context=512
        )

    @torch.inference_mode()
    def logits(self, tokens: list[int], start: int = -1) -> torch.Tensor:
        """Of the token after each of these from place `start` on, [T, V]."""
        x = self._stages.pre_layer(torch.tensor(tokens))
        positions = torch.arange(len(tokens))
        for layer in range(self._spec.num_layers):
            q, k, v = self._stages.pre_attention(layer, x, positions)
            attention = causal_prefill(q, k, v, [len(tokens)]).flatten(1)
            x = self._stages.post_attention(layer, attention, x)
        return self._stages.logits(x[start:])

    @torch.inference_mode()
    def next_token(self, talk: Talk, tokens: list[int]) -> int:
        logits = self.logits(tokens)
        edit(logits[0], talk, tokens)
        return draw(logits[0], talk.temperature, talk.uniform_at(len(tokens)))

    def output(self, talk: Talk) -> list[int]:
        """As many tokens as the request has now."""
        tokens = talk.tokens[: talk.prompt_len]
        while len(tokens) < len(talk.tokens):
            tokens.append(self.next_token(talk, tokens))
        return tokens[talk.prompt_len :]

    def agrees(self, *talks: Talk) -> bool:
        for talk in talks:
            assert talk.output == self.output(talk), f"request {talk.id}"
        return True

    def tells(self, *talks: Talk, atol: float = 1e-4) -> bool:
        """Whether each is told, once, of each token of its output what the model says of it."""
        for talk in talks:
            assert talk.logprobs is not None and len(talk.told) == len(talk.output)
            for place, told in enumerate(talk.told, start=talk.prompt_len):
                row = self.logits(talk.tokens[:place])[0].double().log_softmax(-1)
                assert told.token_id == talk.tokens[place]
                near = {**dict(told.best), told.token_id: told.logprob}
                assert all(abs(p - float(row[token])) < atol for token, p in near.items())
                best = row.topk(talk.logprobs).values.tolist()
                found = [p for _, p in told.best[: talk.logprobs]]
                assert all(abs(a - b) < atol for a, b in zip(best, found, strict=True))
                likelier = (
                    (row > row[told.token_id] + atol).sum(),
                    (row > row[told.token_id] - atol).sum(),
                )
                assert likelier[0] + 1 <= told.rank <= likelier[1]
        return True


def draw(logits: torch.Tensor, temperature: float, uniform: float) -> int:
    """A token by its logits [V]."""
    rows = SamplingRows.of(
        torch.tensor([temperature]),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([1.0]),
        torch.tensor([uniform]),
    )
    return int(sample(logits[None], rows))


def edit(logits: torch.Tensor, talk: Talk, tokens: list[int]) -> None:
    """What the talk's rules say, token by token; logits [V]."""
    rules, output = talk.rules, tokens[talk.prompt_len :]
    if rules.structure:
        logits[torch.arange(len(logits)) % 3 != len(output) % 3] = -torch.inf
    for token, bias in rules.logit_bias.items():
        logits[token] += bias
    if rules.allowed_token_ids:
        for token in set(range(len(logits))).difference(rules.allowed_token_ids):
            logits[token] = -torch.inf
    if len(output) < rules.min_tokens:
        for token in rules.stop_token_ids:
            logits[token] = -torch.inf
    for token in set(tokens):
        logit = logits[token].clone()
        logit = logit / rules.repetition_penalty if logit > 0 else logit * rules.repetition_penalty
        logit -= rules.frequency_penalty * output.count(token)
        logits[token] = logit - rules.presence_penalty * (token in output)
    if rules.min_p:
        chances = (logits / (talk.temperature or 1.0)).softmax(-1)
        logits[chances < rules.min_p * chances.max()] = -torch.inf
