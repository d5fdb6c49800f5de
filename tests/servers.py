"""What tests that start processes share: patience, and a port that stays theirs."""

import socket

PATIENCE_S = 200.0  # only a failing test waits so long, however busy the machine is


def reserve_port() -> tuple[socket.socket, int]:
    """A port of 127.0.0.1 that nobody else is given while the socket is open; a server that reuses
    addresses can listen at it all the same."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, holder.getsockname()[1]
