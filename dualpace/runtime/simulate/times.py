"""What a cost model predicts for whole steps, as the curves that policies judge by."""

from dualpace.runtime import step_parts
from dualpace.runtime.simulate.cost import CostModel
from dualpace.runtime.step_parts import StepParts
from dualpace.runtime.step_times import StepTimes


def step_times(cost: CostModel, limits: tuple[int, int]) -> StepTimes:
    """`limits` are P and F (Equation 5)."""
    return step_parts.step_times(parts_of(cost), limits)


def parts_of(cost: CostModel) -> StepParts:
    """A boundary is half a layer and what is queued away."""
    assist = cost.profile.assist
    return StepParts(
        num_layers=cost.num_layers,
        gpu_layer=lambda rows: cost.gpu_pre_attention(rows) + cost.gpu_post_attention(rows),
        gpu_post_layer=cost.gpu_post_layer,
        gpu_decode_attention=cost.gpu_decode_attention,
        gpu_prefill_attention=lambda tokens: cost.gpu_prefill_attention(tokens, tokens),
        cpu_pre_attention=cost.cpu_pre_attention,
        cpu_post_attention=cost.cpu_post_attention,
        cpu_post_layer=cost.cpu_post_layer,
        cpu_attention=cost.cpu_attention,
        assist_post_attention=cost.assist_post_attention,
        assist_final=cost.assist_final,
        assist_post_layer=cost.assist_post_layer,
        assist_latency=cost.assist_latency,
        assist_loss=cost.assist_loss,
        buffer_s=assist.buffer_us / 1e6,
        stages_before=0.0 if cost.beside else 0.5 + assist.queued_stages,
    )
