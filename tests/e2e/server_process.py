"""`scripts/serve.py` as a user starts it, in a session of its own, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.e2e.live import slow_workers
from tests.servers import PATIENCE_S, reserve_port

ROOT = Path(__file__).parents[2]
TINY = ("model=tiny_random", "model.dtype=float32", "compile=eager")


class Server:
    """A process group with a server in it, ready to answer."""

    def __init__(self, log: Path, *overrides: str) -> None:
        self._port, port = reserve_port()
        command = [sys.executable, "scripts/serve.py", "+hw=cpu", f"server.port={port}"]
        self._log = log
        self.process = subprocess.Popen(
            [
                *command,
                *TINY,
                *(f"{key}={value}" for key, value in slow_workers().items()),
                *overrides,
            ],
            cwd=ROOT,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.url = f"http://127.0.0.1:{port}"
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        self.note_family()

    def note_family(self) -> None:
        """The processes of now are those that `wait_gone` waits for."""
        self.family = [p.pid for p in psutil.Process(self.process.pid).children(recursive=True)]
        assert len(self.family) >= 3, "engine, GPU worker, CPU worker, perhaps builders of graphs"

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not bound yet
            time.sleep(0.1)

    def wait_ready_says(self, status: str) -> str | None:
        """The phase that /ready names once its status is this one."""
        deadline = time.monotonic() + PATIENCE_S
        while (body := httpx.get(f"{self.url}/ready").json())["status"] != status:
            assert time.monotonic() < deadline, body
            time.sleep(0.02)
        phase: str | None = body.get("phase")
        return phase

    def metric(self, name: str) -> dict[str, float]:
        """Labels -> value of one metric."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.startswith((name + "{", name + " "))]
        return {labels.removeprefix(name): float(value) for labels, value in found}

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def wait_gone(self) -> None:
        """Every process of the family has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while left := [pid for pid in self.family if runs(pid)]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.process.poll() is None:
            self.signal_group(signal.SIGKILL)
        self.process.wait()
        self._port.close()


def cmdline(pid: int) -> list[str]:
    return psutil.Process(pid).cmdline()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
