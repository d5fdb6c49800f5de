"""Two GPU ranks serve what one does, with one CPU rank and with two: KV moving and assists served
between stages, and host rows in lockstep.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dualpace import LLM, Output
from tests.e2e import crowd
from tests.e2e.live import Workers
from tests.gpu.test_worker import CONFIG

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this takes two GPUs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps({**CONFIG, "max_position_embeddings": 1024}))
    return f"random:{path}"


@contextmanager
def served(model: str, **settings: Any) -> Iterator[LLM]:
    common = {
        "model.dtype": "float32",
        "compile.backend": "eager",
        "gpu.device": "cuda",
        "gpu.max_batch_size": 16,
        "gpu.token_limit": 1024,
        "gpu.max_batched_tokens": 1024,
    }
    with LLM(model, **common, **settings) as llm:
        yield llm


@dataclass(frozen=True)
class Wanted:
    """Token ids by one GPU with room for all."""

    crowd: list[list[int]]
    long: list[list[int]]


@pytest.fixture(scope="module")
def of_one(model: str) -> Wanted:
    with served(model, **{"kv.gpu_blocks": 512, "kv.host_blocks": 200}) as llm:
        answers = tokens(crowd.ask_all(llm))
    count = len(crowd.PROMPTS)
    return Wanted(answers[:count], answers[count:])


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def assert_same(got: list[list[int]], wanted: list[list[int]]) -> None:
    """All but one, which a near tie of a random model's logits may split."""
    same = [a == b for a, b in zip(got, wanted, strict=True)]
    assert sum(same) >= len(wanted) - 1, same


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cpu_ranks", [1, 2])
def test_ranks_change_no_token(cpu_ranks: int, model: str, of_one: Wanted) -> None:
    ranks = {"kv.host_blocks": 200, "gpu.tp": 2, "cpu.tp": cpu_ranks}
    with served(model, **crowd.TIGHT, **ranks) as llm:
        assert_same(tokens(crowd.make_move(llm)), of_one.crowd + of_one.long)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cpu_ranks", [1, 2])
def test_ranks_in_lockstep_change_no_token(cpu_ranks: int, model: str, of_one: Wanted) -> None:
    tight = {**crowd.NEO, "kv.host_blocks": 400, "cpu.max_batch_size": 16}
    ranks = {"gpu.tp": 2, "cpu.tp": cpu_ranks}
    with served(model, **tight, **ranks, **Workers.settings) as llm:
        assert_same(tokens(llm.generate(crowd.PROMPTS, crowd.PARAMS)), of_one.crowd)
        stats = llm.stats()
    assert stats["tokens"]["cpu"] > 50 and stats["compiles_after_ready"] == 0
