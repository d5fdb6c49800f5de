"""The server process from its first moment to its exit status."""

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import openai
import psutil
import pytest
from plans import small_plan

from dualpace.errors import ConfigError
from dualpace.runtime.server import serve
from tests.servers import PATIENCE_S


def children(server):
    return psutil.Process(server.process.pid).children(recursive=True)


def assert_no_process_is_left(processes):
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []


class Asking(threading.Thread):
    """A stream in the background: its text so far, and how it ended."""

    def __init__(self, server, prompt, begins_with=""):
        """Returns when as much of the text has come."""
        super().__init__()
        self.client = server.client()
        self.prompt = prompt
        self.text = ""
        self.error = None
        self.begins_with = begins_with
        self.has_begun = threading.Event()
        self.start()
        assert self.has_begun.wait(PATIENCE_S) and self.error is None, self.error

    def run(self):
        try:
            stream = self.client.completions.create(
                model="tiny", prompt=self.prompt, max_tokens=400, stream=True
            )
            for chunk in stream:
                self.text += chunk.choices[0].text
                if self.text.startswith(self.begins_with):
                    self.has_begun.set()
        except openai.OpenAIError as error:
            self.error = error
        self.has_begun.set()


def test_it_answers_while_it_starts(start_server, tmp_path):
    server = start_server(f"fake:{tmp_path / 'go'}")
    assert server.wait_for("/health").json() == {"status": "alive"}
    ready = server.wait_for("/ready", 503).json()
    assert ready["status"] == "starting" and ready["phase"]
    response = server.http.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 503 and "retry-after" in response.headers
    assert "starting" in response.json()["error"]["message"]
    assert server.http.get("/metrics").status_code == 200
    (tmp_path / "go").touch()
    server.wait_for("/ready")
    assert server.client().completions.create(model="tiny", prompt="hi").choices[0].text == "hi"
    server.process.terminate()
    status, out, _ = server.end()
    assert status == 0
    assert "ready after" in out and f"at {server.url}" in out
    assert "curl" in out and "/v1/chat/completions" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(start_server, number, tmp_path):
    server = start_server(drain_timeout_s=PATIENCE_S)
    server.wait_for("/ready")
    processes = children(server)
    prompt = f"until {tmp_path / 'go'}"
    asking = Asking(server, prompt)
    server.process.send_signal(number)
    server.wait_for("/ready", 503)
    ready = server.http.get("/ready").json()
    assert (ready["status"], ready["phase"]) == ("draining", "answers still running: 1")
    late = server.http.post("/v1/completions", json={"prompt": "late"})
    assert late.status_code == 503
    (tmp_path / "go").touch()
    asking.join()
    assert asking.error is None and asking.text == prompt
    assert server.end()[0] == 0
    assert_no_process_is_left(processes)


def test_a_drain_has_an_end(start_server):
    server = start_server(drain_timeout_s=0.2)
    server.wait_for("/ready")
    processes = children(server)
    asking = Asking(server, "stall for ever", begins_with="sta")
    server.process.terminate()
    asking.join()
    assert asking.text == "sta"
    assert "shutting down" in str(asking.error) and asking.error.code == "shutting_down"
    assert server.end()[0] == 0
    assert_no_process_is_left(processes)


def test_a_second_signal_ends_at_once(start_server):
    server = start_server(drain_timeout_s=PATIENCE_S)
    server.wait_for("/ready")
    processes = children(server)
    asking = Asking(server, "stall for ever")
    server.process.terminate()
    server.wait_for("/ready", 503)
    server.process.terminate()
    asking.join()
    assert asking.error.code == "shutting_down"  # the stream ends with a reason
    assert server.end()[0] == 128 + signal.SIGTERM
    assert_no_process_is_left(processes)


def test_a_signal_during_the_start(start_server, tmp_path):
    server = start_server(f"fake:{tmp_path / 'never'}")
    server.wait_for("/health")
    server.process.terminate()
    assert server.end()[0] == 0


@pytest.mark.parametrize("how", ["by itself", "killed"])
def test_the_server_ends_with_its_engine(start_server, how):
    server = start_server()
    server.wait_for("/ready")
    (engine,) = children(server)
    asking = Asking(server, "stall for ever")
    if how == "killed":
        engine.kill()
    else:
        with pytest.raises(openai.OpenAIError):
            server.client().completions.create(model="tiny", prompt="die now")
    status, _, err = server.end()
    assert status == 1
    assert ("SIGKILL" if how == "killed" else "status 3") in err.splitlines()[-1]
    asking.join()
    assert asking.error is not None


def test_an_engine_that_cannot_start(start_server):
    status, _, err = start_server("fake:user-error").end()
    assert status == 1
    assert err.splitlines()[-1] == "kv.host_blocks=9 is too much: lower it."
    status, _, err = start_server("fake:crash").end()
    assert status == 1 and "status 5" in err.splitlines()[-1]


def test_a_port_in_use_is_one_sentence(server):
    second = subprocess.run(
        [*server.process.args[:2], small_plan(port=server.port).to_json()],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert second.returncode == 1
    assert f"server.port={server.port}" in second.stderr and "Traceback" not in second.stderr


@pytest.mark.parametrize(
    ("source", "route", "answer"),
    [
        ("fake", "chat/completions", '"content": "Hello!"'),
        ("fake:no-template", "completions", '"text": "'),
    ],
)
def test_the_example_that_it_prints_is_answered(start_server, source, route, answer):
    server = start_server(source)
    printed = ""
    while "-d '" not in printed:
        printed += server.process.stdout.readline()
    line, body = printed.splitlines()[-2:]
    assert line.split()[:2] == ["curl", f"{server.url}/v1/{route}"]
    asked = json.loads(body.strip().removeprefix("-d '").removesuffix("'"))
    assert asked["model"] == "tiny" and ("messages" in asked) == (route != "completions")
    command = printed[printed.index("curl") :]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert answer in done.stdout


@pytest.mark.parametrize("host", ["192.0.2.1", "no host"])
def test_a_host_that_is_not_ours_is_said_before_anything_starts(host):
    plan = small_plan()
    plan = dataclasses.replace(plan, server=dataclasses.replace(plan.server, host=host))
    with pytest.raises(ConfigError, match=f"server.host={host} is no address of this machine"):
        serve(plan, engine_module="not_started")


def test_a_killed_server_leaves_no_orphan(start_server):
    server = start_server()
    server.wait_for("/ready")
    processes = children(server)
    assert processes
    server.process.kill()
    assert_no_process_is_left(processes)


def test_an_idle_server_sleeps(server):
    """Counted in processor time, so a busy machine does not matter; how long it takes to come to
    rest does not either."""
    process = psutil.Process(server.process.pid)
    deadline, used = time.monotonic() + PATIENCE_S, 1.0
    while used > 0.02:
        assert time.monotonic() < deadline, f"it uses {used:.2f} s of a second"
        before = sum(process.cpu_times()[:2])
        time.sleep(1.0)
        used = sum(process.cpu_times()[:2]) - before
