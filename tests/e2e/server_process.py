"""A server as a user starts it, in a session of its own, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.e2e.live import slow_workers
from tests.servers import PATIENCE_S, reserve_port

ROOT = Path(__file__).parents[2]


def by_script(settings: list[str]) -> list[str]:
    """The command that serves a tiny model."""
    tiny = ("model=tiny_random", "model.dtype=float32", "compile=eager")
    return [sys.executable, "scripts/serve.py", "+hw=cpu", *tiny, *settings]


def by_make(settings: list[str]) -> list[str]:
    """The one that a newcomer is shown."""
    return ["env", "-u", "PYTHONPATH", "make", "serve", "ARGS=" + " ".join(settings)]


class Server:
    """A process group with a server in it, ready to answer."""

    def __init__(
        self, log: Path, command: Callable[[list[str]], list[str]], **settings: Any
    ) -> None:
        self._holder, self.port = reserve_port()
        self.log = log
        given = {"server.port": self.port, **slow_workers(), **settings}
        self.process = subprocess.Popen(
            command([f"{key}={value}" for key, value in given.items()]),
            cwd=ROOT,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"
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
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
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

    def interrupt(self) -> None:
        """As a terminal does, which tells the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """The server alone, which can tell nobody; not who started it."""
        (server,) = [p for p in (self.process.pid, *self.family) if "scripts/serve.py" in words(p)]
        os.kill(server, signal.SIGKILL)

    def end_under_load(self, end: Callable[[], None], max_tokens: int) -> int:
        """The exit status after `end()`, while it streams to six clients; no process is left
        then."""
        streams = []
        for _ in range(6):
            begun = threading.Event()
            thread = threading.Thread(target=self._stream_until_cut, args=(max_tokens, begun))
            thread.start()
            streams.append((thread, begun))
        assert all(begun.wait(PATIENCE_S) for _, begun in streams)
        end()
        status = self.process.wait(PATIENCE_S)
        for thread, _ in streams:
            thread.join()
        self._wait_gone()
        return status

    def _stream_until_cut(self, max_tokens: int, begun: threading.Event) -> None:
        asked = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        url = f"{self.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=asked, timeout=PATIENCE_S) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        begun.set()
        except httpx.TransportError:
            pass  # the server went away, as it was told to

    def _wait_gone(self) -> None:
        """Every process of the family has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while left := [pid for pid in self.family if runs(pid)]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._holder.close()


def words(pid: int) -> list[str]:
    """Its command."""
    return psutil.Process(pid).cmdline()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
