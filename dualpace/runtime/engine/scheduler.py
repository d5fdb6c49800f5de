"""The scheduler that a plan asks for."""

from typing import Any

from dualpace.runtime.engine.predict import MeasuredPredictor
from dualpace.runtime.engine.start_times import StartTimes
from dualpace.runtime.plan import Plan
from dualpace.runtime.schedule.estimate import make_estimator
from dualpace.runtime.schedule.host_admission import ProfiledAdmission
from dualpace.runtime.schedule.limits import Limits
from dualpace.runtime.schedule.policies import make_policy
from dualpace.runtime.schedule.state import State

_PREDICTED = ("launch_ms", "fp16_kernel")  # options about times, not about decisions


def make_learner(plan: Plan) -> MeasuredPredictor | StartTimes | None:
    """For a policy that judges by times which no profile has told."""
    if not plan.times_layers:
        return None
    if not plan.policy.lockstep:
        return StartTimes(plan)
    extra_ms = dict(plan.policy.options).get("launch_ms", 0.0)
    return MeasuredPredictor(plan.model.num_layers, float(extra_ms) / 1e3)


def make_state(plan: Plan, learner: MeasuredPredictor | StartTimes | None) -> State:
    """An empty State with the plan's limits, pools, policy and estimator."""
    options: dict[str, Any] = dict(plan.policy.options)
    if options.pop("host_admission", None) == "profile":
        options["admission"] = ProfiledAdmission(plan.profile.step_times)
    match learner:
        case MeasuredPredictor():
            options = {k: v for k, v in options.items() if k not in _PREDICTED}
            options["predictor"] = learner
        case StartTimes():
            options["admission"] = learner.admission
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
