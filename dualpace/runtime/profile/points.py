"""The points of a sweep and their names. Pure data: what a point measures is `measure`'s."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dualpace.errors import ConfigError
from dualpace.runtime.profile.config import SweepConfig

KINDS = ("route", "beside", "decode", "prefill", "step", "copies")


@dataclass(frozen=True, slots=True)
class Point:
    """`route`: Appendix B's primitives and calibration at one CPU batch size. `beside`: a GPU
    decode step with and without assists of so many rows. `decode`: CPU layers at one batch size
    over contexts. `prefill`: GPU layers at one number of prompts over lengths.
    `step`: GPU decode steps at one batch size over contexts. `copies`: swaps of that many blocks.
    """

    kind: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.batch}"


def all_points(sweep: SweepConfig) -> list[Point]:
    """Every point of the sweep, in the order of a run. ConfigError for sizes that cannot work."""
    check(sweep)
    batches = {
        "route": sweep.route_batches,
        "beside": sweep.beside_batches,
        "decode": sweep.decode_batches,
        "prefill": sweep.prefill_batches,
        "step": sweep.step_batches,
        "copies": [sweep.copy_blocks],
    }
    return [Point(kind, batch) for kind in KINDS for batch in sorted(set(batches[kind]))]


def chosen(sweep: SweepConfig) -> list[Point]:
    """The points that this run measures."""
    points = all_points(sweep)
    if sweep.point is None:
        return points
    if sweep.point == "fit":
        return []
    named = [point for point in points if point.name == sweep.point]
    if not named:
        raise ConfigError(
            f"profile.point={sweep.point} is no point of this sweep: choose fit or one of "
            f"{', '.join(point.name for point in points)}."
        )
    return named


def prefill_lengths(sweep: SweepConfig, batch: int) -> list[int]:
    """Prompt lengths measured with `batch` prompts."""
    return [n for n in sorted(set(sweep.prefill_lengths)) if n * batch <= sweep.prefill_max_tokens]


def busy_rows(sweep: SweepConfig) -> int:
    """Rows that the GPU decodes where it has to have something to do."""
    return max(1, sweep.calibration_rows)


def check(sweep: SweepConfig) -> None:
    lists = ("route", "decode", "prefill", "step")
    for name in lists:
        _sizes(f"profile.{name}_batches", getattr(sweep, f"{name}_batches"))
    if sweep.beside_batches:
        _sizes("profile.beside_batches", sweep.beside_batches)
    for name in ("decode_contexts", "prefill_lengths", "step_contexts"):
        _sizes(f"profile.{name}", getattr(sweep, name))
    counts = ["warmups", "invocations", "repeats", "plateau_points", "copy_blocks"]
    counts += ["calibration_context", "calibration_iterations"]
    for name in counts + ["check_requests", "check_prompt", "check_output"] * sweep.check:
        if getattr(sweep, name) < 1:
            raise ConfigError(f"profile.{name}={getattr(sweep, name)} is below 1: raise it.")
    for name in ("max_seconds", "timeout_s"):
        if not 0 < getattr(sweep, name) < math.inf:
            raise ConfigError(
                f"profile.{name}={getattr(sweep, name)} is no time: give seconds > 0."
            )
    for name in ("gpu_weight", "epsilon", "tolerance", "temperature", "calibration_rows"):
        if not 0 <= getattr(sweep, name) < math.inf:
            raise ConfigError(
                f"profile.{name}={getattr(sweep, name)} is below 0 or no number: give 0 or more."
            )
    if sweep.layers is not None and sweep.layers < 2:
        raise ConfigError(
            f"profile.layers={sweep.layers} is below 2: an assist in the middle needs two layers."
        )
    if max(sweep.route_batches) <= max(sweep.decode_batches):
        raise ConfigError(
            f"profile.route_batches={sweep.route_batches} has no size above the largest of "
            f"profile.decode_batches, {max(sweep.decode_batches)}: add one, or Full-CPU for every "
            f"batch could not come out."
        )
    for batch in sweep.prefill_batches:
        if not prefill_lengths(sweep, batch):
            raise ConfigError(
                f"profile.prefill_batches={sweep.prefill_batches}: {batch} prompts of any of the "
                f"lengths exceed profile.prefill_max_tokens={sweep.prefill_max_tokens}: raise it."
            )


def _sizes(key: str, sizes: Sequence[int]) -> None:
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{key}={list(sizes)} must name sizes from 1 up.")
