"""Two GPU ranks serve what one does, with one CPU rank and with two, KV moving and assists served
between stages."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dualpace import LLM
from tests.e2e.test_tensor_parallel import TIGHT, answers
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


@pytest.fixture(scope="module")
def of_one(model: str) -> list[list[int]]:
    with served(model, **{"kv.gpu_blocks": 512, "kv.host_blocks": 200}) as llm:
        return answers(llm)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cpu_ranks", [1, 2])
def test_ranks_change_no_token(cpu_ranks: int, model: str, of_one: list[list[int]]) -> None:
    with served(model, **TIGHT, **{"gpu.tp": 2, "cpu.tp": cpu_ranks}) as llm:
        assert answers(llm) == of_one
        stats = llm.stats()
    assert stats["events"]["swap_out"] and stats["events"]["prefill_cpu"]
    assert stats["assist_calls"] > 0 and stats["compiles_after_ready"] == 0
