"""A child gets its lifeline, and does not outlive its parent however that ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.messages import Phase
from dualpace.runtime.process import ending, receive, send, start_process
from dualpace.runtime.shared_memory import SharedRegion
from tests.servers import PATIENCE_S

CHILD = """
import argparse, os, signal, socket, sys
from dualpace.runtime.process import become_child, receive, send
from dualpace.runtime.messages import Phase
parser = argparse.ArgumentParser()
parser.add_argument("--lifeline", type=int)
parser.add_argument("--parent", type=int)
arguments = parser.parse_args()
for number in (signal.SIGINT, signal.SIGTERM):  # while it still imports
    os.kill(os.getpid(), number)
become_child(arguments.parent, ignore_signals=True)
sock = socket.socket(fileno=arguments.lifeline)
try:
    while True:
        send(sock, Phase(receive(sock).text + f" from {os.getpid()}"))
except EOFError:
    sys.exit(7)
"""

PARENT = """
import sys, time
from dualpace.runtime.process import start_process
process, lifeline = start_process("echo_child", [], [], {"PYTHONPATH": sys.argv[1]})
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def echo_child(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "echo_child.py").write_text(textwrap.dedent(CHILD))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def test_a_child_answers_and_ends_with_its_lifeline(echo_child: dict[str, str]) -> None:
    process, lifeline = start_process("echo_child", [], [], echo_child)
    send(lifeline, Phase("hello"))
    assert receive(lifeline) == Phase(f"hello from {process.pid}")
    os.kill(process.pid, signal.SIGTERM)  # of the whole group: left to the parent
    send(lifeline, Phase("still"))
    assert receive(lifeline) == Phase(f"still from {process.pid}")
    lifeline.close()
    assert process.wait(PATIENCE_S) == 7


def test_a_child_dies_with_a_killed_parent(echo_child: dict[str, str]) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, echo_child["PYTHONPATH"]], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + PATIENCE_S
    while _runs(child_pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_memory_that_is_not_there_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dualpace.runtime.shared_memory._GROWTH_S", 0.0)
    left = [2**40, 2**40, 0]  # runs out at the third step

    def available() -> int:
        return left.pop(0) if len(left) > 1 else left[0]

    with pytest.raises(ConfigError, match=r"^pool needs 1\.00 GiB of memory and only 0\.50 GiB"):
        SharedRegion.create("pool", 2**30, available)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "ended with status 0"),
        (7, "ended with status 7"),
        (-11, "was ended by signal SIGSEGV"),
        (-40, "was ended by signal 40"),  # a real-time signal has no name
    ],
)
def test_how_a_process_ended_is_said_by_name(status: int, said: str) -> None:
    assert ending(status) == said
