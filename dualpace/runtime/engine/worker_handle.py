"""The engine's side of one worker process: start, watch, send, receive.

Knows nothing about requests or rounds, nor what is to happen when a process has died (`group`). A
worker's memory and bells outlive it and go to its successor.
"""

import asyncio
import json
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping

from dualpace.runtime.channel import Channel, silence
from dualpace.runtime.messages import Failed, Hello, Phase, Ready
from dualpace.runtime.process import send, start_process
from dualpace.runtime.wire import Message

_FULL_MAILBOX_PAUSE_S = 0.001


class WorkerHandle:
    """One rank's process, its channel, and whether it can take a batch now (`ready`)."""

    def __init__(
        self,
        role: str,
        rank: int,
        module: str,
        plan_json: str,
        channel: Channel,
        shared_fds: Mapping[str, int],
        on_status: Callable[["WorkerHandle", Message], None],
        on_result: Callable[[Message], None],
        on_death: Callable[["WorkerHandle", int], None],
    ) -> None:
        """`on_status` gets Phase, Ready and Failed, `on_result` everything else; `on_death` the
        exit status."""
        self.name = f"{role} worker" if rank == 0 else f"{role} worker {rank}"
        self.rank = rank
        self.channel = channel
        self.ready = False
        self.has_worked = False  # a result came since the last start
        self.info: dict[str, object] = {}
        self._role = role
        self._module = module
        self._plan_json = plan_json
        self._fds = {
            "channel": channel.region.fd,
            "bell_down": channel.bell_down,
            "bell_up": channel.bell_up,
            **shared_fds,
        }
        self._on_status = on_status
        self._on_result = on_result
        self._on_death = on_death
        self._outbox: deque[Message] = deque()  # while its mailbox is full
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._lifeline: socket.socket | None = None

    # ---- life

    def start(self) -> None:
        """Starts a process on the (reset) channel. Call from the main thread."""
        self.channel.down.reset()
        self.channel.up.reset()
        self.has_worked = False
        self._outbox.clear()
        where = ["--role", self._role, "--rank", str(self.rank)]
        arguments = [*where, "--fds", json.dumps(self._fds)]
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

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def _died(self) -> None:
        self._receive()  # what it still said counts
        self._on_death(self, self._forget_process().returncode)

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

    def close(self) -> None:
        """Kills it: it owns nothing that is not rebuilt, and taking an interpreter with torch apart
        takes seconds."""
        if self._process is not None:
            self._process.kill()
            self._forget_process()

    # ---- messages

    def post(self, message: Message) -> None:
        """Sends in order and as there is room: a rank that does not speak may be behind the one
        whose results the next batches follow."""
        self._outbox.append(message)
        if len(self._outbox) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._outbox and self.channel.down.has_room():
            self.channel.send_down(self._outbox.popleft())
        if self._outbox:
            asyncio.get_running_loop().call_later(_FULL_MAILBOX_PAUSE_S, self._flush)

    def _receive(self) -> None:
        silence(self.channel.bell_up)
        for message in self.channel.up.take():
            match message:
                case Phase() | Failed():
                    self._on_status(self, message)
                case Ready():
                    self.ready = True
                    self.info = json.loads(message.info)
                    self._on_status(self, message)
                case _:
                    self.has_worked = True
                    self._on_result(message)
