"""Reading a measured profile and letting it fill in what nobody set.

Imports neither torch nor scipy, so that resolving a plan stays instant; writing profiles is
`runtime.profile`'s business.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from dualpace.cpu.config import MAX_BATCH_SIZE
from dualpace.errors import ConfigError
from dualpace.runtime.config import TOKEN_LIMIT, DualPacePolicyConfig
from dualpace.runtime.plan import ProfilePlan
from dualpace.runtime.step_times import StepTimes
from dualpace.settings.compose import conf_dir
from dualpace.settings.machine import Fingerprint, differences
from dualpace.settings.schema import SystemConfig

C = TypeVar("C", bound=SystemConfig)
# Written in C where it can be: a profile is read at every start.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


AUTO = "auto"  # of hw.profile, as hw files say it


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """The controls of one machine and model, and what they are tied to."""

    name: str
    fingerprint: Fingerprint
    post_attention_limit: int
    post_layer_limit: int
    token_limit: int
    cpu_batch_limit: int
    step_times: StepTimes | None = None  # profiles of older versions have none
    date: str = ""  # ISO 8601
    routing: Mapping[str, Any] = field(default_factory=dict)  # scores that the limits come from

    @classmethod
    def read(cls, name: str) -> Self:
        """From `conf/measured/NAME.yaml`, or the path NAME. ConfigError if it is no profile."""
        file = Path(name).expanduser()
        if file.suffix != ".yaml":
            file = _folder() / f"{name}.yaml"
        if not file.is_file():
            raise ConfigError(
                f"hw.profile={name} is not there ({file}): run `python scripts/profile_hw.py "
                f"profile.name={Path(name).stem}`, or set hw.profile=null for safe defaults."
            )
        try:
            data = yaml.load(file.read_text(), Loader=_Loader)
            points = data.get("step_times")
            return cls(
                data["name"],
                data["fingerprint"],
                **data["settings"],
                step_times=None if _is_older(points) else StepTimes.from_points(points),
                date=str(data.get("measured", {}).get("date", "")),
                routing=data.get("routing", {}),
            )
        except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
            raise ConfigError(
                f"hw.profile={name} is no profile ({file}: {error}): measure it again with "
                f"`python scripts/profile_hw.py profile.name={Path(name).stem}`."
            ) from None


def _is_older(points: Mapping[str, Any] | None) -> bool:
    """Times of a version that did not write all curves: workers measure their own then."""
    return not points or not set(StepTimes.__slots__) <= set(points)


def settled(config: C, here: Fingerprint) -> tuple[C, ProfilePlan]:
    """A copy of `config` in which limits that nobody set have the profile's values, or without a
    profile safe ones; and what was taken from where. ConfigError for a profile that is named and of
    another machine or model; `auto` looks for one that is of neither."""
    config = copy.deepcopy(config)
    name = config.hw.profile
    profile, missing = None, "no profile of this machine"
    if name == AUTO:
        profile, missing = _fitting(here)
        name = profile.name if profile else None
    elif name is not None:
        profile = MeasuredProfile.read(name)
        if found := differences(profile.fingerprint, here):
            raise ConfigError(_refusal(config, name, found))
    taken = [] if profile is None else _fill(config, profile)
    if config.gpu.token_limit is None:
        config.gpu.token_limit = TOKEN_LIMIT
    if config.cpu.max_batch_size is None:
        config.cpu.max_batch_size = MAX_BATCH_SIZE
    times = profile.step_times if profile else None
    note = _note(config, name, taken, missing, times is None and _judges_by_times(config))
    return config, ProfilePlan(name=name, settings=tuple(taken), note=note, step_times=times)


def _judges_by_times(config: SystemConfig) -> bool:
    policy = config.policy
    is_asked = isinstance(policy, DualPacePolicyConfig) and policy.host_admission == "profile"
    return is_asked and config.kv.host_blocks != 0


def _fitting(here: Fingerprint) -> tuple[MeasuredProfile | None, str]:
    """The newest profile of this machine and model, or why there is none."""
    profiles = [MeasuredProfile.read(file.stem) for file in sorted(_folder().glob("*.yaml"))]
    fitting = [p for p in profiles if not differences(p.fingerprint, here)]
    if fitting:
        return max(fitting, key=lambda profile: profile.date), ""
    missing = "no profile of this machine with this model"
    near = [p for p in profiles if all(p.fingerprint.get(k) == here[k] for k in ("cpu", "gpu"))]
    if near:
        found = [f"{p.name}: {'; '.join(differences(p.fingerprint, here))}" for p in near]
        missing += f" (there is {', and '.join(found)})"
    return None, missing


def _folder() -> Path:
    return Path(conf_dir()) / "measured"


def _fill(config: SystemConfig, profile: MeasuredProfile) -> list[str]:
    """Keys that were not set and now are."""
    taken = []
    if config.assist.post_attention_limit is None:
        config.assist.post_attention_limit = profile.post_attention_limit
        config.assist.post_layer_limit = profile.post_layer_limit
        taken += ["assist.post_attention_limit", "assist.post_layer_limit"]
    if config.gpu.token_limit is None:
        hard = config.gpu.max_batched_tokens or profile.token_limit
        config.gpu.token_limit = min(profile.token_limit, hard)
        taken.append("gpu.token_limit")
    if config.cpu.max_batch_size is None:
        config.cpu.max_batch_size = profile.cpu_batch_limit
        taken.append("cpu.max_batch_size")
    return taken


def _refusal(config: SystemConfig, name: str, found: list[str]) -> str:
    return (
        f"hw.profile={name} was measured on something else ({'; '.join(found)}): run "
        f"`{command(config)}` and name its result, or set hw.profile=null for safe defaults."
    )


def _note(
    config: SystemConfig, name: str | None, taken: list[str], missing: str, judges_at_start: bool
) -> str:
    judged = "the host tier is judged by times measured at start" if judges_at_start else ""
    if name is None:
        return (
            f"{missing}, so safe defaults where nothing was set{judged and f', and {judged}'}: "
            f"measure one with `{command(config)}`"
        )
    return f"{', '.join(taken) or 'nothing'} from {name}; all else as set{judged and f'; {judged}'}"


def command(config: SystemConfig) -> str:
    """What measures this machine with this model and as many ranks."""
    hw = "" if config.hw.name == "auto" else f" +hw={config.hw.name}"
    sizes = {"gpu.tp": config.gpu.tp, "cpu.tp": config.cpu.tp}
    ranks = "".join(f" {key}={size}" for key, size in sizes.items() if size > 1)
    return f"python scripts/profile_hw.py{hw} model.source={config.model.source}{ranks}"
