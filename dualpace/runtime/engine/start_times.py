"""Step times from what the workers timed when they started, for an admission to the host tier that
no profile serves. Knows no torch.

Measured: dense stages and attention of a layer on either side, and the post-layers. Taken from
there: an assist is as much work as the GPU's own dense stages of as many rows. Stated, for the
workers have nobody to ask while they start: what an assist takes besides, and what of its time the
main batch loses.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from dualpace.runtime.plan import Plan
from dualpace.runtime.schedule.host_admission import ProfiledAdmission
from dualpace.runtime.step_parts import StepParts, step_times
from dualpace.runtime.step_times import Curve, Points

# As `engine.predict` names them, and the host's dense stages by rows.
_GPU = ("linear", "post_layer", "decode", "prefill")
_HOST = ("host", "host_pre", "host_post", "host_post_layer")
# Of an assist, measured on an H200. Beside the main round: its wait there, and what the round loses
# as a share of those dense stages: 0.27 of the assist's own time, which is longer by its copies and
# by what it shares with the round.
BESIDE_S = 1e-3
BESIDE_LOSS = 0.6
# Between stages the round loses all of it: launch and end. Of the stages, half of one is left when
# the host asks, and a device has one more queued.
BETWEEN_S = 1e-4
BUFFER_S = 4e-5  # the host writes and reads activations


class StartTimes:
    """`admission` takes whoever fits until `learn` has heard both workers."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._curves: dict[str, Curve] = {}
        self.admission = ProfiledAdmission(None)

    def learn(self, timings: Mapping[str, Any]) -> None:
        """`timings[name]` lists (size, seconds). Ranks run the same stages, as often: those of
        the last that became ready stand for all."""
        self._curves.update({name: rising(points) for name, points in timings.items()})
        if all(name in self._curves for name in (*_GPU, *_HOST)):
            limits = self._plan.assist.post_attention_limit, self._plan.assist.post_layer_limit
            self.admission.times = step_times(parts_of(self._plan, self._curves), limits)


def rising(points: Points) -> Curve:
    """Never less for a larger size, as medians of a few runs can be."""
    pairs = sorted((float(size), float(seconds)) for size, seconds in points)
    if len(pairs) == 1:
        pairs.append((pairs[0][0] + 1, pairs[0][1]))
    seconds = accumulate((seconds for _, seconds in pairs), max)
    return Curve(tuple(size for size, _ in pairs), tuple(seconds))


def parts_of(plan: Plan, curves: Mapping[str, Curve]) -> StepParts:
    linear, post_layer = curves["linear"], curves["post_layer"]
    is_device = plan.gpu.device == "cuda"
    if is_device and plan.assist.mode == "stream":
        fixed_s, share, stages_before = BESIDE_S, BESIDE_LOSS, 0.0
    else:
        fixed_s, share, stages_before = BETWEEN_S, 1.0, 1.5 if is_device else 0.5
    lost_s = 0.0 if share < 1 else fixed_s
    return StepParts(
        num_layers=plan.model.num_layers,
        gpu_layer=linear,
        gpu_post_layer=post_layer,
        gpu_decode_attention=curves["decode"],
        gpu_prefill_attention=lambda tokens: curves["prefill"](tokens * tokens),
        cpu_pre_attention=curves["host_pre"],
        cpu_post_attention=curves["host_post"],
        cpu_post_layer=curves["host_post_layer"],
        cpu_attention=curves["host"],
        assist_post_attention=linear,
        assist_final=lambda rows: linear(rows) + post_layer(rows),
        assist_post_layer=post_layer,
        assist_latency=lambda device_s: fixed_s + device_s,
        assist_loss=lambda device_s: lost_s + share * device_s,
        buffer_s=BUFFER_S,
        stages_before=stages_before,
    )
