"""A debug mode (`kv.check_moves`): every KV block that has moved between the tiers is compared with
what it was before.

Both sides are summed up where they lie, so that only numbers meet. Who copies says when a side is
complete; knows nothing of streams, copy threads or requests.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualpace.block import BLOCK_TOKENS, blocks_for
from dualpace.runtime.messages import MovesChecked

_ODD = -7046029254386353131  # as 64 bits without a sign, 2^64 by the golden ratio
_AT_ONCE = 16  # blocks whose words are widened together


@dataclass(frozen=True, slots=True)
class Part:
    """Heads that this rank and one of the host's have in common. Both pools are views of those,
    [B, L, 2, K, 16, D]."""

    own: slice  # of this rank's heads
    hbm: Tensor
    host: Tensor


@dataclass(slots=True)
class Move:
    """One copy. Sums are [blocks, layers] and there when the copy has ended."""

    what: str
    source: Sequence[int]
    target: Sequence[int]
    before: Tensor
    after: Tensor | None = None  # None: those of `host`, which nobody touches before the report
    host: Tensor | None = None
    last: int = BLOCK_TOKENS  # tokens of the last block that were written
    first_layer: int = 0

    def difference(self) -> str:
        """Where the first block differs, for people; empty if none does."""
        after = self.after
        if after is None:
            assert self.host is not None
            after = sums(self.host, self.target, self.last)
        wrong = (self.before != after).nonzero().tolist()
        if not wrong:
            return ""
        place, layer = wrong[0]
        came = f" from block {self.source[place]}" if self.source else ""
        return (
            f"layer {layer + self.first_layer} of block {self.target[place]} is not what left"
            f"{came} by {self.what} ({len(wrong)} of {self.before.numel()} such pieces differ)"
        )


def nothing() -> None:
    """What is to be done after a copy that nobody checks."""


class MoveChecks:
    """What each transfer under way has to bring. `fetch` starts a device's sums for the host, in
    the stream that computes them."""

    def __init__(
        self,
        hbm: Tensor,
        hosts: Sequence[tuple[slice, Tensor]],
        fetch: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> None:
        """hbm: [L, B, 2, K, 16, D]; a part of the host's pool with the heads of it that it has."""
        by_block = hbm.transpose(0, 1)
        self._parts = [Part(own, by_block[:, :, :, own], host) for own, host in hosts]
        self._fetch = fetch
        self._moves: defaultdict[int, list[Move]] = defaultdict(list)  # by transfer

    def swap(
        self, transfer_id: int, is_out: bool, source: Sequence[int], target: Sequence[int]
    ) -> Callable[[], None]:
        """Call it where the sources are complete, before the copy; and what it returns right after
        the copy, before anybody else may write to HBM's targets."""
        moves = []
        for part in self._parts:
            if is_out:
                before = self._fetch(sums(part.hbm, source))
                moves.append(Move("a swap-out", source, target, before, host=part.host))
            else:
                moves.append(Move("a swap-in", source, target, sums(part.host, source)))
        self._moves[transfer_id] += moves

        def arrived() -> None:
            for part, move in zip(self._parts, moves, strict=True):
                if not is_out:
                    move.after = self._fetch(sums(part.hbm, target))

        return arrived

    def prompt(
        self, transfer_id: int, layer: int, k: Tensor, v: Tensor, blocks: Sequence[int]
    ) -> None:
        """One layer's k and v, [T, K, D] of a prompt that goes to these blocks of the host; before
        anybody may overwrite them."""
        last = (len(k) - 1) % BLOCK_TOKENS + 1
        for part in self._parts:
            host = part.host[:, layer : layer + 1]
            before = self._fetch(sums_of_tokens(k[:, part.own], v[:, part.own]))
            move = Move("a prefill", (), blocks, before, None, host, last, layer)
            self._moves[transfer_id].append(move)

    def forget(self, transfer_ids: Iterable[int]) -> None:
        for number in transfer_ids:
            self._moves.pop(number, None)

    def compare(self, transfer_ids: Iterable[int]) -> MovesChecked:
        """Of transfers all of whose copies have ended and which nobody has been told of."""
        checked = MovesChecked(0)
        for number in transfer_ids:
            moves = self._moves.pop(number, [])
            checked.blocks += len({block for move in moves for block in move.target})
            for move in moves:
                if not checked.difference and (difference := move.difference()):
                    checked.transfer_id, checked.difference = number, difference
        return checked


def sums(pool: Tensor, blocks: Sequence[int], last: int = BLOCK_TOKENS) -> Tensor:
    """A number a block and layer, int64 [n, L], which no change of a single word leaves as it was.
    pool: [B, L, 2, K, 16, D]; of the last block only the first `last` tokens count."""
    is_cuda = pool.is_cuda
    ids = torch.tensor(blocks, dtype=torch.int64, pin_memory=is_cuda)
    ids = ids.to(pool.device, non_blocking=is_cuda)
    made = []
    for first in range(0, len(blocks), _AT_ONCE):
        pieces = pool[ids[first : first + _AT_ONCE]]
        if first + _AT_ONCE >= len(blocks):
            pieces[-1, ..., last:, :] = 0
        made.append(_weighed(pieces))
    return torch.cat(made)


def sums_of_tokens(k: Tensor, v: Tensor) -> Tensor:
    """The same, [n, 1], of the blocks that k and v, [T, K, D], will lie in."""
    num_tokens, heads, dim = k.shape
    count = blocks_for(num_tokens)
    tokens = k.new_zeros(2, count * BLOCK_TOKENS, heads, dim)
    tokens[0, :num_tokens], tokens[1, :num_tokens] = k, v
    by_block = tokens.view(2, count, BLOCK_TOKENS, heads, dim).permute(1, 0, 3, 2, 4)
    return _weighed(by_block.unsqueeze(1))


def _weighed(pieces: Tensor) -> Tensor:
    """[n, L, ...] -> [n, L]: words, each times an odd number of its own, modulo 2^64."""
    words = pieces.contiguous().view(torch.int32).flatten(2).long()
    weights = torch.arange(words.shape[-1], device=words.device) * _ODD | 1
    return (words * weights).sum(-1)
