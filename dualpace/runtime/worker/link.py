"""A worker's end of everything it shares with the engine and the other worker.

Waiting is one `poll` on the doorbell and the lifeline; nothing here spins.
"""

import json
import select
import socket
from collections import deque
from collections.abc import Iterator

from dualpace.runtime.assist import AssistBuffer
from dualpace.runtime.channel import Channel, silence
from dualpace.runtime.lockstep import LockstepBuffer
from dualpace.runtime.plan import Plan
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wire import Message
from dualpace.runtime.wiring import assist_layout, channel_size, lockstep_layout

_FULL_MAILBOX_PAUSE_MS = 1.0


class LifelineClosedError(Exception):
    """The engine is gone or wants this worker to end."""


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
        other_doorbell: int,
        lockstep: LockstepBuffer | None = None,
    ) -> None:
        self.lockstep = lockstep
        self.assist = assist
        self.host_pool = host_pool
        self.doorbell = channel.bell_down
        self.other_doorbell = other_doorbell
        self._channel = channel
        self._lifeline = lifeline
        self._outbox: deque[Message] = deque()
        self._poll = select.poll()
        self._poll.register(self.doorbell, select.POLLIN)
        self._poll.register(lifeline.fileno(), select.POLLIN)

    @classmethod
    def attach(cls, plan: Plan, role: str, fds_json: str, lifeline: socket.socket) -> "Link":
        """From the descriptors that the engine passed by number."""
        fds: dict[str, int] = json.loads(fds_json)
        channel = Channel(
            SharedRegion.attach(fds["channel"]),
            channel_size(plan, role),
            fds["bell_down"],
            fds["bell_up"],
        )
        assist = AssistBuffer(SharedRegion.attach(fds["assist"]), assist_layout(plan))
        host_pool = SharedRegion.attach(fds["host_pool"]).view
        lockstep = None
        if "lockstep" in fds:
            region = SharedRegion.attach(fds["lockstep"])
            lockstep = LockstepBuffer(region, lockstep_layout(plan))
        return cls(channel, lifeline, assist, host_pool, fds["other_doorbell"], lockstep)

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

    def check_lifeline(self) -> None:
        """Raises LifelineClosedError, and leaves the doorbell alone: for the time before Ready."""
        if any(fd == self._lifeline.fileno() for fd, _ in self._poll.poll(0)):
            raise LifelineClosedError

    def receive(self) -> Iterator[Message]:
        return self._channel.down.take()

    def send(self, message: Message) -> None:
        """To the engine, in order; kept here while its mailbox is full."""
        self._outbox.append(message)
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._channel.up.has_room():
            self._channel.send_up(self._outbox.popleft())
