"""Scheduling policies by name, one file each, imported on use. A policy only decides: view in,
round out.
"""

from importlib import import_module
from typing import Any, Protocol

from dualpace.errors import ConfigError
from dualpace.runtime.schedule.rounds import CpuRound, GpuRound
from dualpace.runtime.schedule.view import View


class Policy(Protocol):
    """Two pure functions of a view, and what the state must know about them."""

    uses_host: bool  # False: the host pool stays empty
    has_cpu_engine: (
        bool  # host-resident requests decode by themselves, so one may be longer than HBM
    )
    guards_host: bool  # it keeps Equation 2

    def gpu_round(self, view: View) -> GpuRound:
        """The GPU engine's next round."""

    def cpu_round(self, view: View) -> CpuRound:
        """The CPU engine's next round."""


POLICIES = {
    "dualpace": "dualpace.runtime.schedule.policies.dualpace:DualPace",
    "gpu_only": "dualpace.runtime.schedule.policies.gpu_only:GpuOnly",
    "neo": "dualpace.runtime.schedule.policies.neo:Neo",
}


def policy_class(name: str) -> type[Policy]:
    """The class of that name: what it is, before it is made."""
    if name not in POLICIES:
        raise ConfigError(f"policy={name} is unknown: use one of {', '.join(POLICIES)}")
    module, _, attribute = POLICIES[name].partition(":")
    found: type[Policy] = getattr(import_module(module), attribute)
    return found


def make_policy(name: str, **options: Any) -> Policy:
    """The policy of that name. `neo` takes `predictor=`, an object of `policies.neo.Predictor`."""
    return policy_class(name)(**options)
