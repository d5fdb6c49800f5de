"""The routes. Each is a few lines: what it answers is decided in `service`."""

import time
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from dualpace.runtime.server import errors
from dualpace.runtime.server.body import read
from dualpace.runtime.server.body_limit import BodyLimit
from dualpace.runtime.server.http_metrics import CountRequests
from dualpace.runtime.server.openai import ChatRequest, CompletionRequest
from dualpace.runtime.server.service import Service
from dualpace.runtime.server.streams import Answer
from dualpace.runtime.server.tokens import DetokenizeRequest, TokenizeRequest
from dualpace.version import version


def build_app(service: Service) -> FastAPI:
    # No redirects: their address would be what the client says that this host is called.
    app = FastAPI(title="DualPace", version=version(), openapi_url=None, redirect_slashes=False)
    errors.install(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(CountRequests, registry=service.metrics.registry)
    created = int(time.time())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return Answer(await service.completion(await read(request, CompletionRequest)))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return Answer(await service.chat(await read(request, ChatRequest)))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        return await service.tokenize(await read(request, TokenizeRequest))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        return await service.detokenize(await read(request, DetokenizeRequest))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        service.admit(None)
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        service.admit(model)
        return model_card()

    def model_card() -> dict[str, Any]:
        return {
            "id": service.model,
            "object": "model",
            "created": created,
            "owned_by": "dualpace",
            "max_model_len": service.client.plan.model.max_context,
        }

    @app.api_route("/ping", methods=["GET", "HEAD", "POST"])
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, str]:
        """The process lives and its loop turns; whether it can serve is /ready's answer."""
        return {"status": "alive"}

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        """200 while requests sent now will be answered, else 503 and what is in the way."""
        now = await service.condition()
        if now.status == "ready":
            return JSONResponse({"status": "ready"})
        seconds = round(time.monotonic() - now.since_s, 1)
        body = {"status": now.status, "phase": now.phase, "seconds": seconds}
        return JSONResponse(body, 200 if now.status == "degraded" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await service.metrics.render()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def show_version() -> dict[str, str | None]:
        """And the measured profile in use: runs compare only where it is the same."""
        return {"version": version(), "profile": service.client.plan.profile.public_name}

    return app
