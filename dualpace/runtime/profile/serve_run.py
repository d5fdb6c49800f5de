"""`python -m dualpace.runtime.profile.serve_run`: serves a fixed load, prints tokens/s by engine.

Reads an order from its input; never started by a person.
"""

import json
import sys
import time

from dualpace.llm import LLM
from dualpace.runtime.plan import Plan
from dualpace.runtime.sampling_params import SamplingParams


def main() -> None:
    order = json.loads(sys.stdin.read())
    plan = Plan.from_json(order["plan"])
    vocab, length = plan.model.vocab, order["prompt_len"]
    prompts = [
        [(7919 * (request + 1) * (i + 1)) % vocab for i in range(length)]
        for request in range(order["num_requests"])
    ]
    params = SamplingParams(
        temperature=order["temperature"], max_tokens=order["output_len"], ignore_eos=True, seed=0
    )
    with LLM.from_plan(plan) as llm:
        llm.generate(prompts[:2], params, progress=False)  # warm
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - started
    engines = outputs[0].tokens_by_engine
    rates = {e: sum(o.tokens_by_engine[e] for o in outputs) / seconds for e in engines}
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
