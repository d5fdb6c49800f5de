"""`python -m dualpace.runtime.profile.contestant`: one CPU rank as it serves, which also says
after each batch how long its sums over ranks took. Never started by a person.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dualpace.runtime.messages import Phase, Ready
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.follower import arrive
from dualpace.runtime.worker.link import LifelineClosedError
from dualpace.runtime.worker.main import settle

if TYPE_CHECKING:
    from torch import Tensor

    from dualpace.graphs.collective import Collective

T = TypeVar("T")


class TimedCollective:
    """Another collective and the seconds that its calls took."""

    def __init__(self, collective: "Collective") -> None:
        self._collective, self._seconds = collective, 0.0
        self.rank, self.size = collective.rank, collective.size

    def all_reduce(self, x: "Tensor") -> "Tensor":
        return self._timed(lambda: self._collective.all_reduce(x))

    def all_gather(self, x: "Tensor") -> "Tensor":
        return self._timed(lambda: self._collective.all_gather(x))

    def barrier(self) -> None:
        self._timed(self._collective.barrier)

    def _timed(self, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = call()
        self._seconds += time.perf_counter() - started
        return result

    def take(self) -> float:
        """Seconds since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def main() -> None:
    rank, fds, lifeline, text = arrive()
    plan = Plan.from_json(text)
    settle(plan, "cpu", rank)
    try:
        serve(plan, rank, fds, lifeline)
    except LifelineClosedError:
        sys.stdout.flush()
        os._exit(0)


def serve(plan: Plan, rank: int, fds: str, lifeline: socket.socket) -> None:
    """Raises LifelineClosedError."""
    from dualpace.runtime.profile.host import RankLink
    from dualpace.runtime.worker.build import build_cpu
    from dualpace.runtime.worker.progress import Progress
    from dualpace.runtime.worker.ranks import Ranks, join

    link = RankLink.attach(plan, "cpu", rank, fds, lifeline)
    ranks, timer = join(plan, "cpu", link), None
    if ranks.collective is not None:
        timer = TimedCollective(ranks.collective)
        ranks = Ranks(ranks.shard, timer)
    worker = build_cpu(plan, link, Progress(lambda text: None), ranks)
    worker.ready()
    link.send(Ready("{}"))
    while True:
        worker.turn()
        link.send(Phase(str(timer.take() if timer is not None else 0.0)))


if __name__ == "__main__":
    main()
