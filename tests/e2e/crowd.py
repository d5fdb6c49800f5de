"""Requests that HBM has no room for all at once, with settings and a way to ask by which KV moves
both ways and every route is taken, whatever the pace of either side.

With the host's worker stopped, what the host holds stays there. So HBM fills, and who must leave it
goes to the host; and when all that it can keep have ended, it takes back who waits there.
"""

from collections import Counter
from typing import Any

from dualpace import LLM, Output, SamplingParams
from tests.e2e.live import ask, is_idle, stats_of, stopped, wait_until
from tests.servers import PATIENCE_S

# Logits that are edited: of some without their tokens, of few by what has come.
PLAIN: dict[str, Any] = {"seed": 5, "ignore_eos": True}
EDITED = PLAIN | {"min_p": 0.05, "logit_bias": {3: 1.5, 9: -100.0}}
COUNTED = EDITED | {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
ASKED = [PLAIN, PLAIN, EDITED, EDITED, PLAIN, PLAIN, EDITED, PLAIN, COUNTED]

PROMPTS = [[i + 1] * (5 + 7 * i) for i in range(len(ASKED))]
PARAMS = [
    SamplingParams(
        temperature=0.8 * (i % 2),
        max_tokens=20 if i < 4 else 40,
        logprobs=None if i % 3 else 2,
        **asked,
    )
    for i, asked in enumerate(ASKED)
]
# Longer than all of HBM, so the host decodes them: three, then two, then one.
LONG_PROMPTS = [[i + 1] * (200 + 7 * i) for i in range(3)]
LONG_PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), max_tokens=12 * (i + 1), **COUNTED) for i in range(3)
]

HBM_BLOCKS = 12
TIGHT: dict[str, Any] = {
    "kv.gpu_blocks": HBM_BLOCKS,
    "kv.output_estimate": "declared",
    "kv.check_moves": True,
    "policy.host_admission": "always",
    "cpu.max_batch_size": 4,
    # CPU batches of 1, 2 and more rows take one route each.
    "assist.post_attention_limit": 2,
    "assist.post_layer_limit": 1,
}
# Host rows in lockstep always pay by the times that `worker` tells.
NEO: dict[str, Any] = {
    "policy": "neo",
    "kv.gpu_blocks": HBM_BLOCKS,
    "kv.output_estimate": "declared",
    "kv.check_moves": True,
}


def ask_all(llm: LLM) -> list[Output]:
    """Both kinds, one after the other."""
    return llm.generate(PROMPTS, PARAMS) + llm.generate(LONG_PROMPTS, LONG_PARAMS)


def make_move(llm: LLM) -> list[Output]:
    """As `ask_all`, of a `TIGHT` engine; asserts that every way has been taken."""
    before = stats_of(llm)
    moves = Counter(before["events"])

    def moved(stats: dict[str, Any]) -> bool:
        return all(stats["events"].get(way, 0) > moves[way] for way in ("swap_out", "swap_in"))

    def all_on_the_host(stats: dict[str, Any]) -> bool:
        return stats["cpu_running"] + stats["cpu_waiting"] == len(LONG_PROMPTS) and stats[
            "transfers"
        ] == copies + len(LONG_PROMPTS)

    with stopped(llm, "cpu"):
        crowd = ask(llm, PROMPTS, PARAMS)
        wait_until(llm, moved)
    outputs = crowd.result(PATIENCE_S)
    copies = wait_until(llm, is_idle)["transfers"]
    with stopped(llm, "cpu"):
        long = ask(llm, LONG_PROMPTS, LONG_PARAMS)
        wait_until(llm, all_on_the_host)
    outputs += long.result(PATIENCE_S)
    after = wait_until(llm, is_idle)
    for way in ("prefill_gpu", "prefill_cpu", "swap_out", "swap_in"):
        assert after["events"][way] > moves[way], way
    assert after["blocks_checked"] - before["blocks_checked"] > len(PROMPTS) + len(LONG_PROMPTS)
    routes = Counter(after["routes"]) - Counter(before["routes"])
    assert routes.keys() == {"FULL_CPU", "SPLIT_FINAL", "FUSED_ASSIST"}
    assert after["compiles_after_ready"] == 0
    return outputs
