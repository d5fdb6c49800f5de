"""Fixtures of the workers' tests: a small model, plans, rigs and the reference."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dualpace.runtime.plan import Plan
from dualpace.runtime.worker.copies import CopyEngine
from dualpace.settings.resolve import resolve
from tests.runtime.worker.reference import Reference
from tests.runtime.worker.rig import (
    GPU_BLOCKS,
    HOST_BLOCKS,
    LAYERS,
    HeldCopies,
    Rig,
    WildCopies,
)
from tests.runtime.worker.talks import Talk
from tests.tiny_settings import settings


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with grouped heads."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def make_plan(model_file: Path) -> Callable[..., Plan]:
    def make(*overrides: str) -> Plan:
        config = settings(
            f"model.source=random:{model_file}",
            "model.dtype=float32",
            "compile.backend=eager",
            f"kv.gpu_blocks={GPU_BLOCKS - 1}",
            f"kv.host_blocks={HOST_BLOCKS - 1}",
            "gpu.max_batched_tokens=256",
            "gpu.token_limit=256",
            "gpu.max_batch_size=16",
            "cpu.max_batch_size=16",
            "assist.post_attention_limit=0",
            "assist.post_layer_limit=0",
            *overrides,
        )
        return resolve(config)

    return make


@pytest.fixture
def make_rig(make_plan: Callable[..., Plan]) -> Iterator[Callable[..., Rig]]:
    torch.set_num_threads(1)
    rigs = []

    engines = {"held": HeldCopies, "wild": WildCopies, "good": CopyEngine}

    def make(*overrides: str, copies: str = "good", start_gpu: bool = True) -> Rig:
        rigs.append(Rig(make_plan(*overrides), engines[copies], start_gpu))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture(scope="session")
def reference(model_file: Path) -> Reference:
    torch.set_num_threads(1)
    return Reference(f"random:{model_file}")


@pytest.fixture(scope="session")
def talks() -> Callable[..., list[Talk]]:
    """Requests with random prompts of these lengths."""

    def make(*lengths: int, temperature: float = 0.0) -> list[Talk]:
        mix = random.Random(sum(lengths))
        return [
            Talk(i + 1, [mix.randrange(300) for _ in range(n)], temperature)
            for i, n in enumerate(lengths)
        ]

    return make
