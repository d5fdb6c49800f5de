"""Refuses requests whose body is larger than any that could be answered, before it is read whole.

A proxy in front may do so too; without one a client could fill the server's memory.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualpace.runtime.server.errors import APIError

MAX_BODY_BYTES = 32 * 2**20  # a list of 1,024 prompts of some thousand tokens each


class BodyLimit:
    """ASGI middleware: 413 by the announced length, or once so much has come."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refusal().response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._refusal()
            return message

        await self._app(scope, counted, send)

    def _refusal(self) -> APIError:
        limit = f"{self._max_bytes // 2**20} MiB"
        return APIError(413, f"The body is larger than {limit}.", None, "body_too_large")
