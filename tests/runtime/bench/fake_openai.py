"""An OpenAI-compatible server that computes nothing: answers at a pace, or not yet when told so.

`python fake_openai.py --port N [...]` is also what tests start in a peer's place; options that a
real peer takes are ignored.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web


@dataclass
class Behaviour:
    """No token leaves before `crowd` requests have come, and the first to come holds all others up
    for `busy_s`; `pair` sends two tokens an event, `tail` an event without a token at the end."""

    token_s: float = 0.001
    crowd: int = 0
    busy_s: float = 0.0
    pair: bool = False
    tail: bool = False
    status: int = 200
    short_by: int = 0
    engines: bool = False
    end: bytes | None = None  # in the place of the event with token counts


class FakeOpenAI:
    """`bodies` are the requests as they came, `running` how many were answered at once at most."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.bodies: list[dict[str, Any]] = []
        self.arrived_s: list[float] = []
        self.left = 0
        self.now_running = self.running = 0
        self.began_s = 0.0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def models(self, request: web.Request) -> web.Response:
        cards = [{"id": "fake", "max_model_len": 4096}, {"id": "other"}]
        return web.json_response({"data": cards})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        behaviour, body = self.behaviour, await request.json()
        self.bodies.append(body)
        self.arrived_s.append(asyncio.get_running_loop().time())
        if behaviour.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=behaviour.status)
        if len(self.bodies) == 1:
            time.sleep(behaviour.busy_s)
        self.now_running += 1
        self.running = max(self.running, self.now_running)
        try:
            return await self.stream(request, body)
        except ConnectionResetError:
            self.left += 1
            raise
        finally:
            self.now_running -= 1

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        behaviour = self.behaviour
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"] - behaviour.short_by
        for _ in range(0, count, 2 if behaviour.pair else 1):
            await asyncio.sleep(behaviour.token_s)
            while len(self.bodies) < behaviour.crowd:
                await asyncio.sleep(0.001)
            await response.write(event({"choices": [{"index": 0, "text": 'a "choices": [{'}]}))
        if behaviour.tail:
            await response.write(event({"choices": [{"text": "", "finish_reason": "length"}]}))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        end: dict[str, Any] = {"choices": [], "usage": usage}
        if behaviour.engines:
            end["dualpace"] = {"tokens_by_engine": {"gpu": count - 1, "cpu": 1}}
        await response.write((behaviour.end or event(end)) + b"data: [DONE]\n\n")
        return response


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def serving(fake: FakeOpenAI) -> AsyncIterator[str]:
    """Its address, for as long as it serves."""
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.began_s = asyncio.get_running_loop().time()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    options, _ = parser.parse_known_args()
    web.run_app(FakeOpenAI().app(), host="127.0.0.1", port=options.port, print=lambda *_: None)


if __name__ == "__main__":
    main()
