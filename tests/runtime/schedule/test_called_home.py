"""Requests that come home on a prompt's terms, over and over: nothing is lost, all get on."""

import random

import pytest

from dualpace.runtime.schedule import Limits, make_policy
from dualpace.runtime.schedule.estimate import Declared, Quantile
from tests.runtime.schedule.homesick import Homesick
from tests.runtime.schedule.world import World

LIMITS = Limits(gpu_rows=8, cpu_rows=4, soft_tokens=64, hard_tokens=128)


@pytest.mark.parametrize("estimator", [Declared, lambda: Quantile(first=24, warmup=3, window=8)])
@pytest.mark.parametrize("look_ahead", [False, True])
def test_everyone_ends_with_all_tokens_and_every_block_comes_back(estimator, look_ahead):
    """In whatever order rounds and copies end, though few of those called home can stay."""
    called = 0
    for seed in range(10):
        rng = random.Random(seed)
        policy = make_policy("dualpace", admission=Homesick(None))
        world = World.make(policy, rng.randint(10, 24), 120, LIMITS, estimator(), look_ahead)
        for _ in range(20):
            outputs = rng.randint(30, 90)
            world.arrive(rng.randint(1, 30), outputs, outputs)
            world.shuffle(rng, 20)
        world.drain()
        called += world.unpromised
    assert called > 10
