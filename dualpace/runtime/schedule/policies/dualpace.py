"""The paper's policy: two engines at their own pace, coupled by the host KV envelope (section
4.1).
"""

from dualpace.runtime.schedule.cpu_round import cpu_round
from dualpace.runtime.schedule.draft import Departures, HostAdmission
from dualpace.runtime.schedule.gpu_round import gpu_round
from dualpace.runtime.schedule.rounds import CpuRound, GpuRound
from dualpace.runtime.schedule.view import View


class DualPace:
    """Appendix A.1 and A.2. The host tier takes whoever fits, or of those whom `admission` lets;
    `chunk_prompts` cuts prompts for HBM at the soft token limit; `migrate_every` tokens send a
    decode to the host without need, to test moves.
    """

    uses_host = True
    has_cpu_engine = True
    guards_host = True

    def __init__(
        self,
        admission: HostAdmission | None = None,
        chunk_prompts: bool = False,
        migrate_every: int = 0,
    ) -> None:
        self._departures = Departures(chunk_prompts, admission, migrate_every)

    def gpu_round(self, view: View) -> GpuRound:
        return gpu_round(view, self._departures)

    def cpu_round(self, view: View) -> CpuRound:
        decision, admission = cpu_round(view), self._departures.host_admission
        if admission is not None and decision.decode:
            decision.may_assist = admission.lets_assist(view, len(decision.decode))
        return decision
