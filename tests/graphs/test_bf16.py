"""bf16 is as good as the reference's own bf16, over 2,048 positions of prose: its best tokens agree
with float32 as often, and its distributions are as near.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dualpace.cpu.isa import has_avx512
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.load import load_weights
from dualpace.graphs.source import Source
from dualpace.graphs.tokenizer import Tokenizer
from tests.graphs.reference import hf_logits, run_logits

WINDOW, WINDOWS = 256, 8
PROSE = Path(__file__).parents[1] / "data" / "prose.txt"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_avx512(), reason="bf16 arithmetic is emulated, minutes a pass"),
]


@pytest.fixture(scope="module")
def windows(smollm2_tokenizer: Tokenizer) -> list[list[int]]:
    ids = smollm2_tokenizer.encode(PROSE.read_text())
    assert len(ids) >= WINDOW * WINDOWS >= 2000
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(WINDOWS)]


@pytest.fixture(scope="module")
def exact(hf_smollm2: Any, windows: list[list[int]]) -> list[Tensor]:
    """The reference in float32."""
    return [hf_logits(hf_smollm2, ids) for ids in windows]


def judge(exact: list[Tensor], rounded: list[Tensor]) -> tuple[float, float]:
    """(share of positions whose best token is the exact one, mean KL from exact to rounded)."""
    agree, divergence = 0, 0.0
    for ours, truth in zip(rounded, exact, strict=True):
        agree += int((ours.argmax(-1) == truth.argmax(-1)).sum())
        p, q = truth.float().log_softmax(-1), ours.float().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum())
    count = sum(len(truth) for truth in exact)
    return agree / count, divergence / count


@pytest.fixture(scope="module")
def theirs(
    hf_smollm2_folder: Path, windows: list[list[int]], exact: list[Tensor]
) -> tuple[float, float]:
    model = AutoModelForCausalLM.from_pretrained(hf_smollm2_folder, dtype=torch.bfloat16).eval()
    return judge(exact, [hf_logits(model, ids) for ids in windows])


@pytest.mark.parametrize("backend", ["eager", "packed", "inductor-packed"])
def test_bf16_is_as_near_to_float32_as_the_references(
    backend: str,
    smollm2: Source,
    windows: list[list[int]],
    exact: list[Tensor],
    theirs: tuple[float, float],
) -> None:
    stages = GraphCache().build(
        smollm2.spec,
        load_weights(smollm2, torch.bfloat16),
        backend=backend,
        buckets=[WINDOW],
        max_context=WINDOW,
    )
    agree, divergence = judge(
        exact, [run_logits(stages, smollm2.spec.num_layers, ids) for ids in windows]
    )
    print(f"{backend}: top-1 {agree:.4f}, KL {divergence:.5f}; reference {theirs}")
    assert agree >= theirs[0] - 0.005
    assert divergence <= 1.2 * theirs[1]
