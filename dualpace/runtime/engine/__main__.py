"""The engine process: `python -m dualpace.runtime.engine --lifeline FD --parent PID`."""

import argparse
import asyncio
import logging
import os
import socket
import sys

from dualpace.errors import ConfigError
from dualpace.runtime.connection import Connection
from dualpace.runtime.engine.engine import LLMEngine
from dualpace.runtime.messages import Failed, Hello
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import become_child, receive, send


async def serve(plan: Plan, sock: socket.socket) -> int:
    """Runs an engine for the owner at the other end of `sock`; returns the exit status. The owner
    hears of what its user can fix, also where the engine cannot be made."""
    owner: Connection

    try:
        engine = LLMEngine(plan, lambda message: owner.send(message))
    except ConfigError as error:
        send(sock, Failed(str(error), 1))
        return 1
    owner = await Connection.open(sock, engine.on_message, engine.end)
    try:
        return await engine.run()
    except ConfigError as error:
        owner.send(Failed(str(error), 1))
        return 1
    finally:
        owner.close()
        await asyncio.sleep(0)  # lets the transport flush and close


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    become_child(arguments.parent, ignore_signals=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname).1s engine: %(message)s",
        datefmt="%H:%M:%S",
    )

    sock = socket.socket(fileno=arguments.lifeline)
    hello = receive(sock)
    assert isinstance(hello, Hello)
    plan = Plan.from_json(hello.plan)
    if plan.runtime.cores:
        os.sched_setaffinity(0, plan.runtime.cores)
    return asyncio.run(serve(plan, sock))


if __name__ == "__main__":
    sys.exit(main())
