"""Who runs next: the paper's section 4.1 and Appendix A over plain data. No torch, no clock, no
I/O.
"""

from dualpace.runtime.schedule.envelope import HostEnvelope
from dualpace.runtime.schedule.estimate import make_estimator
from dualpace.runtime.schedule.limits import Limits, RequestTooLong
from dualpace.runtime.schedule.policies import make_policy
from dualpace.runtime.schedule.rounds import (
    Applied,
    CpuRound,
    CpuStep,
    GpuRound,
    GpuStep,
    Row,
    Transfer,
)
from dualpace.runtime.schedule.state import State
from dualpace.runtime.schedule.view import View
from dualpace.runtime.types import RowKind, TransferKind

__all__ = [
    "Applied",
    "CpuRound",
    "CpuStep",
    "GpuRound",
    "GpuStep",
    "HostEnvelope",
    "Limits",
    "RequestTooLong",
    "Row",
    "RowKind",
    "State",
    "Transfer",
    "TransferKind",
    "View",
    "make_estimator",
    "make_policy",
]
