"""A server process with a fake engine behind it, on a port of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.servers import PATIENCE_S, reserve_port

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the fakes; the processes that tests start find them the same way


class FakeServer:
    """Starts on construction; `wait_ready` before use."""

    def __init__(self, source: str = "fake", drain_timeout_s: float = 5.0) -> None:
        from plans import small_plan

        self._holder, self.port = reserve_port()
        plan = small_plan(source, self.port, drain_timeout_s)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "run_fake.py"), plan.to_json()],
            env={**os.environ, "PYTHONPATH": str(HERE)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def wait_for(self, path: str, status: int = 200) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if (response := self.http.get(path)).status_code == status:
                    return response
            except httpx.TransportError:
                assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, f"{path} does not become {status}"
            time.sleep(0.02)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def metric(self, sample: str) -> float:
        """The value of one line of /metrics, named with its labels."""
        for line in self.http.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        raise KeyError(sample)

    def end(self) -> tuple[int, str, str]:
        """(exit status, stdout, stderr), once it ends by itself."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self._holder.close()


@pytest.fixture(scope="session")
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    try:
        server.wait_for("/ready")
        yield server
    finally:
        server.close()


@pytest.fixture
def client(server: FakeServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture
def start_server() -> Iterator[type[FakeServer]]:
    """Starts servers of a test's own; all end with the test."""
    started: list[FakeServer] = []

    class Started(FakeServer):
        def __init__(self, source: str = "fake", drain_timeout_s: float = 5.0) -> None:
            started.append(self)
            super().__init__(source, drain_timeout_s)

    yield Started
    for server in started:
        server.close()
