"""Counts HTTP requests by route, method and class of status, as vLLM's server does: its dashboards
take the share of 5xx from that. Knows nothing of what is asked."""

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PROBES = ("/health", "/ping", "/ready", "/metrics", "/version")  # would drown the others
# Clients may send any word as a method, and a label for each would stay for good.
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
_CLIENT_LEFT = 499  # as proxies call it: no fault of the server


class CountRequests:
    """ASGI middleware: `http_requests_total` in `registry`."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._count = Counter(
            "http_requests",
            "Answers by route, method and class of status, probes left out",
            ("handler", "method", "status"),
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        status = _CLIENT_LEFT  # unless an answer begins

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            route = scope.get("route")  # set where one was found
            handler = route.path if route is not None else "none"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._count.labels(handler, method, f"{status // 100}xx").inc()
