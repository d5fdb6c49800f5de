"""The ranks of one side as one worker: all get every batch, the first one speaks for all.

A rank that dies takes the others with it, and they are started again together, on memory that is
as new. Knows nothing about requests or rounds, nor about the other side.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dualpace.runtime.channel import Channel
from dualpace.runtime.engine.worker_handle import WorkerHandle
from dualpace.runtime.messages import Failed, Phase, Ready, TransfersDone
from dualpace.runtime.wire import Message

log = logging.getLogger(__name__)

MAX_DEATHS_IN_A_ROW = 3  # without a result between them; more means that a restart does not help


class WorkerGroup:
    """`ready`: every rank can take a batch now."""

    def __init__(
        self,
        role: str,
        module: str,
        plan_json: str,
        channels: Sequence[Channel],
        shared_fds: Mapping[str, int],
        reset: Callable[[], None],
        on_message: Callable[[Message], None],
        on_death: Callable[[], None],
    ) -> None:
        """One rank a channel. `reset` clears what the ranks share, before they start. `on_death` is
        called once for the whole group, when none of its processes is left."""
        self.role = role
        self.ready = False
        self.phase = "not started"
        self.restarts = 0
        self._death_s = 0.0  # the last one's
        self._deaths_in_a_row = 0
        self._is_ending = False  # a rank has died, the others are about to
        self._has_failed = False  # one said that it cannot go on; a restart would not help
        self._reset = reset
        self._on_message = on_message
        self._on_death = on_death
        self._copied: Counter[int] = Counter()  # ranks that have ended a transfer, while not all
        alone = len(channels) == 1
        self.ranks = tuple(
            WorkerHandle(
                role,
                rank,
                module,
                plan_json,
                channel,
                shared_fds,
                self._status,
                on_message if alone else self._result,
                self._rank_died,
            )
            for rank, channel in enumerate(channels)
        )
        self._first, *self._others = self.ranks

    # ---- life

    def start(self) -> None:
        """Call from the main thread."""
        self._is_ending = False
        self._copied.clear()
        self._reset()
        for rank in self.ranks:
            rank.start()

    @property
    def pid(self) -> int:
        """Of the rank that speaks for all."""
        return self.ranks[0].pid

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks if rank.is_running]

    @property
    def doorbells(self) -> list[int]:
        return [rank.channel.bell_down for rank in self.ranks]

    @property
    def info(self) -> dict[str, Any]:
        """What the first rank said when it became ready, and if there are several, all of them."""
        first = dict(self.ranks[0].info)
        return first if len(self.ranks) == 1 else {**first, "ranks": [r.info for r in self.ranks]}

    def kill(self) -> None:
        """At once; the engine hears of it as of any death."""
        for rank in self.ranks:
            rank.kill()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def _rank_died(self, dead: WorkerHandle, status: int) -> None:
        self.ready = False
        if self._has_failed:
            return
        if not self._is_ending:
            self._is_ending = True
            self.phase = "restarting"
            self._death_s = time.monotonic()
            log.error("%s ended with status %s", dead.name, status)
            self._count_death(dead.name, status)
            self.kill()
        if not any(rank.is_running for rank in self.ranks) and not self._is_hopeless:
            self.restarts += 1
            self._on_death()

    def _count_death(self, name: str, status: int) -> None:
        if any(rank.has_worked for rank in self.ranks):
            self._deaths_in_a_row = 0
        self._deaths_in_a_row += 1
        if self._is_hopeless:
            reason = (
                f"the {name} died {self._deaths_in_a_row} times in a row, last with status "
                f"{status}; its messages above say why"
            )
            self._on_message(Failed(reason, 0))

    @property
    def _is_hopeless(self) -> bool:
        return self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW

    # ---- messages

    def send(self, message: Message) -> None:
        assert self.ready, f"{self.role} worker is not ready"
        self._first.channel.send_down(message)
        for rank in self._others:
            rank.post(message)

    def _status(self, rank: WorkerHandle, message: Message) -> None:
        if self._is_ending:
            return
        match message:
            case Phase() if rank.rank:
                return  # the first one's say as much
            case Phase():
                self.phase = message.text
            case Ready():
                if not all(rank.ready for rank in self.ranks):
                    return
                self.ready = True
                self.phase = "ready"
                if self.restarts:
                    seconds = time.monotonic() - self._death_s
                    log.info("the %s worker is back after %.1f s", self.role, seconds)
            case Failed():
                self._has_failed = True
        self._on_message(message)

    def _result(self, message: Message) -> None:
        """A copy has ended when every rank's part has; of all else only the first rank speaks."""
        if self._is_ending:
            return
        if not isinstance(message, TransfersDone):
            self._on_message(message)
            return
        self._copied.update(message.transfer_ids.tolist())
        ended = [number for number, count in self._copied.items() if count == len(self.ranks)]
        for number in ended:
            del self._copied[number]
        if ended:
            self._on_message(TransfersDone(np.array(ended, np.int64)))
