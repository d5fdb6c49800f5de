"""A worker's end of everything it shares with the engine and the other worker.

Waiting is one `poll` on the doorbell and the lifeline; nothing here spins.
"""

import json
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dualpace.runtime.assist import AssistBuffer
from dualpace.runtime.channel import Channel, silence
from dualpace.runtime.lockstep import LockstepBuffer
from dualpace.runtime.messages import AssistDone, StepDone, StepDropped
from dualpace.runtime.plan import Plan
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wire import Message
from dualpace.runtime.wiring import assist_layout, channel_size, lockstep_layout, ranks_of
from dualpace.runtime.worker.progress import Progress

_FULL_MAILBOX_PAUSE_MS = 1.0
_POOL_PAUSE_S = 0.01


class LifelineClosedError(Exception):
    """The engine is gone or wants this worker to end."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of this worker's group, itself included, and the memory that they share."""

    rank: int
    size: int
    collective: memoryview
    order: memoryview
    meeting: int  # descriptor of an empty file, for process groups
    bells: Sequence[int]  # by rank


class Link:
    """Messages from and to the engine, the assist buffer, the host pool's memory, and one place to
    wait.
    """

    def __init__(
        self,
        channel: Channel,
        lifeline: socket.socket,
        assist: AssistBuffer,
        host_pool: memoryview,
        other_doorbells: Sequence[int],
        lockstep: LockstepBuffer | None = None,
        peers: Peers | None = None,
        is_pool_there: Callable[[], bool] = lambda: True,
    ) -> None:
        """other_doorbells: of the other side's ranks. is_pool_there: whether the engine has taken
        all of the host pool's memory."""
        self._is_pool_there = is_pool_there
        self.lockstep = lockstep
        self.peers = peers  # None: a group of one
        self.rank = 0 if peers is None else peers.rank
        self.assist = assist
        self.host_pool = host_pool
        self.doorbell = channel.bell_down
        self.other_doorbells = other_doorbells
        self.channel = channel
        self._lifeline = lifeline
        self._outbox: deque[Message] = deque()
        self._poll = select.poll()
        self._poll.register(self.doorbell, select.POLLIN)
        self._poll.register(lifeline.fileno(), select.POLLIN)

    @classmethod
    def attach(
        cls, plan: Plan, role: str, rank: int, fds_json: str, lifeline: socket.socket
    ) -> "Link":
        """From the descriptors that the engine passed by number."""
        fds: dict[str, int] = json.loads(fds_json)
        channel = Channel(
            SharedRegion.attach(fds["channel"]),
            channel_size(plan, role),
            fds["bell_down"],
            fds["bell_up"],
        )
        assist = AssistBuffer(SharedRegion.attach(fds["assist"]), assist_layout(plan))
        host_pool = SharedRegion.attach(fds["host_pool"])
        lockstep = None
        if "lockstep" in fds:
            region = SharedRegion.attach(fds["lockstep"])
            lockstep = LockstepBuffer(region, lockstep_layout(plan))
        kind = FollowerLink if rank and cls is Link else cls
        peers = _peers(rank, ranks_of(plan, role), fds)
        others = ranks_of(plan, "cpu" if role == "gpu" else "gpu")
        bells = [fds[f"other_bell_{other}"] for other in range(others)]
        return kind(
            channel,
            lifeline,
            assist,
            host_pool.view,
            bells,
            lockstep,
            peers,
            lambda: host_pool.is_reserved,
        )

    @property
    def other_doorbell(self) -> int:
        """Of the other side's rank that speaks for all."""
        return self.other_doorbells[0]

    def wait(self, block: bool) -> None:
        """Returns when the doorbell has been rung (at once unless `block`) and silences it.

        Look for work after this, not before. Raises LifelineClosedError.
        """
        timeout_ms = (_FULL_MAILBOX_PAUSE_MS if self._outbox else None) if block else 0.0
        ready = {fd for fd, _ in self._poll.poll(timeout_ms)}
        if self._lifeline.fileno() in ready:
            raise LifelineClosedError  # nothing is ever sent on it after the plan
        if self.doorbell in ready:
            silence(self.doorbell)
        self._flush()

    def await_host_pool(self, progress: Progress) -> None:
        """Returns when the engine has taken the host pool's memory, which goes on while workers
        start. Raises LifelineClosedError."""
        if self._is_pool_there():
            return
        with progress.phase("host_pool", "waiting for the host pool's memory"):
            while not self._is_pool_there():
                self.check_lifeline()
                time.sleep(_POOL_PAUSE_S)

    def check_lifeline(self) -> None:
        """Raises LifelineClosedError, and leaves the doorbell alone: for the time before Ready."""
        if any(fd == self._lifeline.fileno() for fd, _ in self._poll.poll(0)):
            raise LifelineClosedError

    def is_alive(self) -> bool:
        """Whether waiting for something else still makes sense. Raises LifelineClosedError."""
        self.check_lifeline()
        return True

    def receive(self) -> Iterator[Message]:
        return self.channel.down.take()

    def send(self, message: Message) -> None:
        """To the engine, in order; kept here while its mailbox is full."""
        self._outbox.append(message)
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self.channel.up.has_room():
            self.channel.send_up(self._outbox.popleft())


class FollowerLink(Link):
    """Of a rank that the first one speaks for: the engine hears only what concerns this process."""

    def send(self, message: Message) -> None:
        if not isinstance(message, StepDone | StepDropped | AssistDone):
            super().send(message)


def _peers(rank: int, size: int, fds: dict[str, int]) -> Peers | None:
    if size == 1:
        return None
    return Peers(
        rank=rank,
        size=size,
        collective=SharedRegion.attach(fds["collective"]).view,
        order=SharedRegion.attach(fds["order"]).view,
        meeting=fds["meeting"],
        bells=[fds[f"bell_{peer}"] for peer in range(size)],
    )
