"""Every failure as OpenAI's clients expect it: `{"error": {message, type, param, code}}`."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Route

from dualpace.graphs.chat import ChatError
from dualpace.runtime.engine_client import EngineGone, RequestGivenUp, RequestRefused, ShuttingDown
from dualpace.runtime.sampling_params import InvalidParameter

_SHOWN = 100  # characters of a path in a sentence, and of a parameter's name
_LONGEST = 2000  # characters of a sentence: some quote names or schemas of clients


class APIError(Exception):
    """A request that ends with `status` and a sentence for the client's user."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(_quotable(message, _LONGEST))
        self.status = status
        self.param = param if param is None else _quotable(param, _SHOWN)
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        if self.status == 503:
            headers = {"Retry-After": "1"}
        return JSONResponse(self.body(), self.status, headers)


def _quotable(text: str, most: int) -> str:
    """Half a surrogate pair, quoted from a request, could not be sent back."""
    text = text if len(text) <= most else f"{text[:most]}..."
    return text.encode(errors="replace").decode()


def as_api_error(error: Exception) -> APIError:
    """The answer to a client for anything that can go wrong with its request."""
    match error:
        case APIError():
            return error
        case InvalidParameter():
            too_long = error.param.startswith("prompt") and "context" in str(error)
            code = "context_length_exceeded" if too_long else "invalid_value"
            return APIError(400, str(error), error.param, code)
        case ChatError():
            text = str(error)
            return APIError(400, f"{text[:1].upper()}{text[1:]}.", "messages", "invalid_value")
        case RequestRefused(is_busy=True):
            return APIError(503, str(error), error.param, "busy")
        case RequestRefused():
            code = "request_refused" if error.param == "prompt" else "invalid_value"
            return APIError(400, str(error), error.param, code)
        case RequestGivenUp():
            return APIError(500, f"The request was given up: {error}.", code="engine_error")
        case ShuttingDown():
            return APIError(503, f"The request was cut off: {error}.", code="shutting_down")
        case EngineGone():
            return APIError(503, f"The request was given up: {error}.", code="engine_gone")
        case HTTPException():
            return APIError(error.status_code, str(error.detail))
        case _:
            return APIError(500, "The server met an error of its own; its log says more.")


def install(app: FastAPI) -> None:
    """Makes every route of `app` answer errors in this form."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def no_route(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path: str = request.scope["path"]
        if error.status_code == 404:
            return _no_route(path, routes(app)).response()
        takes = (error.headers or {}).get("Allow", "another method")
        text = f"{path} takes {takes}, not {request.method}."
        return APIError(405, text, None, "method_not_allowed").response(error.headers)

    for kind in (
        APIError,
        InvalidParameter,
        ChatError,
        RequestRefused,
        RequestGivenUp,
        EngineGone,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, answer)
    for status in (404, 405):
        app.add_exception_handler(status, no_route)


def routes(app: FastAPI) -> dict[str, list[str]]:
    """The methods of each path that `app` answers, but HEAD."""
    found: dict[str, list[str]] = {}
    for route in app.routes:
        if isinstance(route, Route):
            methods = sorted((route.methods or set()) - {"HEAD"})
            found.setdefault(route.path.replace("{model:path}", "MODEL"), []).extend(methods)
    return found


def _no_route(path: str, there: Mapping[str, Sequence[str]]) -> APIError:
    near = [each for each in there if each.endswith(path.rstrip("/")) and path.strip("/")]
    near = near or difflib.get_close_matches(path, there, 1, 0.75)
    hint = f": did you mean {near[0]}?" if near else "."
    every = ", ".join(f"{' '.join(methods)} {each}" for each, methods in there.items())
    text = f"This server has no route {path[:_SHOWN]}{hint} It has {every}."
    return APIError(404, text, None, "no_such_route")
