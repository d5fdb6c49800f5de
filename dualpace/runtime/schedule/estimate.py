"""How long an answer will be, for finish peaks: `declared` is the paper's, `quantile` learns from
outputs.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import Protocol

from dualpace.block import BLOCK_TOKENS
from dualpace.errors import ConfigError


class Estimator(Protocol):
    """Expected outputs in all. Estimates lie in (num_output, max_tokens]."""

    exact: bool  # no request can outgrow its estimate

    def estimate(self, num_output: int, max_tokens: int) -> int:
        """For a request with `num_output` tokens so far that is about to be prefilled."""

    def outgrown(self, num_output: int, max_tokens: int) -> int:
        """For a request whose `num_output` tokens have reached its estimate."""

    def observe(self, num_output: int) -> None:
        """A request has finished with that many outputs."""


class Declared:
    """`max_tokens` is taken for the answer's length: no request outgrows it."""

    exact = True

    def estimate(self, num_output: int, max_tokens: int) -> int:
        return max_tokens

    def outgrown(self, num_output: int, max_tokens: int) -> int:
        return max_tokens

    def observe(self, num_output: int) -> None:
        """Learns nothing."""


class Quantile:
    """The 0.9 quantile of recent outputs; min(max_tokens, 256) until 32 have finished.

    A request that outgrows it gets the quantile of those recent outputs that are longer than its
    own, and at least one block more than it has.
    """

    exact = False

    def __init__(
        self, level: float = 0.9, first: int = 256, warmup: int = 32, window: int = 1024
    ) -> None:
        self._level, self._first, self._warmup = level, first, warmup
        self._recent: deque[int] = deque(maxlen=window)
        self._sorted: list[int] = []
        self._finished = 0

    def estimate(self, num_output: int, max_tokens: int) -> int:
        expected = self._first if self._finished < self._warmup else self._quantile(0)
        if expected <= num_output:
            return self.outgrown(num_output, max_tokens)
        return min(expected, max_tokens)

    def outgrown(self, num_output: int, max_tokens: int) -> int:
        return min(max(self._quantile(num_output), num_output + BLOCK_TOKENS), max_tokens)

    def observe(self, num_output: int) -> None:
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(num_output)
        insort(self._sorted, num_output)
        self._finished += 1

    def _quantile(self, above: int) -> int:
        """The quantile of recent outputs longer than `above`; 0 if there is none."""
        start = bisect_right(self._sorted, above)
        count = len(self._sorted) - start
        if count == 0:
            return 0
        return self._sorted[start + min(int(self._level * count), count - 1)]


ESTIMATORS: dict[str, Callable[[], Estimator]] = {"declared": Declared, "quantile": Quantile}


def make_estimator(name: str) -> Estimator:
    """The estimator that `kv.output_estimate` names."""
    if name not in ESTIMATORS:
        raise ConfigError(
            f"kv.output_estimate={name} is unknown: use one of {', '.join(ESTIMATORS)}"
        )
    return ESTIMATORS[name]()
