"""What the server process does on its loop: serve from the first moment, so that /health and /ready
work during the start, say when it is ready, and drain. Who starts and ends it is `lifecycle`.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from dualpace.runtime.engine_client import EngineClient, EngineGone
from dualpace.runtime.generation import Tokenizer
from dualpace.runtime.server.app import build_app
from dualpace.runtime.server.service import Service
from dualpace.runtime.server.timeline import start_table

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 60  # idle clients that come back later need no new connection
_LAST_WORDS_S = 2  # for answers that were cut off to reach their clients
_SILENCE_S = 15.0  # of a start, after which a line says that it goes on


class _QuietServer(uvicorn.Server):
    """uvicorn without its own idea of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Life:
    def __init__(
        self, client: EngineClient, sock: socket.socket, load: Callable[[str], Tokenizer]
    ) -> None:
        self._client = client
        self._plan = client.plan
        self._sock = sock
        self._load = load
        self._service = Service(client)
        self._stop = asyncio.Event()
        self.cut_by: signal.Signals | None = None  # a second signal: answers are not waited for
        self._info: dict[str, Any] = {}  # what the engine said when it was ready

    async def run(self) -> None:
        """Returns after a drain. Raises StartFailed, ConfigError (no tokenizer) or EngineGone."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._client.connect()
        config = uvicorn.Config(
            build_app(self._service),
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_WORDS_S,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
        )
        server = _QuietServer(config)
        serving = asyncio.create_task(server.serve(sockets=[self._sock]))
        try:
            await self._until_stopped()
        finally:
            self._service.drain_start_s = self._service.drain_start_s or time.monotonic()
            server.should_exit = True
            await serving
            if self.cut_by is not None:
                self._client.kill()
            await self._client.close()

    async def _until_stopped(self) -> None:
        start = asyncio.create_task(self._start())
        stop = asyncio.create_task(self._stop.wait())
        gone = asyncio.create_task(self._client.wait_gone())
        try:
            await asyncio.wait({start, stop, gone}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
                await asyncio.wait({stop, gone}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain()
            else:
                await start  # a start that failed has more to say
            if gone.done():
                raise EngineGone(gone.result())
        finally:
            for task in (start, stop, gone):
                task.cancel()
            await asyncio.gather(start, stop, gone, return_exceptions=True)

    async def _start(self) -> None:
        """Raises StartFailed or ConfigError."""
        ready = asyncio.create_task(self._client.wait_ready())
        waiting = asyncio.create_task(self._say_that_it_goes_on())
        try:
            # The engine loads weights meanwhile.
            self._service.tokenizer = await asyncio.to_thread(self._load, self._plan.model.source)
            self._info = await ready
        finally:
            ready.cancel()
            waiting.cancel()
        gc.collect()
        gc.freeze()  # what lives now lives on; full collections need not look at it again
        print(self._welcome(), flush=True)

    async def _say_that_it_goes_on(self) -> None:
        """A line now and then where a phase takes long: reading weights, compiling stages."""
        while True:
            await asyncio.sleep(_SILENCE_S)
            now_s = time.monotonic() - self._client.start_s
            if now_s - self._client.phases[-1][0] >= _SILENCE_S:
                latest = {text.partition(":")[0]: text for _, text in self._client.phases[1:]}
                log.info("%6.1f s  still: %s", now_s, "; ".join(latest.values()) or "starting")

    def _welcome(self) -> str:
        host, port = self._sock.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        lines = start_table(self._info, self._client.phases[-1][0])
        name = self._plan.model.name
        tokenizer = self._service.tokenizer
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]}
        route = "chat/completions"
        if tokenizer is not None and not tokenizer.has_chat_template:
            route, asked = "completions", {"prompt": "Hello"}
        lines += [
            f"Serving {name} at {url} (contexts up to {self._plan.model.max_context} tokens). Try:",
            f"  curl {url}/v1/{route} -H 'Content-Type: application/json' \\",
            f"    -d '{json.dumps({'model': name, **asked})}'",
        ]
        return "\n".join(lines)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first drains, the second cuts answers off and says so in them, the third is rude."""
        if not self._stop.is_set():
            log.info("%s: no new requests; a second signal cuts answers off", number.name)
            self._stop.set()
        elif self.cut_by is None:
            log.info("%s again: answers are cut off", number.name)
            self.cut_by = number
        else:
            self._client.kill()
            os._exit(128 + number)

    async def _drain(self) -> None:
        """Lets answers finish for as long as the plan says, then cuts them off."""
        self._service.drain_start_s = time.monotonic()
        deadline_s = self._service.drain_start_s + self._plan.server.drain_timeout_s
        while self._service.num_answers and time.monotonic() < deadline_s and self.cut_by is None:
            await asyncio.sleep(0.02)
        if self._service.num_answers:
            log.warning("the drain is over: answers cut off: %d", self._service.num_answers)
            self._client.cut_off()
