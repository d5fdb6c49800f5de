"""Wherever a request lives and however its stages are routed, its tokens are the reference's, and
so are their log-probabilities."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualpace import SamplingParams
from dualpace.runtime.schedule.check import check_log
from tests.e2e.conftest import Judge, Serve, settled
from tests.e2e.logprobs import check_output, check_routes
from tests.e2e.prompts import PROMPTS

NUM_TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
LAYERS = 3  # of a model cut short, where what a token means does not matter
Record = dict[str, Any]
Rounds = Callable[[], list[Record]]


def rows_by_route(log: list[Record]) -> Counter[str]:
    rows: Counter[str] = Counter()
    for record in log:
        rows[record["route"]] += len(record["batch"])
    return rows


@pytest.fixture(scope="module")
def short_model(hf_smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of SmolLM2, between its table and its head."""
    folder = tmp_path_factory.mktemp("short")
    for file in hf_smollm2_folder.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((hf_smollm2_folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    return folder


@pytest.fixture(scope="module")
def short_judge(short_model: Path) -> Judge:
    from transformers import AutoModelForCausalLM

    return Judge(AutoModelForCausalLM.from_pretrained(short_model, dtype="float32").eval())


def check(llm: Any, judge: Judge, prompts: list[str]) -> None:
    """Generates and compares; every block has come back after."""
    eos = llm.plan.model.eos_token_ids
    undecided = 0
    asked = [(None, 0, 5)[place % 3] for place in range(len(prompts))]
    outputs = llm.generate(prompts, [replace(PARAMS, logprobs=best) for best in asked])
    for text, output, best in zip(prompts, outputs, asked, strict=True):
        judgement = judge(output.prompt_token_ids, output.token_ids)
        check_output(output, best, judgement.logprobs)
        assert judgement.wrong is None, f"{text!r} -> {output.text!r}, {judgement}"
        undecided += judgement.decided < len(output.token_ids)
        assert (output.token_ids[-1] in eos) == (output.finish_reason == "stop")
        assert len(output.token_ids) == NUM_TOKENS or output.finish_reason == "stop"
    assert undecided == 0, "ties: the comparison means less than it should"
    settled(llm)


def test_the_whole_model_swapped_out_and_in_while_generating(
    serve: Serve, rounds: Rounds, judge: Judge, hf_smollm2_folder: Path
) -> None:
    settings = {"kv.gpu_blocks": 14, "cpu.max_batch_size": 2, "cpu.max_waiting": 2}
    with serve(str(hf_smollm2_folder), **settings) as llm:
        check(llm, judge, PROMPTS[::2])
    log = rounds()
    assert check_log(log) == []
    assert any(r["swap_out"] for r in log) and any(r["swap_in"] for r in log)


def test_all_accelerator_resident_with_prompts_in_chunks(
    serve: Serve, rounds: Rounds, short_judge: Judge, short_model: Path
) -> None:
    settings = {"policy": "gpu_only", "kv.gpu_blocks": 40, "gpu.token_limit": 32}
    with serve(str(short_model), **settings) as llm:
        check(llm, short_judge, PROMPTS)
    log = rounds()
    assert check_log(log) == []
    assert {r["engine"] for r in log} == {"gpu"}
    assert any(r["preempted"] for r in log)


def test_host_resident_by_every_route(
    serve: Serve, rounds: Rounds, short_judge: Judge, short_model: Path
) -> None:
    settings = {
        "kv.gpu_blocks": 1,
        "kv.output_estimate": "declared",
        "assist.post_layer_limit": 3,
        "assist.post_attention_limit": 6,
    }
    with serve(str(short_model), **settings) as llm:
        long = sorted(PROMPTS, key=len, reverse=True)
        for prompts in (long[:3], long[3:9], long[9:]):
            check(llm, short_judge, prompts)
        check_routes(llm, short_judge)
    log = rounds()
    assert check_log(log) == []
    rows = rows_by_route([r for r in log if r["engine"] == "cpu"])
    assert rows.keys() == {"FULL_CPU", "SPLIT_FINAL", "FUSED_ASSIST"}
    assert min(rows.values()) >= 3 * (NUM_TOKENS - 1), rows
