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
    "max_tokens": 32,
    "min_tokens": 12,
    "min_p": 0.02,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {7: 5.0, 9: -100.0},
}
CROWD = PROMPTS[:10]
MIXED = [SamplingParams(temperature=0.8 * (i % 2), **EVERYTHING) for i in range(len(CROWD))]


def test_tokens_are_the_same_wherever_they_are_sampled(
    serve: Serve, rounds: Rounds, tmp_path: Path
) -> None:
    calm_log = {"runtime.round_log": str(tmp_path / "calm.jsonl")}
    with serve(**{"kv.gpu_blocks": 256}, **calm_log) as llm:
        calm = [output.token_ids for output in llm.generate(CROWD, MIXED)]
        assert_each_parameter_does_something(llm)
    with serve(**TIGHT["dualpace"] | {"kv.gpu_blocks": 22}) as llm:
        outputs = llm.generate(CROWD, MIXED)
        stats = llm.stats()
    assert [output.token_ids for output in outputs] == calm
    assert any(0 < o.tokens_by_engine["cpu"] < len(o.token_ids) for o in outputs)
    assert stats["compiles_after_ready"] == 0
    log = rounds()
    assert any(r["swap_out"] for r in log) and any(r["swap_in"] for r in log)
    assert any(r["route"] == "FUSED_ASSIST" for r in log)


def assert_each_parameter_does_something(llm: Any) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 24}

    def answer(**asked: Any) -> list[int]:
        (output,) = llm.generate([1, 2, 3, 4] * 4, SamplingParams(**greedy | asked))
        return output.token_ids

    plain = answer(ignore_eos=True)
    (usual, _), *_ = Counter(plain).most_common(1)
    assert plain.count(usual) > 2, "the model repeats itself"
    assert answer(ignore_eos=True, logit_bias={usual: -100}).count(usual) == 0
    assert set(answer(ignore_eos=True, logit_bias={usual: 100})) == {usual}
    assert set(answer(ignore_eos=True, allowed_token_ids=[3, 5])) <= {3, 5}
    for name, value in (
        ("presence_penalty", 2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 3.0),
    ):
        assert len(set(answer(ignore_eos=True, **{name: value}))) > len(set(plain)), name
    first = plain.index(usual)
    assert answer(ignore_eos=True, stop_token_ids=[usual]) == plain[: first + 1]
    later = answer(stop_token_ids=[usual], min_tokens=20)
    assert len(later) >= 20 and usual not in later[:20]
    drawn = answer(ignore_eos=True, temperature=2.0, seed=1, min_p=1.0)
    assert drawn == plain  # nothing is left but the best
