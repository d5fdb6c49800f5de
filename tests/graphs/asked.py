"""What rows of a test ask to have done to their logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dualpace.graphs.logit_edits import LogitEdits


@dataclass
class Asked:
    """One row's request and its tokens so far."""

    prompt: list[int] = field(default_factory=lambda: [1, 2, 2])
    output: list[int] = field(default_factory=list)
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    only: bool = False
    left: list[int] | None = None  # None: all


def edits_of(asked: dict[int, Asked]) -> LogitEdits:
    """By row of the batch."""
    all_asked = list(asked.values())
    bias = [(i, t, b) for i, one in enumerate(all_asked) for t, b in one.bias.items()]
    seen = [
        (i, token, one.output.count(token))
        for i, one in enumerate(all_asked)
        for token in dict.fromkeys(one.prompt + one.output)
    ]

    def column(pairs: list[tuple[int, int, float]], place: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([pair[place] for pair in pairs], dtype=dtype)

    def each(name: str) -> torch.Tensor:
        return torch.tensor([getattr(one, name) for one in all_asked])

    no_mask = torch.empty(0, 2, dtype=torch.int32)
    return LogitEdits(
        rows=torch.tensor(list(asked), dtype=torch.int64),
        min_p=each("min_p"),
        presence=each("presence"),
        frequency=each("frequency"),
        repetition=each("repetition"),
        bias_owner=column(bias, 0, torch.int64),
        bias_token=column(bias, 1, torch.int64),
        bias=column(bias, 2, torch.float32),
        only=torch.tensor([row for row, one in asked.items() if one.only], dtype=torch.int64),
        seen_owner=column(seen, 0, torch.int64),
        seen_token=column(seen, 1, torch.int64),
        seen_count=column(seen, 2, torch.float32),
        any_min_p=any(one.min_p for one in all_asked),
        masked=torch.tensor([row for row, one in asked.items() if one.left is not None]).long(),
        masks=torch.cat([no_mask, *(mask_of(o.left) for o in all_asked if o.left is not None)]),
    )


def mask_of(tokens: list[int]) -> torch.Tensor:
    """int32 [1, 2], with the bits of these tokens."""
    bits = sum(1 << token for token in set(tokens))
    return torch.frombuffer(bytearray(bits.to_bytes(8, "little")), dtype=torch.int32)[None]
