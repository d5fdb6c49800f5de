"""The paper's policy: two engines at their own pace, coupled by the host KV envelope (section
4.1).
"""

from dualpace.runtime.schedule.cpu_round import cpu_round
from dualpace.runtime.schedule.gpu_round import gpu_round
from dualpace.runtime.schedule.rounds import CpuRound, GpuRound
from dualpace.runtime.schedule.view import View


class DualPace:
    """Appendix A.1 and A.2."""

    uses_host = True
    has_cpu_engine = True
    guards_host = True

    def gpu_round(self, view: View) -> GpuRound:
        return gpu_round(view)

    def cpu_round(self, view: View) -> CpuRound:
        return cpu_round(view)
