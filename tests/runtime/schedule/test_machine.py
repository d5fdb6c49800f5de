"""The scheduling core under everything at once: a hypothesis state machine over a world whose
device remembers every token. Lengths and pools are small, so that every corner is crowded.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from dualpace.runtime.schedule import Limits, make_policy
from dualpace.runtime.schedule.estimate import Declared, Estimator, Quantile
from dualpace.runtime.schedule.host_admission import ProfiledAdmission
from dualpace.runtime.schedule.policies import POLICIES
from dualpace.runtime.types import Owner
from tests.runtime.schedule.homesick import Homesick
from tests.runtime.schedule.predictor import FlatPredictor, flat_times
from tests.runtime.schedule.world import World

ROUNDS = {"total": 0}


DEPARTURES: dict[str, dict[str, Any]] = {
    "paper": {},
    "chunks": {"chunk_prompts": True},
    "cheap host": {"chunk_prompts": True, "admission": ProfiledAdmission(flat_times(assist=0.1))},
    "dear host": {"admission": ProfiledAdmission(flat_times(cpu=9.0, assist=2.0))},
    "dear prefill": {
        "chunk_prompts": True,
        "admission": ProfiledAdmission(flat_times(cpu=9.0, prefill=50.0)),
    },
    "homesick": {"chunk_prompts": True, "admission": Homesick(None)},
    "restless": {"migrate_every": 3},
}
lengths = st.integers(1, 90)


class Serving(RuleBasedStateMachine):
    """Arrivals, rounds, copies, cancels and worker losses in any order; drained at the end."""

    policy = "dualpace"

    @initialize(
        gpu=st.integers(3, 24),
        host=st.integers(0, 40),
        rows=st.tuples(st.integers(1, 8), st.integers(1, 8)),
        soft=st.integers(8, 64),
        hard=st.sampled_from([1, 2, 4]),
        waiting=st.sampled_from([None, 1, 3]),
        staging=st.sampled_from([None, 40]),
        estimator=st.sampled_from(["declared", "short", "quantile"]),
        look_ahead=st.booleans(),
        departure=st.sampled_from(sorted(DEPARTURES)),
    )
    def start(
        self,
        gpu: int,
        host: int,
        rows: tuple[int, int],
        soft: int,
        hard: int,
        waiting: int | None,
        staging: int | None,
        estimator: str,
        look_ahead: bool,
        departure: str,
    ) -> None:
        estimators: dict[str, Estimator] = {
            "declared": Declared(),
            "short": Quantile(first=1, warmup=1000),  # every answer outgrows it, again and again
            "quantile": Quantile(first=16, warmup=3, window=8),
        }
        options: dict[str, Any] = {}
        if self.policy == "neo":
            options["predictor"] = FlatPredictor(cpu_s=0.3)
        if self.policy == "dualpace":
            options = DEPARTURES[departure]
        limits = Limits(
            gpu_rows=rows[0],
            cpu_rows=rows[1],
            soft_tokens=soft,
            hard_tokens=max(soft, 8) * hard,
            cpu_waiting=waiting,
            staging_tokens=staging,
        )
        policy = make_policy(self.policy, **options)
        self.world = World.make(policy, gpu, host, limits, estimators[estimator], look_ahead)

    @rule(prompt=lengths, most=lengths, length=lengths, needs_last_token=st.booleans())
    def arrive(self, prompt: int, most: int, length: int, needs_last_token: bool) -> None:
        self.world.arrive(prompt, most, length, needs_last_token=needs_last_token and prompt < 9)

    @rule(seed=st.integers(0, 10**6), events=st.integers(1, 60))
    def run(self, seed: int, events: int) -> None:
        self.world.shuffle(random.Random(seed), events)

    @rule(cycles=st.integers(1, 12))
    def run_fairly(self, cycles: int) -> None:
        for _ in range(cycles):
            self.world.cycle()

    @rule(choice=st.integers(0, 10**6))
    def cancel(self, choice: int) -> None:
        if self.world.lengths:
            self.world.cancel(choice % len(self.world.lengths))

    @rule(which=st.sampled_from(["gpu", "cpu", *["neither"] * 3]), failed=st.booleans())
    def lose(self, which: str, failed: bool) -> None:
        if which == "gpu":
            self.world.fail(Owner.GPU) if failed else self.world.lose_gpu()
        elif which == "cpu":
            self.world.fail(Owner.CPU) if failed else self.world.lose_cpu()

    def teardown(self) -> None:
        self.world.drain()
        ROUNDS["total"] += self.world.rounds


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_order_of_events_breaks_a_rule(policy: str) -> None:
    machine = type(f"Serving_{policy}", (Serving,), {"policy": policy})
    examples = 200 if policy == "dualpace" else 60
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_that_was_at_least_ten_thousand_rounds() -> None:
    """Runs after the machines in file order; the number makes sure that they are not vacuous."""
    assert ROUNDS["total"] >= 10_000
