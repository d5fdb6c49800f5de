"""The scheduler that a plan asks for."""

from dualpace.runtime.plan import Plan
from dualpace.runtime.schedule.estimate import make_estimator
from dualpace.runtime.schedule.limits import Limits
from dualpace.runtime.schedule.policies import make_policy
from dualpace.runtime.schedule.state import State


def make_state(plan: Plan) -> State:
    """An empty State with the plan's limits, pools, policy and estimator."""
    limits = Limits(
        gpu_rows=plan.gpu.max_batch_size,
        cpu_rows=plan.cpu.max_batch_size,
        soft_tokens=plan.gpu.token_limit,
        hard_tokens=plan.gpu.max_batched_tokens,
        cpu_waiting=plan.cpu.max_waiting,
    )
    return State(
        limits,
        plan.kv.gpu_blocks,
        plan.kv.host_blocks,
        make_policy(plan.policy.name, **dict(plan.policy.options)),
        make_estimator(plan.kv.output_estimate),
        plan.runtime.look_ahead,
    )
