"""Either end of the socket between the engine and its owner (server or `LLM`): messages both ways,
in order.
"""

import asyncio
import socket
from collections.abc import Callable

from dualpace.runtime.process import FrameReader, frame
from dualpace.runtime.wire import Message


class Connection(asyncio.Protocol):
    """`on_message` gets each message, `on_close` is called once when the other end is gone."""

    def __init__(self, on_message: Callable[[Message], None], on_close: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        on_message: Callable[[Message], None],
        on_close: Callable[[], None],
    ) -> "Connection":
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(on_message, on_close), sock=sock)
        return connection

    def send(self, message: Message) -> None:
        """Queues `message`; the transport writes it as the other end reads."""
        if self._transport is not None:
            self._transport.write(frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_close()
