"""Nobody waits for ever, also while new requests keep coming; and deadlocks that random tests
once found.
"""

import random

import pytest

from dualpace.runtime.schedule import Limits, make_policy
from dualpace.runtime.schedule.estimate import Declared, Estimator, Quantile
from dualpace.runtime.schedule.host_admission import ProfiledAdmission
from tests.runtime.schedule.predictor import flat_times
from tests.runtime.schedule.world import World

POLICIES = {
    "paper": make_policy("dualpace"),
    "departing": make_policy(
        "dualpace", chunk_prompts=True, admission=ProfiledAdmission(flat_times(assist=0.5))
    ),
    "restless": make_policy("dualpace", chunk_prompts=True, migrate_every=1),
}
LONGEST_WAIT = 200  # fair cycles; the requests below need up to 40 tokens, a dozen run at a time


@pytest.mark.parametrize("estimator", [Declared(), Quantile(first=4, warmup=8, window=32)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_every_accepted_request_moves_within_bounded_time_under_constant_load(
    seed: int, policy: str, estimator: Estimator
) -> None:
    """One new request whenever fewer than three wait: the load never lets up."""
    rng = random.Random(seed)
    limits = Limits(gpu_rows=6, cpu_rows=4, soft_tokens=64, hard_tokens=128)
    world = World.make(POLICIES[policy], 16, 30, limits, estimator, look_ahead=seed % 2 == 0)
    moved: dict[int, tuple[int, int]] = {}
    for cycle in range(400):
        if len(world.state.waiting) < 3:
            world.arrive(rng.randint(1, 120), rng.randint(1, 40), rng.randint(1, 40))
        world.cycle()
        for request in world.state.requests.values():
            progress = request.num_output + request.num_preemptions
            last, seen = moved.get(request.id, (-1, cycle))
            if progress != last:
                moved[request.id] = (progress, cycle)
            else:
                assert cycle - seen < LONGEST_WAIT, f"request {request.id} stands still"
    world.drain()


def test_a_prompt_at_its_last_chunk_and_a_decode_without_room_do_not_wait_for_each_other() -> None:
    """The chunked prompt fills HBM; the decode's risen estimate breaks Equation 2 and stops it."""
    limits = Limits(4, 4, soft_tokens=13, hard_tokens=26, cpu_waiting=1)
    estimator = Quantile(first=1, warmup=1000)
    world = World.make(make_policy("dualpace"), 5, 1, limits, estimator)
    for prompt_len, max_tokens, length in ((9, 18, 18), (56, 2, 2), (37, 30, 30)):
        world.arrive(prompt_len, max_tokens, length)
    world.drain()


def test_a_host_full_of_prompts_lets_its_head_finish() -> None:
    """The CPU finds the host filled to the brim by prompts that cannot grow."""
    limits = Limits(gpu_rows=8, cpu_rows=2, soft_tokens=256, hard_tokens=256)
    world = World.make(make_policy("dualpace"), 2, 12, limits)
    world.arrive(33, 2, 2)
    for _ in range(5):
        world.arrive(48, 60, 60)
    world.drain()
