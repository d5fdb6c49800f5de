"""Several ranks a side, real processes: tokens are those of one, whoever moves KV or assists, and
whichever rank dies.
"""

from collections.abc import Callable
from typing import Any

import pytest

from dualpace import SamplingParams
from dualpace.runtime.schedule.check import check_log
from tests.e2e.conftest import Mortal, Serve, settled

Rounds = Callable[[], list[dict[str, Any]]]

# Too little HBM for all until the first have ended, so that KV moves both ways.
TIGHT = {
    "kv.gpu_blocks": 30,
    "kv.host_blocks": 200,
    "cpu.max_batch_size": 4,
    # CPU batches of 1, 2 and more rows take one route each
    "assist.post_attention_limit": 2,
    "assist.post_layer_limit": 1,
}
PROMPTS = [[i + 1] * (5 + 7 * i) for i in range(12)]
# Logits that are edited: of some without their tokens, of few by what has come.
PLAIN: dict[str, Any] = {"seed": 5, "ignore_eos": True}
EDITED = PLAIN | {"min_p": 0.05, "logit_bias": {3: 1.5, 9: -100.0}}
COUNTED = EDITED | {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
ASKED = [PLAIN, PLAIN, EDITED, EDITED] * 2 + [PLAIN, PLAIN, PLAIN, COUNTED]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), max_tokens=max_tokens, **asked)
    for i, (max_tokens, asked) in enumerate(zip([20] * 6 + [80] * 6, ASKED, strict=True))
]
# Longer than all of HBM, so the host decodes them: three, then two, then one.
LONG_PROMPTS = [[i + 1] * (490 + 7 * i) for i in range(3)]
LONG_PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=max_tokens, **COUNTED)
    for temperature, max_tokens in ((0.8, 12), (0.0, 24), (0.0, 36))
]


@pytest.fixture(scope="module")
def of_one() -> list[list[int]]:
    """The answers of one rank a side with room for everything."""
    from dualpace import LLM

    settings = {
        "model.dtype": "float32",
        "compile.backend": "eager",
        "kv.gpu_blocks": 512,
        "kv.host_blocks": 64,
    }
    with LLM("random:tiny", **settings) as llm:
        return answers(llm)


def answers(llm: Any) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS) + llm.generate(LONG_PROMPTS, LONG_PARAMS)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    "ranks", [{"gpu.tp": 2, "cpu.tp": 1}, {"gpu.tp": 1, "cpu.tp": 2, "cpu.all_reduce": "gloo"}]
)
def test_ranks_change_no_token(
    ranks: dict[str, Any], serve: Serve, rounds: Rounds, of_one: list[list[int]]
) -> None:
    with serve(**TIGHT, **ranks) as llm:
        assert answers(llm) == of_one
        stats = settled(llm)
    assert_all_ways_were_taken(rounds(), stats)


def test_ranks_that_die_cost_no_answer(
    serve: Serve, rounds: Rounds, of_one: list[list[int]], mortal: Mortal
) -> None:
    dying = mortal({"gpu-1": 40, "cpu-1": 10})
    with serve(**TIGHT, **dying, **{"gpu.tp": 2, "cpu.tp": 2}) as llm:
        before = llm.stats()["workers"]
        assert answers(llm) == of_one
        stats = settled(llm)
    for role, after in stats["workers"].items():
        assert after["restarts"] == 1
        assert len(after["pids"]) == 2 and not set(before[role]["pids"]) & set(after["pids"])
    assert_all_ways_were_taken(rounds(), stats)


def assert_all_ways_were_taken(log: list[dict[str, Any]], stats: dict[str, Any]) -> None:
    assert check_log(log) == []
    assert all(stats["events"][way] for way in ("prefill_gpu", "prefill_cpu"))
    assert all(stats["events"][way] for way in ("swap_out", "swap_in"))
    assert set(stats["routes"]) == {"FULL_CPU", "SPLIT_FINAL", "FUSED_ASSIST"}
    assert stats["compiles_after_ready"] == 0
