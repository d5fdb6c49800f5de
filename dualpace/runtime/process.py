"""Starting a process that cannot outlive its parent, with descriptors, an environment and a
message to begin with.

The parent keeps one end of a socket pair, the *lifeline*: the child reads its plan from it and
ends when it closes; SIGKILL of the parent is covered by PR_SET_PDEATHSIG as well.
"""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dualpace.runtime.wire import Message, decode

PEER_LOST = 3  # exit status of a process that only follows another's end

_LENGTH = struct.Struct("<q")
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM)


def start_process(
    module: str, arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs `python -m module --lifeline FD --parent PID *arguments`, which inherits `fds`. Ctrl-C
    reaches it once it calls `become_child`, not while it imports.

    Call it from the main thread: the kernel ties PDEATHSIG to the thread that forks.
    """
    ours, theirs = socket.socketpair()
    link = ["--lifeline", str(theirs.fileno()), "--parent", str(os.getpid())]
    command = [sys.executable, "-m", module, *link, *arguments]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # inherited
    try:
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno(), *fds],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def become_child(parent_pid: int, ignore_signals: bool) -> None:
    """First thing in a child: die with the parent, and leave SIGINT and SIGTERM to it if asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # under python -O too
    assert not refused
    if os.getppid() != parent_pid:  # it died before the request
        os._exit(1)
    if ignore_signals:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, a debugger) holds the process; False for one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"  # the name before it may hold anything


def ending(status: int) -> str:
    """How a process ended, by its exit status: `ended with status 1`."""
    if status >= 0:
        return f"ended with status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by signal {names.get(-status, -status)}"


def frame(message: Message) -> bytearray:
    """`message` with its length in front, as it travels through a socket."""
    buffer = bytearray(_LENGTH.size + message.nbytes())
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    message.encode_into(memoryview(buffer)[_LENGTH.size :])
    return buffer


def send(sock: socket.socket, message: Message) -> None:
    """Blocking send of one message."""
    sock.sendall(frame(message))


def receive(sock: socket.socket) -> Message:
    """Blocking receive of one message. Raises EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size))
    return decode(_read_exactly(sock, length))


def _read_exactly(sock: socket.socket, nbytes: int) -> bytearray:
    data = bytearray()
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise EOFError("the other side closed the socket")
        data += piece
    return data


class FrameReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            messages.append(decode(self._data[_LENGTH.size : end]))
            del self._data[:end]
        return messages
