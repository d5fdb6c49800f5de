"""What CPU ranks go by that measure together: they make the same calls, and equally often, so
whatever decides how often is the same number on all of them. Knows nothing about what is measured.
"""

from collections.abc import Sequence

import torch

from dualpace.graphs.collective import Collective


class Team:
    """One rank's place among them; alone without a collective."""

    def __init__(self, collective: Collective | None) -> None:
        self._collective = collective
        self.is_first = collective is None or collective.rank == 0

    def meet(self) -> None:
        """Returns when all ranks have come."""
        if self._collective is not None:
            self._collective.barrier()

    def of_ranks(self, seconds: float) -> list[float]:
        """Everybody's, in the order of the ranks."""
        if self._collective is None:
            return [seconds]
        found: list[float] = self._collective.all_gather(_row([seconds])).tolist()
        return found

    def of_first(self, value: float) -> float:
        """The first rank's; what the others say does not matter."""
        return self.of_ranks(value)[0]

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The largest of all ranks, one by one; all have as many."""
        if self._collective is None or not seconds:
            return list(seconds)
        of_ranks = self._collective.all_gather(_row(seconds)).view(self._collective.size, -1)
        found: list[float] = of_ranks.amax(0).tolist()
        return found


def _row(seconds: Sequence[float]) -> torch.Tensor:
    return torch.tensor(seconds, dtype=torch.float64)
