"""The engine's side of one worker process: start, watch, restart, send, receive.

Knows nothing about requests or rounds. A worker's memory and bells outlive it and go to its
successor.
"""

import asyncio
import json
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Mapping

from dualpace.runtime.channel import Channel, silence
from dualpace.runtime.messages import Failed, Hello, Phase, Ready
from dualpace.runtime.process import send, start_process
from dualpace.runtime.wire import Message

log = logging.getLogger(__name__)

MAX_DEATHS_IN_A_ROW = 3  # without a result between them; more means that a restart does not help
CLOSE_TIMEOUT_S = 5.0


class WorkerHandle:
    """One worker, its channel, and whether it can take a batch now (`ready`)."""

    def __init__(
        self,
        role: str,
        module: str,
        plan_json: str,
        channel: Channel,
        shared_fds: Mapping[str, int],
        on_message: Callable[[Message], None],
        on_death: Callable[[], None],
    ) -> None:
        self.role = role
        self.channel = channel
        self.ready = False
        self.phase = "not started"
        self.info: dict[str, object] = {}
        self.restarts = 0
        self._module = module
        self._plan_json = plan_json
        self._fds = {
            "channel": channel.region.fd,
            "bell_down": channel.bell_down,
            "bell_up": channel.bell_up,
            **shared_fds,
        }
        self._on_message = on_message
        self._on_death = on_death
        self._deaths_in_a_row = 0
        self._failed = False  # it said that it cannot go on; a restart would not help
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._lifeline: socket.socket | None = None

    # ---- life

    def start(self) -> None:
        """Starts a process on the (reset) channel. Call from the main thread."""
        self.channel.down.reset()
        self.channel.up.reset()
        arguments = ["--role", self.role, "--fds", json.dumps(self._fds)]
        self._process, self._lifeline = start_process(
            self._module, arguments, list(self._fds.values()), {}
        )
        send(self._lifeline, Hello(self._plan_json))
        self._pidfd = os.pidfd_open(self._process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._died)
        loop.add_reader(self.channel.bell_up, self._receive)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _died(self) -> None:
        self._receive()  # what it still said counts
        process = self._forget_process()
        if self._failed:
            return
        self.phase = "restarting"
        self._deaths_in_a_row += 1
        self.restarts += 1
        log.error("%s worker ended with status %s", self.role, process.returncode)
        if self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            reason = (
                f"the {self.role} worker died {self._deaths_in_a_row} times in a row, last with "
                f"status {process.returncode}; its messages above say why"
            )
            self._on_message(Failed(reason, 0))
            return
        self._on_death()

    def _forget_process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None and self._lifeline is not None
        self.ready = False
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        loop.remove_reader(self.channel.bell_up)
        os.close(self._pidfd)
        self._lifeline.close()
        process, self._process = self._process, None
        process.wait()
        return process

    def kill(self) -> None:
        """At once; the engine hears of it as of any death."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Closes the lifeline, which ends a worker that is at work; one that is still starting, or
        does not listen, is killed: it owns nothing that is not rebuilt."""
        if self._process is None:
            return
        assert self._lifeline is not None
        self._lifeline.shutdown(socket.SHUT_RDWR)
        if self.ready and not await self._ends_within(CLOSE_TIMEOUT_S):
            log.warning("%s worker does not end by itself; killed", self.role)
        self._process.kill()
        self._forget_process()

    async def _ends_within(self, timeout_s: float) -> bool:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # ---- messages

    def send(self, message: Message) -> None:
        assert self.ready, f"{self.role} worker is not ready"
        self.channel.send_down(message)

    def _receive(self) -> None:
        silence(self.channel.bell_up)
        for message in self.channel.up.take():
            match message:
                case Phase():
                    self.phase = message.text
                case Ready():
                    self.ready = True
                    self.phase = "ready"
                    self.info = json.loads(message.info)
                case Failed():
                    self._failed = True
                case _:
                    self._deaths_in_a_row = 0
            self._on_message(message)
