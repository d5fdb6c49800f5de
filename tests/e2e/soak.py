"""A soak: waves of requests through an engine whose decodes change the tier every few tokens, each
moved block compared with what it was; and who says whether that has touched what the model says.

Some requests are followed. They have been answered undisturbed before, without a token twice; here
each must say the very same, since no other token is allowed and the next one is always the one with
the largest bias. So what it is told of its tokens is what the model says along the undisturbed
ones, and a plain forward in float32 says how far that is from the truth.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dualpace import LLM, Output, SamplingParams
from tests.e2e.live import Stats, ask, is_idle, stats_of, stopped, wait_until
from tests.runtime.worker.reference import Reference
from tests.servers import PATIENCE_S

EVERY = 6  # tokens between two moves
GIANTS = 2
# Moves are decided without a profile; the host has room for everyone.
RESTLESS: dict[str, Any] = {
    "policy.migrate_every": EVERY,
    "policy.host_admission": "always",
    "kv.check_moves": True,
    "kv.output_estimate": "declared",
}
NO_TOKEN_TWICE = SamplingParams(
    temperature=0.0,
    seed=0,
    ignore_eos=True,
    logprobs=20,
    repetition_penalty=100.0,
    presence_penalty=2.0,
    frequency_penalty=2.0,
)
Say = Callable[[str], object]


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams


def crowd(count: int, vocab: int, seed: int = 1) -> list[Asked]:
    """Prompts of two to six blocks, greedy and drawn answers of two moves and more."""
    mix = random.Random(seed)
    made = []
    for place in range(count):
        prompt = [mix.randrange(vocab) for _ in range(mix.randrange(17, 91))]
        params = SamplingParams(
            temperature=0.8 * (place % 2),
            seed=place,
            max_tokens=mix.randrange(2 * EVERY + 1, 7 * EVERY),
            ignore_eos=True,
        )
        made.append(Asked(prompt, params))
    return made


def followed(count: int, vocab: int, max_tokens: int) -> list[Asked]:
    params = replace(NO_TOKEN_TWICE, max_tokens=max_tokens)
    return [Asked(asked.prompt, params) for asked in crowd(count, vocab, seed=2)]


def following(prompt: list[int], tokens: list[int]) -> Asked:
    """To be answered with these tokens, by whoever."""
    assert len(set(tokens)) == len(tokens) <= 64 and not set(tokens) & set(prompt)
    biases = {token: 100.0 - place for place, token in enumerate(tokens)}
    params = replace(
        NO_TOKEN_TWICE, max_tokens=len(tokens), allowed_token_ids=tokens, logit_bias=biases
    )
    return Asked(prompt, params)


def giants(llm: LLM, vocab: int) -> list[Asked]:
    """HBM has no room for any of them, so they are prefilled to the host."""
    mix, length = random.Random(3), 16 * llm.plan.kv.gpu_blocks + 1
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=2 * EVERY, ignore_eos=True)
    return [Asked([mix.randrange(vocab) for _ in range(length)], params) for _ in range(GIANTS)]


def spread(some: Sequence[Asked], among: Sequence[Asked]) -> list[Asked]:
    """Each in its order and at even distances."""
    placed = [
        ((place + 0.5) / len(part), one) for part in (some, among) for place, one in enumerate(part)
    ]
    return [one for _, one in sorted(placed, key=lambda pair: pair[0])]


def run(llm: LLM, everyone: Sequence[Asked], wave: int, say: Say) -> list[Output]:
    """Answers of all, a wave at a time, which HBM need not have room for.

    In the first wave the host's worker stands still until some have come back into HBM; so nobody
    of it may be too long for HBM, behind whom they would wait.
    """
    assert all(len(one.prompt) < 16 * llm.plan.kv.gpu_blocks for one in everyone[:wave])
    began, outputs = time.monotonic(), list[Output]()
    for some in _waves(everyone, wave):
        prompts, params = [one.prompt for one in some], [one.params for one in some]
        if outputs:
            outputs += llm.generate(prompts, params, progress=False)
        else:
            with stopped(llm, "cpu"):
                answers = ask(llm, prompts, params)
                wait_until(llm, lambda now: now["events"].get("swap_in", 0) >= 10)
            outputs += answers.result(PATIENCE_S)
        now = stats_of(llm)
        say(
            f"{time.monotonic() - began:5.1f} s: {len(outputs)} of {len(everyone)} requests, "
            f"tokens {now['tokens']}, {now['blocks_checked']} blocks checked, {now['events']}"
        )
    return outputs


def _waves(everyone: Sequence[Asked], wave: int) -> Iterator[Sequence[Asked]]:
    return (everyone[first : first + wave] for first in range(0, len(everyone), wave))


def check(llm: LLM, everyone: Sequence[Asked], outputs: Sequence[Output]) -> Stats:
    """Nobody is lost, everybody has moved, no block was changed on its way, none is left behind."""
    for one, output in zip(everyone, outputs, strict=True):
        assert output.finish_reason == "length", "an engine that finds a changed block ends"
        made = sum(output.tokens_by_engine.values())
        assert len(output.token_ids) == one.params.max_tokens == made
    stats = wait_until(llm, is_idle)
    events = stats["events"]
    assert events["swap_in"] >= 10 and events["prefill_cpu"] >= GIANTS
    # Whoever is prefilled to HBM leaves it after EVERY tokens at the latest, with two blocks.
    assert events["swap_out"] + events["prefill_cpu"] >= len(everyone)
    assert stats["blocks_checked"] >= 2 * len(everyone)
    assert stats["compiles_after_ready"] == stats["given_up"] == 0
    assert [worker["restarts"] for worker in stats["workers"].values()] == [0, 0]
    return stats


@dataclass
class Nearness:
    """To the exact model, over positions: how many have its best token, and the sum of KL."""

    positions: int = 0
    agree: int = 0
    divergence: float = 0.0

    def count(self, agrees: bool, p: Tensor, q: Tensor) -> None:
        """p, q: logarithms of the exact and of these probabilities."""
        self.positions += 1
        self.agree += agrees
        self.divergence += float((p.exp() * (p - q)).sum())

    def __str__(self) -> str:
        kl = self.divergence / self.positions
        return f"top-1 {self.agree / self.positions:.4f}, KL {kl:.6f}"


class Truth:
    """The model in float32, plainly, and for comparison in another dtype."""

    def __init__(self, source: str, rounded: torch.dtype | None = None) -> None:
        self._exact = Reference(source)
        self._rounded = None if rounded is None else Reference(source, rounded)

    def relative_error(self, outputs: Sequence[Output]) -> float:
        """Of all log-probabilities that were told, against the spread of the logits."""
        wrong = truth = 0.0
        for output in outputs:
            exact = _along(self._exact, output)
            for told, logits in zip(output.logprobs or (), exact, strict=True):
                ids, got = _told(told)
                wrong += float((got - logits.log_softmax(-1)[ids]).square().mean())
                truth += float(logits.var())
        return float((wrong / truth) ** 0.5)

    def judge(self, *runs: Sequence[Output]) -> list[tuple[Nearness, Nearness]]:
        """Of each run what was told, and the rounded model along the same tokens, which all runs
        have in common. The vocabulary is divided at each position: every token that was told, and
        all others together.
        """
        assert self._rounded is not None
        found = [(Nearness(), Nearness()) for _ in runs]
        for outputs in zip(*runs, strict=True):
            exact, rounded = (
                _along(model, outputs[0]).log_softmax(-1) for model in (self._exact, self._rounded)
            )
            best, other_best = exact.argmax(-1).tolist(), rounded.argmax(-1).tolist()
            for output, (ours, other) in zip(outputs, found, strict=True):
                assert output.logprobs is not None and output.token_ids == outputs[0].token_ids
                for place, told in enumerate(output.logprobs):
                    ids, got = _told(told)
                    first = next(token for token, one in told.items() if one.rank == 1)
                    p = _parts(exact[place, ids])
                    ours.count(first == best[place], p, _parts(got))
                    other.count(other_best[place] == best[place], p, _parts(rounded[place, ids]))
        return found


def _along(model: Reference, output: Output) -> Tensor:
    """Logits in the places of the output's tokens, [T, V], float32."""
    prompt = output.prompt_token_ids
    return model.logits([*prompt, *output.token_ids[:-1]], len(prompt) - 1).float()


def _told(told: dict[int, Any]) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities."""
    return torch.tensor(list(told)), torch.tensor([one.logprob for one in told.values()])


def _parts(logprobs: Tensor) -> Tensor:
    """With that of all other tokens together, float64."""
    some = logprobs.double()
    rest = (1 - some.exp().sum()).clamp(min=1e-9)
    return torch.cat([some, rest.log()[None]])
