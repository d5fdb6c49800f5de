"""What the README's first screen shows a newcomer works as it stands, but for the port."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.live import slow_workers
from tests.servers import PATIENCE_S, reserve_port

ROOT = Path(__file__).parents[2]
MODEL = "SmolLM2-135M-Instruct"
HBM_TOKENS = 160

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv").exists(), reason="this checkout is not set up by make"
)


def code_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """`make serve`, ready; its accelerator has no room for a long question."""
    holder, port = reserve_port()
    pace = " ".join(f"{key}={value}" for key, value in slow_workers().items())
    log = tmp_path_factory.mktemp("readme") / "log"
    process = subprocess.Popen(
        ["make", "serve", f"ARGS=server.port={port} kv.gpu_blocks={HBM_TOKENS // 16} {pace}"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                break
        except httpx.TransportError:
            pass  # not bound yet
        time.sleep(0.2)
    yield port
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(PATIENCE_S)
    holder.close()


def test_the_commands_are_shown() -> None:
    assert any("make serve" in block and "make test" in block for block in code_blocks("sh"))


def test_curl_answers(port: int) -> None:
    (command,) = [block for block in code_blocks("sh") if "curl" in block]
    shown = command.replace(":8000", f":{port}")
    done = subprocess.run(
        ["bash", "-ec", shown], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "Paris" in done.stdout, done.stdout + done.stderr


def test_the_python_client_answers(port: int) -> None:
    (program,) = [block for block in code_blocks("python") if "OpenAI(" in block]
    shown = program.replace(":8000", f":{port}")
    done = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "Paris" in done.stdout, done.stdout + done.stderr


def test_the_offline_example_answers() -> None:
    (program,) = [block for block in code_blocks("python") if "LLM(" in block]
    shown = program.replace('LLM("smollm2")', 'LLM("random:tiny", compile={"backend": "eager"})')
    assert shown != program  # of thin layers: what it says does not matter here
    done = subprocess.run(
        [sys.executable, "-c", shown], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0 and "{'gpu': 16, 'cpu': 0}" in done.stdout, done.stderr


def test_many_clients_are_answered_by_both_engines(port: int) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused")

    def ask(topic: str, preface: str = "") -> dict[str, int]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"{preface}Tell me about {topic}."}],
            max_tokens=48,
            temperature=0,
        )
        text = answer.choices[0].message.content
        assert text and topic.rstrip("s").lower() in text.lower(), text
        extra = answer.model_extra
        assert extra is not None
        return dict(extra["dualpace"]["tokens_by_engine"])

    alone = ask("whales")
    assert alone["gpu"] > 40 and alone["cpu"] == 0
    topics = ["cats", "volcanoes", "Rome", "music"]
    with ThreadPoolExecutor(len(topics) + 1) as pool:
        long = pool.submit(ask, "gold", "I like to know things. " * (HBM_TOKENS // 5))
        list(pool.map(ask, topics))
    assert long.result()["cpu"] > 40 and long.result()["gpu"] == 1
