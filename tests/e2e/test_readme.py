"""What the README shows a newcomer first works as it stands, but for the port; a server that is
killed leaves nothing behind.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.server_process import ROOT, Server, by_make
from tests.servers import PATIENCE_S

MODEL = "SmolLM2-135M-Instruct"
HBM_TOKENS = 160
LONG = "I like to know things. " * (HBM_TOKENS // 5)  # goes to the host
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Spain"]},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
        "is_capital": {"type": "boolean"},
    },
    "required": ["name", "country", "rivers", "is_capital"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv").exists(), reason="this checkout is not set up by make"
)


def code_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, no_memory_left: None) -> Iterator[Server]:
    """`make serve`; its accelerator has no room for a long question, its host takes no gigabytes,
    and nothing is compiled beside the tests. The last of them ends it."""
    settings = {
        "kv.gpu_blocks": HBM_TOKENS // 16,
        "kv.host_blocks": 256,
        "compile.backend": "eager",
    }
    with Server(tmp_path_factory.mktemp("readme") / "log", by_make, **settings) as server:
        yield server


def test_the_commands_are_shown() -> None:
    assert any("make serve" in block and "make test" in block for block in code_blocks("sh"))


def test_curl_answers(server: Server) -> None:
    (command,) = [block for block in code_blocks("sh") if "curl" in block]
    shown = command.replace(":8000", f":{server.port}")
    done = subprocess.run(
        ["bash", "-ec", shown], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "Paris" in done.stdout, done.stdout + done.stderr


def test_the_python_client_answers(server: Server) -> None:
    (program,) = [block for block in code_blocks("python") if "OpenAI(" in block]
    shown = program.replace(":8000", f":{server.port}")
    done = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "Paris" in done.stdout, done.stdout + done.stderr


def test_the_offline_example_answers() -> None:
    (program,) = [block for block in code_blocks("python") if "LLM(" in block]
    small = 'LLM("random:tiny", compile={"backend": "eager"}, kv={"host_blocks": 64})'
    shown = program.replace('LLM("smollm2")', small)
    assert shown != program  # of thin layers: what it says does not matter here
    done = subprocess.run(
        [sys.executable, "-c", shown], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0 and "{'gpu': 16, 'cpu': 0}" in done.stdout, done.stderr


def test_answers_keep_to_their_form_on_both_engines(server: Server) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused")

    def ask(preface: str = "", **asked: Any) -> Any:
        content = f"{preface}Describe Paris as JSON: name, country, rivers, is_capital."
        messages: Any = [{"role": "user", "content": content}]
        return client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=300, seed=1, **asked
        )

    city = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    words = {"structured_outputs": {"choice": ["xylophone", "zither"]}}
    with ThreadPoolExecutor(3) as pool:
        greedy = pool.submit(ask, response_format=city, temperature=0)
        drawn = pool.submit(ask, LONG, response_format=city, temperature=1.0)
        word = pool.submit(ask, extra_body=words, temperature=0, logprobs=True, top_logprobs=1)
    for answer in (greedy.result(), drawn.result()):
        assert answer.choices[0].finish_reason == "stop"
        value = json.loads(answer.choices[0].message.content)
        assert list(value) == CITY["required"] and value["country"] in ("France", "Spain")
        assert len(value["name"]) <= 20 and isinstance(value["is_capital"], bool)
        assert len(value["rivers"]) <= 2 and all(len(river) <= 12 for river in value["rivers"])
    assert drawn.result().model_extra["dualpace"]["tokens_by_engine"]["cpu"] > 10
    (choice,) = word.result().choices
    assert choice.message.content in ("xylophone", "zither") and choice.finish_reason == "stop"
    first = choice.logprobs.content[0]  # as the model has them, whatever the form forbids
    assert first.logprob < first.top_logprobs[0].logprob - 2


def test_many_clients_are_answered_by_both_engines(server: Server) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused")

    def ask(topic: str, preface: str = "") -> dict[str, int]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"{preface}Tell me about {topic}."}],
            max_tokens=24,
            temperature=0,
        )
        text = answer.choices[0].message.content
        assert text and topic.rstrip("s").lower() in text.lower(), text
        extra = answer.model_extra
        assert extra is not None
        return dict(extra["dualpace"]["tokens_by_engine"])

    alone = ask("whales")
    assert alone["gpu"] > 20 and alone["cpu"] == 0
    topics = ["cats", "volcanoes", "music"]
    with ThreadPoolExecutor(len(topics) + 1) as pool:
        long = pool.submit(ask, "gold", LONG)
        list(pool.map(ask, topics))
    assert long.result()["cpu"] > 20 and long.result()["gpu"] == 1


def test_one_that_is_killed_under_load_leaves_nothing_behind(server: Server) -> None:
    """But `make`, which says so."""
    assert server.end_under_load(server.kill, max_tokens=400) == 2
    assert "Traceback" not in server.log.read_text()
