"""Parameters that edit logits, through the real engine: where a request is sampled changes no token
of it, and each parameter does what it says."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dualpace import SamplingParams
from tests.e2e.conftest import Serve
from tests.e2e.crowd import PROMPTS, TIGHT

Rounds = Callable[[], list[dict[str, Any]]]
EVERYTHING: dict[str, Any] = {
    "seed": 5,
    "max_tokens": 28,
    "min_tokens": 12,
    "min_p": 0.02,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {7: 5.0, 9: -100.0},
}
CROWD = PROMPTS[:8]
MIXED = [SamplingParams(temperature=0.8 * (i % 2), **EVERYTHING) for i in range(len(CROWD))]


def test_tokens_are_the_same_wherever_they_are_sampled(
    serve: Serve, rounds: Rounds, tmp_path: Path
) -> None:
    calm_log = {"runtime.round_log": str(tmp_path / "calm.jsonl")}
    with serve(**{"kv.gpu_blocks": 256}, **calm_log) as llm:
        calm = [output.token_ids for output in llm.generate(CROWD, MIXED)]
        assert_each_parameter_does_something(llm)
    # So few may wait on the host that its tier is full, whatever the pace: some must come back.
    few = {"kv.gpu_blocks": 14, "cpu.max_batch_size": 2, "cpu.max_waiting": 2}
    with serve(**TIGHT["dualpace"] | few) as llm:
        outputs = llm.generate(CROWD, MIXED)
        stats = llm.stats()
    assert [output.token_ids for output in outputs] == calm
    assert any(0 < o.tokens_by_engine["cpu"] < len(o.token_ids) for o in outputs)
    assert stats["compiles_after_ready"] == 0
    log = rounds()
    assert any(r["swap_out"] for r in log) and any(r["swap_in"] for r in log)
    assert any(r["route"] == "FUSED_ASSIST" for r in log)


def assert_each_parameter_does_something(llm: Any) -> None:
    """Of one prompt's greedy answers, side by side."""
    prompt, greedy = [1, 2, 3, 4] * 4, {"temperature": 0.0, "max_tokens": 24}

    def answers(*asked: dict[str, Any]) -> list[list[int]]:
        params = [SamplingParams(**greedy | {"ignore_eos": True} | each) for each in asked]
        return [output.token_ids for output in llm.generate([prompt] * len(asked), params)]

    (plain,) = answers({})
    (usual, times), *_ = Counter(plain).most_common(1)
    assert times > 2, "the model repeats itself"
    never, always, few, stopped, later, drawn, *penalised = answers(
        {"logit_bias": {usual: -100}},
        {"logit_bias": {usual: 100}},
        {"allowed_token_ids": [3, 5]},
        {"stop_token_ids": [usual]},
        {"stop_token_ids": [usual], "min_tokens": 20, "ignore_eos": False},
        {"temperature": 2.0, "seed": 1, "min_p": 1.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 3.0},
    )
    assert usual not in never and set(always) == {usual} and set(few) <= {3, 5}
    assert stopped == plain[: plain.index(usual) + 1]
    assert len(later) >= 20 and usual not in later[:20]
    assert drawn == plain  # nothing is left but the best
    for answer in penalised:
        assert len(set(answer)) > len(set(plain))
