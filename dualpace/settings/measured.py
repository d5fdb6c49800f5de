"""Reading a measured profile and letting it fill in what nobody set.

Imports neither torch nor scipy, so that resolving a plan stays instant; writing profiles is
`runtime.profile`'s business.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from omegaconf import OmegaConf

from dualpace.cpu.config import MAX_BATCH_SIZE
from dualpace.errors import ConfigError
from dualpace.runtime.config import TOKEN_LIMIT
from dualpace.runtime.plan import ProfilePlan
from dualpace.runtime.step_times import StepTimes
from dualpace.settings.compose import conf_dir
from dualpace.settings.machine import STAND_IN, Fingerprint, differences
from dualpace.settings.schema import SystemConfig

C = TypeVar("C", bound=SystemConfig)


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

    @classmethod
    def read(cls, name: str) -> Self:
        """From `conf/measured/NAME.yaml`, or the path NAME. ConfigError if it is no profile."""
        file = Path(name).expanduser()
        if file.suffix != ".yaml":
            file = Path(conf_dir()) / "measured" / f"{name}.yaml"
        if not file.is_file():
            raise ConfigError(
                f"hw.profile={name} is not there ({file}): run `python scripts/profile_hw.py "
                f"profile.name={Path(name).stem}`, or set hw.profile=null for safe defaults."
            )
        data: Any = OmegaConf.to_container(OmegaConf.load(file))
        try:
            points = data.get("step_times")
            times = StepTimes.from_points(points) if points else None
            return cls(data["name"], data["fingerprint"], **data["settings"], step_times=times)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"hw.profile={name} is no profile ({file}: {error}): measure it again with "
                f"`python scripts/profile_hw.py profile.name={Path(name).stem}`."
            ) from None


def settled(config: C, here: Fingerprint) -> tuple[C, ProfilePlan]:
    """A copy of `config` in which limits that nobody set have the profile's values, or without a
    profile safe ones; and what was taken from where. ConfigError for a profile of another machine
    or model."""
    config = copy.deepcopy(config)
    name = config.hw.profile
    taken: list[str] = []
    times = None
    if name is not None:
        profile = MeasuredProfile.read(name)
        if found := differences(profile.fingerprint, here):
            raise ConfigError(_refusal(config, name, found))
        taken, times = _fill(config, profile), _times(config, profile)
    if config.gpu.token_limit is None:
        config.gpu.token_limit = TOKEN_LIMIT
    if config.cpu.max_batch_size is None:
        config.cpu.max_batch_size = MAX_BATCH_SIZE
    note = _note(config, name, taken)
    return config, ProfilePlan(name=name, settings=tuple(taken), note=note, step_times=times)


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


def _times(config: SystemConfig, profile: MeasuredProfile) -> StepTimes | None:
    """The times count an assist between rounds. A GPU that serves it beside them loses less to it,
    by how much is not known: they would close a host tier that pays.
    """
    beside = config.assist.mode == "stream" and profile.fingerprint["gpu"] != STAND_IN
    return None if beside else profile.step_times


def _refusal(config: SystemConfig, name: str, found: list[str]) -> str:
    return (
        f"hw.profile={name} was measured on something else ({'; '.join(found)}): run "
        f"`{command(config)}` and name its result, or set hw.profile=null for safe defaults."
    )


def _note(config: SystemConfig, name: str | None, taken: list[str]) -> str:
    if name is None:
        return (
            "no profile of this machine, so safe defaults where nothing was set: measure one with "
            f"`{command(config)}`"
        )
    return f"{', '.join(taken) or 'nothing'} from {name}; all else as set"


def command(config: SystemConfig) -> str:
    """What measures this machine with this model."""
    hw = "" if config.hw.name == "auto" else f" +hw={config.hw.name}"
    return f"python scripts/profile_hw.py{hw} model.source={config.model.source}"
