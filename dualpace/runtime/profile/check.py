"""A small workload served for real and simulated under the same profile: how far the simulator's
throughput is off. The real run has a process of its own (`serve_run`)."""

import json
import logging
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from dualpace.runtime.bench.config import FixedWorkloadConfig
from dualpace.runtime.config import PolicyConfig
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.sweep import Sweep
from dualpace.runtime.simulate.config import ProfileConfig
from dualpace.runtime.simulate.run import simulate
from dualpace.settings.schema import SimulateConfig

log = logging.getLogger(__name__)

REAL = "dualpace.runtime.profile.serve_run"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all arrive at once; lengths in tokens."""

    num_requests: int
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Checked:
    """Output tokens/s of both engines together."""

    load: Load
    real: float
    real_by_engine: dict[str, float]
    simulated: float

    @property
    def error(self) -> float:
        """Of the simulation, as a share of the real throughput."""
        return self.simulated / self.real - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": round(self.error, 4)}


def check(plan: Plan, costs: ProfileConfig, sweep: Sweep) -> Checked | None:
    """None, with a line in the log, where the real run failed: the profile is good without it."""
    settings = sweep.settings
    work = Load(settings.check_requests, settings.check_prompt, settings.check_output)
    plan = replace(plan, compile=replace(plan.compile, start="ahead"))
    order = {"plan": plan.to_json(), **asdict(work), "temperature": settings.temperature}
    try:
        done = subprocess.run(
            [sys.executable, "-m", REAL],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=settings.timeout_s,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        log.warning("the real run to compare with failed: %s %s", error, error.stderr)
        return None
    real = json.loads(done.stdout.splitlines()[-1])
    return Checked(
        load=work,
        real=sum(real.values()),
        real_by_engine=real,
        simulated=float(
            simulate(simulation(plan, costs, work, sweep.config.policy))["output_throughput"]
        ),
    )


def simulation(
    plan: Plan, costs: ProfileConfig, work: Load, policy: PolicyConfig
) -> SimulateConfig:
    """The same run for the simulator."""
    config = SimulateConfig(
        policy=policy,
        simulated=costs,
        workload=FixedWorkloadConfig(
            num_requests=work.num_requests, prompt_len=work.prompt_len, output_len=work.output_len
        ),
    )
    config.gpu.token_limit = plan.gpu.token_limit
    config.gpu.max_batched_tokens = plan.gpu.max_batched_tokens
    config.gpu.max_batch_size = plan.gpu.max_batch_size
    config.cpu.max_batch_size = plan.cpu.max_batch_size
    config.cpu.max_waiting = plan.cpu.max_waiting
    config.kv.output_estimate = plan.kv.output_estimate
    return config
