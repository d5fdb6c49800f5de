"""The server's routes in front of an engine that a test has started already, and OpenAI's client
before them; no socket between."""

from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import openai

from dualpace.runtime.server.app import build_app
from dualpace.runtime.server.service import Service

Talk = Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]]


def ask(llm: Any, talk: Talk) -> Any:
    """What `talk` makes of a client of `llm`'s engine, on the loop that the engine's client has."""
    service = Service(llm._client)
    service.tokenizer = llm._tokenizer
    transport = httpx.ASGITransport(build_app(service))

    async def run() -> Any:
        http = httpx.AsyncClient(transport=transport, base_url="http://engine")
        url = "http://engine/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http) as client:
            return await talk(client)

    return llm._loop.run(run())
