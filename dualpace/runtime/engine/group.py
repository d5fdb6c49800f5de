"""The ranks of one side as one worker: all get every batch, the first one speaks for all.

A worker is lost when a rank dies or says that it met an exception. The other ranks are ended with
it, and all are started again together, on memory that is as new. Knows nothing about requests or
rounds, nor about the other side.
"""

import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dualpace.runtime.channel import Channel
from dualpace.runtime.engine.worker_handle import WorkerHandle
from dualpace.runtime.messages import Failed, Phase, Ready, TransfersDone
from dualpace.runtime.process import PEER_LOST, ending
from dualpace.runtime.wire import Message

log = logging.getLogger(__name__)

# Without a result between them; more means that a restart does not help.
MAX_DEATHS_IN_A_ROW = 3
MAX_SUSPECTED_IN_A_ROW = 8  # with requests that may be the cause
# Of a process that somebody else has ended: an operator, the kernel for want of memory, a peer.
_ENDED_BY_OTHERS = (-signal.SIGKILL, PEER_LOST)


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
        on_loss: Callable[[bool], None],
    ) -> None:
        """One rank a channel. `reset` clears what the ranks share, before they start. `on_loss` is
        called once for the whole group, when none of its processes is left, and told whether the
        worker itself is at fault; then `restart` it."""
        self.role = role
        self.ready = False
        self.phase = "not started"
        self.restarts = 0
        self._loss_s = 0.0  # the last one's
        self._deaths_in_a_row = 0
        self._suspected_in_a_row = 0
        self._was_ready = False  # once
        self._cannot_start = False  # it said so; a restart would not help
        self._is_ending = False  # a rank is lost, the others are about to be
        self._is_at_fault = False
        self._is_wanted = False  # the engine itself has ended it
        self._last_words = ""
        self._reset = reset
        self._on_message = on_message
        self._on_loss = on_loss
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
        self._is_ending = self._is_at_fault = self._is_wanted = False
        self._copied.clear()
        self._reset()
        for rank in self.ranks:
            rank.start()

    def restart(self, is_suspected: bool) -> None:
        """After `on_loss`, unless that would help nobody: then it says so. `is_suspected`: requests
        may be the cause, which will not come together again."""
        if any(rank.has_worked for rank in self.ranks):
            self._deaths_in_a_row = self._suspected_in_a_row = 0
        if is_suspected:
            self._suspected_in_a_row += 1
        elif not self._is_wanted:
            self._deaths_in_a_row += 1
        if hopeless := self._hopeless():
            self._cannot_start = True
            self._on_message(Failed(hopeless, 0))
            return
        self.restarts += 1
        self.start()

    def _hopeless(self) -> str:
        """Why another start would not help, if so."""
        if self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            times = f"{self._deaths_in_a_row} times in a row"
        elif self._suspected_in_a_row >= MAX_SUSPECTED_IN_A_ROW:
            times = f"{self._suspected_in_a_row} times in a row with requests, whichever they were"
        else:
            return ""
        words = f"last: {self._last_words}. Its messages above say why"
        return f"the {self.role} worker died {times}; {words}"

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

    def has_helped(self) -> None:
        """What it computed came as part of the other side's result."""
        self._first.has_worked = True

    @property
    def info(self) -> dict[str, Any]:
        """What the first rank said when it became ready, and if there are several, all of them."""
        first = dict(self.ranks[0].info)
        return first if len(self.ranks) == 1 else {**first, "ranks": [r.info for r in self.ranks]}

    def end(self, why: str) -> None:
        """At once, and not by its own fault; the engine hears of it as of any loss."""
        if not self._is_ending:
            self._is_wanted = True
            self._lose(why, False)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def _rank_died(self, dead: WorkerHandle, status: int) -> None:
        self.ready = False
        if self._cannot_start:
            return
        self._lose(f"{dead.name} {ending(status)}", status not in _ENDED_BY_OTHERS)
        if not any(rank.is_running for rank in self.ranks):
            self._on_loss(self._is_at_fault)

    def _lose(self, why: str, is_at_fault: bool) -> None:
        """Of several reasons the first is told; that the worker is at fault, any may say."""
        self._is_at_fault |= is_at_fault
        if self._is_ending:
            return
        self._is_ending = True
        self.ready = False
        self.phase = "restarting"
        self._loss_s = time.monotonic()
        self._last_words = why
        log.error("%s", why)
        for rank in self.ranks:
            rank.kill()

    # ---- messages

    def send(self, message: Message) -> None:
        assert self.ready, f"{self.role} worker is not ready"
        self._first.channel.send_down(message)
        for rank in self._others:
            rank.post(message)

    def _status(self, rank: WorkerHandle, message: Message) -> None:
        if isinstance(message, Failed) and self._was_ready:
            self._lose(message.text, True)
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
                self.ready = self._was_ready = True
                self.phase = "ready"
                if self.restarts:
                    seconds = time.monotonic() - self._loss_s
                    log.info("the %s worker is back after %.1f s", self.role, seconds)
            case Failed():
                self._cannot_start = True
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
