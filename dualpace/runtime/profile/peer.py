"""The GPU worker's process, driven as the engine drives it: batches down, results up. Blocking, for
one caller that has nothing else to do; knows nothing about what a batch is good for."""

import json
import os
import select
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from dualpace.errors import ConfigError
from dualpace.runtime.channel import Channel, silence
from dualpace.runtime.messages import Failed, GpuBatch, Hello, Phase, Ready, StepDone
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import send, start_process
from dualpace.runtime.wire import Message
from dualpace.runtime.wiring import MAX_STEPS_IN_FLIGHT

M = TypeVar("M", bound=Message)


class WorkerEndedError(Exception):
    """The GPU worker ended while something was expected of it."""


class GpuPeer:
    """Starts the worker and waits until it is ready. Construct it in the main thread."""

    def __init__(self, plan: Plan, channel: Channel, shared_fds: Mapping[str, int]) -> None:
        self._channel = channel
        self._engine_cores = plan.runtime.cores
        self._messages: deque[Message] = deque()
        fds = {
            "channel": channel.region.fd,
            "bell_down": channel.bell_down,
            "bell_up": channel.bell_up,
            **shared_fds,
        }
        arguments = ["--role", "gpu", "--fds", json.dumps(fds)]
        module = plan.runtime.worker_module
        self._process, self._lifeline = start_process(module, arguments, list(fds.values()), {})
        send(self._lifeline, Hello(plan.to_json()))
        self._pidfd = os.pidfd_open(self._process.pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        self._poll.register(channel.bell_up, select.POLLIN)
        self.expect(Ready)

    def run(self, batch: GpuBatch) -> StepDone:
        """Sends `batch` and waits for its tokens."""
        self._channel.send_down(batch)
        return self.expect(StepDone)

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
        silence(self._channel.bell_up)
        for message in self._channel.up.take():
            if isinstance(message, Failed):
                raise (ConfigError if message.user_error else WorkerEndedError)(message.text)
            if isinstance(message, Phase):
                print(message.text, flush=True)
                continue
            self._messages.append(message)
        if self._pidfd in ready:
            status = self._process.wait()
            raise WorkerEndedError(f"the GPU worker ended with status {status}")

    def take(self, kind: type[M]) -> list[M]:
        """All messages of this kind that have been received."""
        found = [message for message in self._messages if isinstance(message, kind)]
        self._messages = deque(m for m in self._messages if not isinstance(m, kind))
        return found

    @contextmanager
    def busy_with(self, batch: GpuBatch) -> Iterator[None]:
        """Inside, the worker computes `batch` again and again, as many at once as in serving."""
        stop = threading.Event()
        errors: list[BaseException] = []

        def feed() -> None:
            in_flight = 0
            try:
                os.sched_setaffinity(0, self._engine_cores)  # of this thread alone
                while in_flight or not stop.is_set():
                    while in_flight < MAX_STEPS_IN_FLIGHT and not stop.is_set():
                        self._channel.send_down(batch)
                        in_flight += 1
                    self.expect(StepDone)
                    in_flight -= 1
            except BaseException as error:  # raised below, in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=feed, name="load", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        try:
            self._lifeline.shutdown(socket.SHUT_RDWR)
            self._process.wait(5.0)
        except (OSError, subprocess.TimeoutExpired):  # it is gone already, or does not listen
            self._process.kill()
            self._process.wait()
        os.close(self._pidfd)
        self._lifeline.close()
