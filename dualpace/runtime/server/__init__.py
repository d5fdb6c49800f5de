"""The HTTP front: OpenAI's routes, health, metrics, and the life of the server process."""

from dualpace.runtime.server.lifecycle import serve

__all__ = ["serve"]
