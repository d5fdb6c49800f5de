"""Each engine advances on its own clock while the other is busy, as the round log shows."""

from collections.abc import Callable
from typing import Any

from dualpace import SamplingParams
from tests.e2e.conftest import Serve

Rounds = Callable[[], list[dict[str, Any]]]
Record = dict[str, Any]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def most_inside_one(outer: list[Record], inner: list[Record]) -> int:
    """Rounds of `inner` that began and ended within one round of `outer`, at most."""
    return max(
        sum(o["t"] <= i["t"] and i["t"] + i["duration"] <= o["t"] + o["duration"] for i in inner)
        for o in outer
    )


def split(rounds: list[Record]) -> tuple[list[Record], list[Record]]:
    return tuple([r for r in rounds if r["engine"] == e] for e in ("gpu", "cpu"))  # type: ignore[return-value]


def test_a_host_resident_answer_advances_while_the_accelerator_prefills(
    serve: Serve, rounds: Rounds
) -> None:
    answer, prompts = [7] * 40, [[i] * 400 for i in range(1, 4)]
    with serve("random:smollm2-135m", **{"kv.gpu_blocks": 1, "model.max_context": 1024}) as llm:
        params = [greedy(60), *(greedy(1) for _ in prompts)]
        outputs = llm.generate([answer, *prompts], params)
    assert outputs[0].tokens_by_engine == {"gpu": 1, "cpu": 59}
    gpu, cpu = split(rounds())
    prefills = [r for r in gpu if len(r["prefill_cpu"]) and outputs[0] and 1 not in r["batch"]]
    assert prefills, "no prefill ran beside the answer"
    assert most_inside_one(prefills, cpu) >= 3


def test_the_accelerator_decodes_while_the_host_iterates(serve: Serve, rounds: Rounds) -> None:
    settings = {"kv.gpu_blocks": 6, "kv.output_estimate": "declared", "model.max_context": 1024}
    with serve("random:smollm2-135m", **settings) as llm:
        # The first stays on the accelerator; the others do not fit beside it.
        prompts = [[3] * 20, *([i] * 90 for i in range(1, 13))]
        outputs = llm.generate(prompts, [greedy(70), *(greedy(8) for _ in prompts[1:])])
    assert outputs[0].tokens_by_engine["gpu"] == 70
    gpu, cpu = split(rounds())
    decodes = [r for r in gpu if not r["prefill_cpu"] and not r["prefill_gpu"]]
    assert most_inside_one(cpu, decodes) >= 2
