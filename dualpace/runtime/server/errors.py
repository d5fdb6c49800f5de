"""Every failure as OpenAI's clients expect it: `{"error": {message, type, param, code}}`."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from dualpace.graphs.chat import ChatError
from dualpace.runtime.engine_client import EngineGone, RequestRefused
from dualpace.runtime.sampling_params import InvalidParameter

# What a field of several types takes; the validator alone would complain once for each of them.
_EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of text parts",
}
# By the validator's kind of complaint.
_TYPES = {
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of usual size",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "model_attributes_type": "an object",
}
_ROUTES = (
    "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, /health, /ready, /metrics"
)


class APIError(Exception):
    """A request that ends with `status` and a sentence for the client's user."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        # Half a surrogate pair, quoted from a request, could not be sent back.
        super().__init__(message.encode(errors="replace").decode())
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 503 else None
        return JSONResponse(self.body(), self.status, headers)


def as_api_error(error: Exception) -> APIError:
    """The answer to a client for anything that can go wrong with its request."""
    match error:
        case APIError():
            return error
        case InvalidParameter():
            too_long = error.param == "prompt" and "context" in str(error)
            code = "context_length_exceeded" if too_long else "invalid_value"
            return APIError(400, str(error), error.param, code)
        case ChatError():
            return APIError(400, f"{error}.", "messages", "invalid_value")
        case RequestRefused():
            return APIError(400, str(error), "prompt", "request_refused")
        case EngineGone():
            return APIError(503, f"The request was given up: {error}.", code="engine_gone")
        case RequestValidationError():
            return _of_validation(error)
        case HTTPException(status_code=400):
            return _of_unreadable(error.__cause__)
        case HTTPException(status_code=404 | 405):
            return APIError(error.status_code, f"This server has {_ROUTES}.", None, "no_such_route")
        case HTTPException():
            return APIError(error.status_code, str(error.detail))
        case _:
            return APIError(500, "The server met an error of its own; its log says more.")


def _of_validation(error: RequestValidationError) -> APIError:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"][1:]]  # without "body"
    if not location and first["type"] in ("missing", "model_attributes_type"):
        text = "The body must be a JSON object, sent with Content-Type: application/json."
        return APIError(400, text, None, "json")
    if first["type"] == "json_invalid":
        return APIError(400, f"The body is not valid JSON: {first['ctx']['error']}.", None, "json")
    if first["type"] == "missing":
        param = ".".join(location)
        return APIError(400, f"'{param}' is missing.", param, "missing_required_parameter")
    for depth, part in enumerate(location):
        if part in _EXPECTED:
            param = ".".join(location[: depth + 1])
            return APIError(400, f"'{param}' must be {_EXPECTED[part]}.", param, "invalid_type")
    param = ".".join(location) or "body"
    expected = _TYPES.get(first["type"])
    text = f"'{param}' must be {expected}." if expected else f"'{param}': {first['msg']}."
    return APIError(400, text, param, "invalid_type")


def _of_unreadable(cause: BaseException | None) -> APIError:
    """A body that stopped the JSON parser before it could say where."""
    match cause:
        case APIError():  # of the body's size, met while reading it
            return cause
        case UnicodeDecodeError():
            byte = cause.object[cause.start]
            text = f"The body is not UTF-8 text: byte {cause.start} is {byte:#04x}."
        case RecursionError():
            text = "The body is nested too deeply."
        case _:
            text = "The body cannot be read as JSON."
    return APIError(400, text, None, "json")


def install(app: FastAPI) -> None:
    """Makes every route of `app` answer errors in this form."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (
        APIError,
        InvalidParameter,
        ChatError,
        RequestRefused,
        EngineGone,
        RequestValidationError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, answer)
