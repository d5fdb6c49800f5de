"""A fixed batch decodes the same token again after one of its requests has been on the host: what
is told of every row is the same to the bit, for any kind of accelerator."""

from collections.abc import Callable

from dualpace.runtime.types import TransferKind
from tests.runtime.worker.rig import Rig
from tests.runtime.worker.talks import Talk

Talks = Callable[..., list[Talk]]
BEST = 20  # log-probabilities are each over all logits of the row


def run_swapped(rig: Rig, talks: Talks) -> None:
    """The requests are gone afterwards."""
    everyone = talks(15, 31, 40, 22)
    for talk in everyone:
        talk.logprobs = BEST
    rig.gpu_step([rig.prefill(t) for t in everyone])
    for turn, moved in enumerate([*everyone, *everyone]):
        before = _decode(rig, everyone)
        for talk in everyone:  # K and V of the same token are written again
            talk.tokens.pop()
        for number, kind in enumerate((TransferKind.SWAP_OUT, TransferKind.SWAP_IN)):
            left, there = ("gpu", "host") if kind == TransferKind.SWAP_OUT else ("host", "gpu")
            source, moved.blocks = moved.blocks, rig.take(there, len(moved.blocks))
            rig.gpu_step([], [(2 * turn + number, kind, source, list(moved.blocks))])
            rig.transfer_done(2 * turn + number)
            rig.free[left] = source + rig.free[left]  # used again as late as can be
        assert _decode(rig, everyone) == before, f"turn {turn}"
    for talk in everyone:
        rig.free["gpu"] += talk.blocks


def _decode(rig: Rig, everyone: list[Talk]) -> list[object]:
    """All that each is told of one more token."""
    rig.gpu_step([rig.decode(t) for t in everyone])
    return [talk.told.pop() for talk in everyone]
