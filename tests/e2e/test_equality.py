"""Wherever a request lives and however its stages are routed, its tokens are the reference's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualpace import SamplingParams
from dualpace.runtime.schedule.check import check_log
from tests.e2e.conftest import Judge, Serve
from tests.e2e.prompts import PROMPTS

NUM_TOKENS = 24
Rounds = Callable[[], list[dict[str, Any]]]

# What is set, and what must have happened for the comparison to prove anything.
SITUATIONS: dict[str, tuple[dict[str, Any], Callable[[list[dict[str, Any]]], bool]]] = {
    "all accelerator-resident": (
        {"kv.gpu_blocks": 512},
        lambda rounds: all(r["engine"] == "gpu" and not r["swap_out"] for r in rounds),
    ),
    "gpu_only, prompts in chunks": (
        {"policy": "gpu_only", "kv.gpu_blocks": 40, "gpu.token_limit": 32},
        lambda rounds: any(r["preempted"] for r in rounds),
    ),
    "all Prefill-to-CPU, every stage on the CPU": (
        {"kv.gpu_blocks": 1, "kv.output_estimate": "declared"},
        lambda rounds: {r["route"] for r in rounds if r["engine"] == "cpu"} == {"FULL_CPU"},
    ),
    "all Prefill-to-CPU, post-layer assisted": (
        {
            "kv.gpu_blocks": 1,
            "kv.output_estimate": "declared",
            "assist.post_attention_limit": 256,
            "assist.post_layer_limit": 0,
        },
        lambda rounds: {r["route"] for r in rounds if r["engine"] == "cpu"} == {"SPLIT_FINAL"},
    ),
    "all Prefill-to-CPU, every post-attention assisted": (
        {
            "kv.gpu_blocks": 1,
            "kv.output_estimate": "declared",
            "assist.post_attention_limit": 0,
            "assist.post_layer_limit": 0,
        },
        lambda rounds: {r["route"] for r in rounds if r["engine"] == "cpu"} == {"FUSED_ASSIST"},
    ),
    "swapped out and in while generating": (
        {"kv.gpu_blocks": 24, "cpu.max_batch_size": 2, "cpu.max_waiting": 2},
        lambda rounds: any(r["swap_out"] for r in rounds) and any(r["swap_in"] for r in rounds),
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_greedy_tokens_equal_the_reference(
    situation: str,
    serve: Serve,
    rounds: Rounds,
    judge: Judge,
    hf_smollm2_folder: Path,
) -> None:
    settings, happened = SITUATIONS[situation]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with serve(str(hf_smollm2_folder), **settings) as llm:
        outputs = llm.generate(PROMPTS, params)
        stats = llm.stats()
        eos = llm.plan.model.eos_token_ids
    undecided = 0
    for text, output in zip(PROMPTS, outputs, strict=True):
        judgement = judge(output.prompt_token_ids, output.token_ids)
        assert judgement.wrong is None, f"{situation}: {text!r} -> {output.text!r}, {judgement}"
        undecided += judgement.decided < len(output.token_ids)
        assert (output.token_ids[-1] in eos) == (output.finish_reason == "stop")
        assert len(output.token_ids) == NUM_TOKENS or output.finish_reason == "stop"
    assert undecided == 0, "ties: the comparison means less than it should"
    assert stats["gpu_blocks"]["used"] == stats["host_blocks"]["used"] == 0
    log = rounds()
    assert check_log(log) == []
    assert happened(log), f"{situation}: did not happen"
