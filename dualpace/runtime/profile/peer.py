"""The GPU worker's processes, one a rank, driven as the engine drives them: batches down, the first
one's results up. Blocking, for one caller that has nothing else to do; knows nothing about what a
batch is good for."""

import json
import os
import select
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from dualpace.errors import ConfigError
from dualpace.runtime.channel import Channel, silence
from dualpace.runtime.messages import Failed, GpuBatch, Hello, Phase, Ready, StepDone
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import ending, send, start_process
from dualpace.runtime.wire import Message
from dualpace.runtime.wiring import MAX_STEPS_IN_FLIGHT

M = TypeVar("M", bound=Message)


class WorkerEndedError(Exception):
    """The GPU worker ended while something was expected of it."""


class RankProcess:
    """The process of one rank of either side and its channel. Construct it in the main thread."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        number: int,
        channel: Channel,
        shared_fds: Mapping[str, int],
        hello: str,
    ) -> None:
        """hello: what it is told first."""
        self.channel = channel
        fds = fds_of(channel, shared_fds)
        arguments = [*arguments, "--rank", str(number), "--fds", json.dumps(fds)]
        self.process, self._lifeline = start_process(module, arguments, list(fds.values()), {})
        send(self._lifeline, Hello(hello))
        self.pidfd = os.pidfd_open(self.process.pid)

    def take(self) -> Iterator[Message]:
        """What it has said. Raises WorkerEndedError, and ConfigError for what a user can fix."""
        silence(self.channel.bell_up)
        for message in self.channel.up.take():
            if isinstance(message, Failed):
                raise (ConfigError if message.user_error else WorkerEndedError)(message.text)
            yield message

    def close(self) -> None:
        try:
            self._lifeline.shutdown(socket.SHUT_RDWR)
            self.process.wait(5.0)
        except (OSError, subprocess.TimeoutExpired):  # it is gone already, or does not listen
            self.process.kill()
            self.process.wait()
        os.close(self.pidfd)
        self._lifeline.close()


def fds_of(channel: Channel, shared_fds: Mapping[str, int]) -> dict[str, int]:
    """What `Link.attach` needs."""
    return {
        "channel": channel.region.fd,
        "bell_down": channel.bell_down,
        "bell_up": channel.bell_up,
        **shared_fds,
    }


class GpuPeer:
    """Starts the worker and waits until it is ready. Construct it in the main thread."""

    def __init__(
        self, plan: Plan, channels: Sequence[Channel], shared_fds: Mapping[str, int]
    ) -> None:
        self._engine_cores = plan.runtime.cores
        self._messages: deque[Message] = deque()
        module, hello = plan.runtime.worker_module, plan.to_json()
        self._ranks = [
            RankProcess(module, ["--role", "gpu"], number, channel, shared_fds, hello)
            for number, channel in enumerate(channels)
        ]
        self._poll = select.poll()
        for rank in self._ranks:
            self._poll.register(rank.pidfd, select.POLLIN)
            self._poll.register(rank.channel.bell_up, select.POLLIN)
        self.expect(Ready)

    def run(self, batch: GpuBatch) -> StepDone:
        """Sends `batch` and waits for its tokens."""
        self._send(batch)
        return self.expect(StepDone)

    def _send(self, batch: GpuBatch) -> None:
        for rank in self._ranks:
            rank.channel.send_down(batch)

    def expect(self, kind: type[M]) -> M:
        """The next message of this kind; others are kept. Raises WorkerEndedError, and ConfigError
        for what a user can fix."""
        while True:
            for message in self._messages:
                if isinstance(message, kind):
                    self._messages.remove(message)
                    return message
            self._receive()

    def _receive(self) -> None:
        ready = {fd for fd, _ in self._poll.poll()}
        first, *others = self._ranks
        for message in first.take():
            if isinstance(message, Phase):
                print(message.text, flush=True)
                continue
            self._messages.append(message)
        for rank in others:
            list(rank.take())
        for rank in self._ranks:
            if rank.pidfd in ready:
                status = rank.process.wait()
                raise WorkerEndedError(f"the GPU worker {ending(status)}")

    def take(self, kind: type[M]) -> list[M]:
        """All messages of this kind that have been received."""
        found = [message for message in self._messages if isinstance(message, kind)]
        self._messages = deque(m for m in self._messages if not isinstance(m, kind))
        return found

    def stream(self, batch: GpuBatch, more: Callable[[int], bool]) -> list[StepDone]:
        """Sends `batch` again and again, as many at once as in serving, while `more(how many have
        been sent)`; returns when all have ended."""
        sent, done = 0, list[StepDone]()
        while True:
            while sent - len(done) < MAX_STEPS_IN_FLIGHT and more(sent):
                self._send(batch)
                sent += 1
            if sent == len(done):
                return done
            done.append(self.expect(StepDone))

    @contextmanager
    def busy_with(self, batch: GpuBatch) -> Iterator[list[StepDone]]:
        """Inside, the worker computes `batch` again and again, at least once; the steps are listed
        afterwards."""
        stop = threading.Event()
        steps: list[StepDone] = []
        errors: list[BaseException] = []

        def feed() -> None:
            try:
                os.sched_setaffinity(0, self._engine_cores)  # of this thread alone
                steps.extend(self.stream(batch, lambda sent: not sent or not stop.is_set()))
            except BaseException as error:  # raised below, in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=feed, name="load", daemon=True)
        thread.start()
        try:
            yield steps
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
