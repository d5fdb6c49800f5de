"""The life of the server process: bind, start the engine, serve (`life`), end with a reason."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable

from dualpace.errors import ConfigError
from dualpace.runtime.engine_client import ENGINE_MODULE, EngineClient, EngineGone, StartFailed
from dualpace.runtime.generation import Tokenizer, load_tokenizer
from dualpace.runtime.plan import Plan


def serve(
    plan: Plan,
    engine_module: str = ENGINE_MODULE,
    load: Callable[[str], Tokenizer] = load_tokenizer,
) -> None:
    """Serves until SIGTERM or SIGINT, then returns. Call it from the main thread.

    `load` makes the tokenizer from `plan.model.source`. Raises ConfigError for what the user can
    fix, SystemExit with a reason when the engine fails, and SystemExit with the shell's status when
    a second signal cut answers off.
    """
    sock = bind(plan.server.host, plan.server.port)
    client = EngineClient.launch(plan, engine_module)
    try:
        if plan.server.cores:
            os.sched_setaffinity(0, plan.server.cores)
        from dualpace.runtime.server.life import Life  # takes half a second: the engine starts

        life = Life(client, sock, load)
        asyncio.run(life.run())
    except StartFailed as error:
        raise (ConfigError if error.user_error else SystemExit)(str(error)) from None
    except EngineGone as error:
        raise SystemExit(f"The server ends: {error}.") from None
    finally:
        if client.process.poll() is None:
            client.kill()
            client.process.wait()
    if life.cut_by is not None:
        raise SystemExit(128 + life.cut_by)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; clients that come during the start wait in its queue. Raises
    ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()  # else another server that starts now could bind it as well
    except OSError as error:
        raise ConfigError(_why_not(host, port, error)) from None
    return sock


def _why_not(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"server.host={host} is no address of this machine ({error.strerror}): use 127.0.0.1, "
            f"or 0.0.0.0 for all that it has."
        )
    remedy = "stop who uses it, or choose another (0: any that is free)"
    if error.errno == errno.EACCES:
        remedy = "choose one from 1024 on, which takes no privileges"
    return f"server.port={port} on {host} cannot be used ({error.strerror}): {remedy}."
