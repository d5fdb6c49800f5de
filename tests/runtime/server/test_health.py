"""/ready's answer for an engine that has started: what an operator must hear of, and when."""

import asyncio
import logging
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dualpace.runtime.engine_client import EngineGone
from dualpace.runtime.server import life as life_of_server
from dualpace.runtime.server import service as service_of_server
from dualpace.runtime.server.errors import APIError
from dualpace.runtime.server.health import Condition, condition
from tests.servers import PATIENCE_S


class Client:
    """An engine's client that says what it is told to."""

    def __init__(self, *, requests: int = 0, quiet_s: float = 0.0, **worker: Any) -> None:
        self.start_s = time.monotonic() - 60
        self.phases = [(3.0, "starting the engine process"), (50.0, "gpu: importing torch")]
        self.num_requests = requests
        self.progress_s = time.monotonic() - quiet_s
        self.failure: Exception | None = None
        self.has_started = self.is_ready = True
        well = {"ready": True, "phase": "ready", "pids": []}
        self.workers = {"gpu": well, "cpu": {**well, **worker}}

    async def stats(self, timeout_s: float) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        return {"workers": self.workers}


def seen(client: Client) -> Condition:
    return asyncio.run(condition(client))  # type: ignore[arg-type]


def test_workers_at_work_are_ready() -> None:
    assert seen(Client(requests=3)).status == "ready"
    assert seen(Client(quiet_s=9999)).status == "ready"  # nobody has asked for anything


def test_a_worker_that_starts_again_is_said_so() -> None:
    found = seen(Client(ready=False, phase="importing torch"))
    assert (found.status, found.phase) == ("degraded", "cpu worker: importing torch")
    client = Client()
    client.workers["gpu"] = {**client.workers["gpu"], "ready": False, "phase": "importing torch"}
    found = seen(client)
    assert (found.status, found.phase) == ("restarting", "gpu worker: importing torch")
    assert time.monotonic() - found.since_s < 60  # since then, not since the first start


def test_a_worker_that_is_stopped_is_noticed() -> None:
    """It is no less alive, and an idle engine waits for nothing from it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        client = Client(pids=[process.pid])
        assert seen(client).status == "ready"
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_S
        while seen(client).status == "ready":
            assert time.monotonic() < deadline
        found = seen(client)
        process.send_signal(signal.SIGCONT)
        process.kill()
    assert (found.status, found.phase) == ("stalled", "the cpu worker is stopped by a signal")
    assert seen(client).status == "ready"  # one that has ended is the engine's to notice


def test_requests_that_get_no_token_for_long_are_a_stall() -> None:
    found = seen(Client(requests=2, quiet_s=301))
    assert (found.status, found.phase) == ("stalled", "2 requests wait and no token comes")


@pytest.mark.parametrize(
    ("failure", "phase"),
    [(TimeoutError(), "the engine process does not answer"), (EngineGone("it died"), "it died")],
)
def test_an_engine_that_does_not_answer(failure: Exception, phase: str) -> None:
    client = Client()
    client.failure = failure
    found = seen(client)
    assert (found.status, found.phase) == ("stalled", phase)


def test_what_a_request_hears_of_a_start_and_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its code, whichever of engine and tokenizer is late."""
    monkeypatch.setattr(service_of_server, "Metrics", lambda client: None)
    client: Any = Client()
    client.phase = "gpu: importing torch"
    service = service_of_server.Service(client)

    def heard() -> tuple[str, str | None]:
        with pytest.raises(APIError) as caught:
            service.admit(None)
        assert caught.value.status == 503
        return str(caught.value), caught.value.code

    client.has_started = client.is_ready = False
    assert heard() == ("The server is starting: gpu: importing torch.", "starting")
    client.has_started = client.is_ready = True
    assert heard() == ("The server is starting: loading tokenizer.", "starting")
    assert asyncio.run(service.condition()).phase == "loading tokenizer"
    service.tokenizer = SimpleNamespace()  # type: ignore[assignment]
    assert service.admit(None) is service.tokenizer
    client.is_ready, client.failure = False, EngineGone("it died")
    assert heard() == ("The server ends: its engine is gone.", "engine_gone")
    assert asyncio.run(service.condition()).status == "stalled"


def test_a_long_phase_of_the_start_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(life_of_server, "_SILENCE_S", 0.01)
    client = Client()
    client.phases.append((51.0, "cpu: preparing stages"))
    life = SimpleNamespace(_client=client)

    async def wait_a_little() -> None:
        saying = asyncio.create_task(life_of_server.Life._say_that_it_goes_on(life))  # type: ignore[arg-type]
        while not caplog.records:
            await asyncio.sleep(0.01)
        saying.cancel()

    with caplog.at_level(logging.INFO):
        asyncio.run(wait_a_little())
    assert "still: gpu: importing torch; cpu: preparing stages" in caplog.messages[0]
