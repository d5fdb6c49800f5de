"""From a request's rules and its tokens to what a batch says of its row's logits.

Counts of tokens are a matter of the tokens alone and are caught up with when a row is scheduled; so
they are right wherever the row is sampled next, and after a recompute, a migration or a lost
worker.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.logit_rules import LogitRules
from dualpace.runtime.messages import Edits, no_bytes
from dualpace.runtime.wire import I32, U8

_NO_WORDS = np.empty(0, np.int32)


class Editor:
    """One request's rules, and how often each token has come so far."""

    def __init__(
        self, rules: LogitRules, prompt_len: int, eos: Iterable[int], guide: Guide | None = None
    ) -> None:
        """`eos`: what would end the answer beside the rules' own stop tokens. `guide` knows the
        form that it keeps to, if any."""
        self.rules = rules
        self.guide = guide
        self._prompt_len = prompt_len
        bans = dict.fromkeys((*eos, *rules.stop_token_ids), -np.inf)
        self._early, self._later = (
            _pairs(_listed(bias, rules.allowed_token_ids))
            for bias in ({**rules.logit_bias, **bans}, rules.logit_bias)
        )
        self._counted = 0
        self._place: dict[int, int] = {}  # of a token in the next two
        self._tokens = array("i")
        self._counts = array("i")

    def is_due(self, position: int) -> bool:
        """Whether the token at `position` of prompt and answer is drawn from edited logits."""
        return self.rules.edits_always or self._is_early(position)

    def bias(self, position: int) -> tuple["array[int]", "array[float]"]:
        """(tokens, what is added to their logits) for the token at `position`."""
        return self._early if self._is_early(position) else self._later

    def can_go_on(self, position: int) -> bool:
        """Whether any token may be drawn at `position`, the next one."""
        if self.guide is None:
            return True  # what else forbids tokens was looked at before
        is_early, allowed = self._is_early(position), self.rules.allowed_token_ids
        if not is_early and not allowed:
            return self.guide.allows_any
        biases = dict(zip(*self.bias(position), strict=True))
        banned = [token for token, bias in biases.items() if bias == -np.inf]
        if allowed:
            return any(self.guide.allows(token) for token in biases.keys() - banned)
        return self.guide.allows_beside(banned)

    def seen(self, tokens: Sequence[int]) -> tuple["array[int]", "array[int]"]:
        """(tokens that have come, how often in the output); `tokens` are the request's, of which
        there are never fewer than before. Valid until the next call.
        """
        if not self.rules.counts_tokens:
            return self._tokens, self._counts
        if not self._counted:
            self._see_prompt(tokens[: self._prompt_len])
        place, counts = self._place, self._counts
        for token in tokens[self._counted :]:
            if token not in place:
                place[token] = len(counts)
                self._tokens.append(token)
                counts.append(0)
            counts[place[token]] += 1
        self._counted = len(tokens)
        return self._tokens, counts

    def _see_prompt(self, prompt: Sequence[int]) -> None:
        """At once: it may be long, and both loops wait meanwhile."""
        self._counted = len(prompt)
        self._tokens = array("i", dict.fromkeys(prompt))
        self._counts = array("i", bytes(4 * len(self._tokens)))
        self._place = {token: at for at, token in enumerate(self._tokens)}

    def _is_early(self, position: int) -> bool:
        return position - self._prompt_len < self.rules.min_tokens


def encode_edits(rows: Sequence[tuple[int, int, Editor, Sequence[int]]]) -> U8:
    """`Edits` of (place in the batch, position of the token to be drawn, editor, the request's
    tokens so far) of each row whose edits are due; no bytes if there are none.
    """
    if not rows:
        return no_bytes()
    rules = [editor.rules for _, _, editor, _ in rows]
    bias = [editor.bias(position) for _, position, editor, _ in rows]
    seen = [editor.seen(tokens) for _, _, editor, tokens in rows]
    guides = [editor.guide for _, _, editor, _ in rows]
    message = Edits(
        rows=np.array([place for place, _, _, _ in rows], np.int32),
        min_p=np.array([r.min_p for r in rules], np.float32),
        presence=np.array([r.presence_penalty for r in rules], np.float32),
        frequency=np.array([r.frequency_penalty for r in rules], np.float32),
        repetition=np.array([r.repetition_penalty for r in rules], np.float32),
        bias_owner=_owners([tokens for tokens, _ in bias]),
        bias_token=_joined([tokens for tokens, _ in bias]),
        bias=np.frombuffer(b"".join(values for _, values in bias), np.float32),
        only=np.array([bool(r.allowed_token_ids) for r in rules], np.uint8),
        seen_owner=_owners([tokens for tokens, _ in seen]),
        seen_token=_joined([tokens for tokens, _ in seen]),
        seen_count=_joined([counts for _, counts in seen]),
        masked=np.array([guide is not None for guide in guides], np.uint8),
        masks=np.concatenate([_NO_WORDS, *(guide.mask for guide in guides if guide is not None)]),
    )
    return np.frombuffer(message.encode(), np.uint8)


def _listed(bias: Mapping[int, float], allowed: Sequence[int]) -> Mapping[int, float]:
    """`bias`, or where only some tokens are allowed that of each of them."""
    return {token: bias.get(token, 0.0) for token in allowed} if allowed else bias


def _pairs(bias: Mapping[int, float]) -> tuple["array[int]", "array[float]"]:
    return array("i", bias), array("f", bias.values())


def _owners(lists: Sequence["array[int]"]) -> I32:
    owners: npt.NDArray[np.int32]
    owners = np.repeat(np.arange(len(lists), dtype=np.int32), [len(items) for items in lists])
    return owners


def _joined(lists: Sequence["array[int]"]) -> I32:
    return np.frombuffer(b"".join(lists), np.int32)
