"""A channel between the engine and one worker: two mailboxes in shared memory and an eventfd to
wake each side.

Each mailbox has one writer and one reader. A worker's doorbell is rung by everyone who wants its
attention (engine, the other worker for an assist, its own copy thread), so that one `poll` waits
for all of them and nobody spins.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.wire import Message, decode

_HEADER_BYTES = 64  # two counters, each alone on its cache line with room to spare


class Mailbox:
    """A ring of equal slots. `sent` and `taken` only grow; x86 keeps stores in order, so a slot is
    complete when its count is visible."""

    def __init__(self, memory: memoryview, num_slots: int) -> None:
        self._counts = np.frombuffer(memory[:_HEADER_BYTES], np.int64)
        self._slots = memory[_HEADER_BYTES:]
        self._num_slots = num_slots
        self._slot_bytes = len(self._slots) // num_slots // 8 * 8

    @staticmethod
    def nbytes(num_slots: int, slot_bytes: int) -> int:
        return _HEADER_BYTES + num_slots * (-(-slot_bytes // 8) * 8)

    def put(self, message: Message) -> None:
        """Asserts that there is room: protocols here bound what is outstanding."""
        sent, taken = int(self._counts[0]), int(self._counts[4])
        assert sent - taken < self._num_slots, f"mailbox full: {type(message).__name__}"
        at = sent % self._num_slots * self._slot_bytes
        size = message.nbytes()
        assert size <= self._slot_bytes, (
            f"{type(message).__name__}: {size} > {self._slot_bytes} bytes"
        )
        message.encode_into(self._slots[at : at + self._slot_bytes])
        self._counts[0] = sent + 1

    def has_room(self) -> bool:
        return int(self._counts[0] - self._counts[4]) < self._num_slots

    def take(self) -> Iterator[Message]:
        """All messages that are there."""
        while self._counts[4] < self._counts[0]:
            taken = int(self._counts[4])
            at = taken % self._num_slots * self._slot_bytes
            message = decode(self._slots[at : at + self._slot_bytes])
            self._counts[4] = taken + 1
            yield message

    def reset(self) -> None:
        """Forgets everything. Only while the other side is not running."""
        self._counts[:] = 0


@dataclass(slots=True, frozen=True)
class ChannelSize:
    """Room for messages down (to the worker) and up (to the engine)."""

    slots_down: int
    slot_bytes_down: int
    slots_up: int
    slot_bytes_up: int

    def split(self) -> tuple[int, int]:
        return (
            Mailbox.nbytes(self.slots_down, self.slot_bytes_down),
            Mailbox.nbytes(self.slots_up, self.slot_bytes_up),
        )


class Channel:
    """`down` carries batches to the worker, `up` results to the engine."""

    def __init__(
        self, region: SharedRegion, size: ChannelSize, bell_down: int, bell_up: int
    ) -> None:
        self.region = region
        down_bytes, _ = size.split()
        self.down = Mailbox(region.view[:down_bytes], size.slots_down)
        self.up = Mailbox(region.view[down_bytes:], size.slots_up)
        self.bell_down = bell_down
        self.bell_up = bell_up

    @classmethod
    def create(cls, name: str, size: ChannelSize) -> "Channel":
        region = SharedRegion.create(name, sum(size.split()))
        return cls(region, size, eventfd(), eventfd())

    def send_down(self, message: Message) -> None:
        self.down.put(message)
        ring(self.bell_down)

    def send_up(self, message: Message) -> None:
        self.up.put(message)
        ring(self.bell_up)

    def close(self) -> None:
        self.region.close()
        os.close(self.bell_down)
        os.close(self.bell_up)


def eventfd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def ring(bell: int) -> None:
    """Wakes whoever polls `bell`. Rings add up; one `silence` answers them all."""
    os.eventfd_write(bell, 1)


def silence(bell: int) -> None:
    """Call before looking for work, so that a ring during the look is not lost."""
    with suppress(BlockingIOError):  # nobody has rung
        os.eventfd_read(bell)
