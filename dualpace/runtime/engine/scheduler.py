"""The scheduler that a plan asks for."""

from typing import Any

from dualpace.runtime.engine.predict import MeasuredPredictor
from dualpace.runtime.plan import Plan
from dualpace.runtime.schedule.estimate import make_estimator
from dualpace.runtime.schedule.limits import Limits
from dualpace.runtime.schedule.policies import make_policy
from dualpace.runtime.schedule.state import State

_PREDICTED = ("launch_ms", "fp16_kernel")  # options about times, not about decisions


def make_predictor(plan: Plan) -> MeasuredPredictor | None:
    """For a policy that judges by predicted times: learns them when the workers are ready."""
    if not plan.policy.lockstep:
        return None
    extra_ms = dict(plan.policy.options).get("launch_ms", 0.0)
    return MeasuredPredictor(plan.model.num_layers, float(extra_ms) / 1e3)


def make_state(plan: Plan, predictor: MeasuredPredictor | None) -> State:
    """An empty State with the plan's limits, pools, policy and estimator."""
    options: dict[str, Any] = dict(plan.policy.options)
    if options.pop("host_admission", None) == "profile":
        options["times"] = plan.profile.step_times
    if predictor is not None:
        options = {k: v for k, v in options.items() if k not in _PREDICTED}
        options["predictor"] = predictor
    limits = Limits(
        gpu_rows=plan.gpu.max_batch_size,
        cpu_rows=plan.cpu.max_batch_size,
        soft_tokens=plan.gpu.token_limit,
        hard_tokens=plan.gpu.max_batched_tokens,
        cpu_waiting=plan.cpu.max_waiting,
    )
    return State(
        limits,
        plan.kv.gpu_pool_blocks,
        plan.kv.host_pool_blocks,
        make_policy(plan.policy.name, **options),
        make_estimator(plan.kv.output_estimate),
        plan.runtime.look_ahead,
    )
