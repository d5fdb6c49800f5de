"""Each engine advances on its own clock while the other is busy, as the round log shows."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dualpace import Output, SamplingParams
from tests.e2e.conftest import Serve

pytestmark = pytest.mark.alone

Rounds = Callable[[], list[dict[str, Any]]]
Record = dict[str, Any]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """As wide as SmolLM2, so that computing takes longer than scheduling, and less deep."""
    path = tmp_path / "config.json"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 10,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 1000,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    path.write_text(json.dumps(config))
    return f"random:{path}"


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def most_inside_one(outer: list[Record], inner: list[Record]) -> int:
    """Rounds of `inner` that began and ended within one round of `outer`, at most."""
    return max(
        sum(o["t"] <= i["t"] and i["t"] + i["duration"] <= o["t"] + o["duration"] for i in inner)
        for o in outer
    )


def split(rounds: list[Record]) -> tuple[list[Record], list[Record]]:
    return [r for r in rounds if r["engine"] == "gpu"], [r for r in rounds if r["engine"] == "cpu"]


def generate_beside(
    llm: Any, first: tuple[Any, Any], engine: str, others: tuple[Any, Any]
) -> tuple[Output, list[Output]]:
    """The answer to `first`, and those to `others`, asked once `engine` decodes the first."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(llm.generate, *first)
        while llm.stats()["tokens"].get(engine, 0) < 2:
            time.sleep(0.01)
        rest = llm.generate(*others)
        return answer.result()[0], rest


def test_a_host_resident_answer_advances_while_the_accelerator_prefills(
    serve: Serve, rounds: Rounds, model: str
) -> None:
    prompts = [[i] * 400 for i in range(1, 4)]
    with serve(model, **{"kv.gpu_blocks": 1}) as llm:
        answer, _ = generate_beside(
            llm, ([[7] * 40], greedy(100)), "cpu", (prompts, [greedy(1)] * len(prompts))
        )
    assert answer.tokens_by_engine == {"gpu": 1, "cpu": 99}
    gpu, cpu = split(rounds())
    assert most_inside_one([r for r in gpu if r["prefill_cpu"]], cpu) >= 3


def test_the_accelerator_decodes_while_the_host_iterates(
    serve: Serve, rounds: Rounds, model: str
) -> None:
    # The first answer needs all of the accelerator's memory; few others fit beside it.
    settings = {"kv.gpu_blocks": 10, "kv.output_estimate": "declared"}
    prompts = [[i] * 90 for i in range(1, 13)]
    with serve(model, **settings) as llm:
        answer, rest = generate_beside(
            llm, ([[3] * 20], greedy(140)), "gpu", (prompts, [greedy(8)] * len(prompts))
        )
    assert answer.tokens_by_engine == {"gpu": 140, "cpu": 0}
    assert sum(output.tokens_by_engine["cpu"] for output in rest) > 40
    gpu, cpu = split(rounds())
    assert most_inside_one(cpu, [r for r in gpu if not r["prefill_cpu"]]) >= 2
