"""Workloads by name: a list of request lengths and arrival times. Knows nothing about text,
servers or schedulers; the same list drives the live benchmark and the simulator."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dualpace.errors import ConfigError
from dualpace.runtime.bench.config import (
    FixedWorkloadConfig,
    LognormalWorkloadConfig,
    WorkloadConfig,
)
from dualpace.runtime.bench.trace_files import Floats, Ints, Lengths, azure, sharegpt


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request to send: lengths in tokens, arrival in seconds from the start of the run.

    `output_len` is what the model will say; `max_tokens` is what the client asks for at most
    (None: left out).
    """

    id: int
    arrival_s: float
    prompt_len: int
    output_len: int
    max_tokens: int | None


def load_workload(config: WorkloadConfig) -> list[RequestSpec]:
    """The requests of a workload, in order of arrival; the same config gives the same list."""
    check(config)
    lengths = SOURCES[config.name](config)
    if len(lengths.prompt) < config.num_requests:
        raise ConfigError(
            f"workload.num_requests={config.num_requests} is more than the {len(lengths.prompt)} "
            "requests that the workload holds; lower it."
        )
    prompt = reshape(lengths.prompt, config.prompt_mean)
    output = reshape(lengths.output, config.output_mean)
    arrivals = arrival_times(config, lengths.times)
    declared = config.max_tokens == "trace"
    return [
        RequestSpec(i, t, p, o, o if declared else None)
        for i, (t, p, o) in enumerate(
            zip(arrivals.tolist(), prompt.tolist(), output.tolist(), strict=True)
        )
    ]


_TOKENS = (
    *("prompt_mean", "output_mean", "prompt_len", "output_len"),
    *("prompt_median", "output_median", "max_len"),
)


def check(config: WorkloadConfig) -> None:
    """ConfigError for values that no workload can serve."""
    if config.name not in SOURCES:
        raise ConfigError(
            f"workload.name={config.name} is unknown; choose one of {', '.join(sorted(SOURCES))}."
        )
    if config.num_requests < 1:
        raise ConfigError(f"workload.num_requests={config.num_requests} must be at least 1.")
    if config.seed < 0:
        raise ConfigError(f"workload.seed={config.seed} must be at least 0.")
    if not config.rate > 0:
        raise ConfigError(
            f"workload.rate={config.rate} must be above 0 requests/s (inf sends all at once)."
        )
    for key in _TOKENS:
        tokens = getattr(config, key, None)
        if tokens is not None and not 1 <= tokens < math.inf:
            raise ConfigError(f"workload.{key}={tokens} must be at least 1 token.")
    for key in ("prompt_sigma", "output_sigma", "chars_per_token"):
        value, least = getattr(config, key, 1.0), 0 if key.endswith("sigma") else 0.1
        if not least <= value < math.inf:
            raise ConfigError(f"workload.{key}={value} must be at least {least}.")
    if config.arrival not in ("exponential", "constant", "trace"):
        raise ConfigError(
            f"workload.arrival={config.arrival} must be exponential, constant or trace."
        )
    if config.max_tokens not in ("trace", "unset"):
        raise ConfigError(f"workload.max_tokens={config.max_tokens} must be trace or unset.")


def reshape(lengths: Ints, mean: float | None) -> Ints:
    """Scale lengths so that their mean is `mean`; none falls below 1.

    The factor is found by bisection because the floor of 1 moves the mean.
    """
    assert lengths.min() >= 1  # sources refuse others
    if mean is None:
        return lengths
    low, high = 0.0, mean  # at high, every length is at least `mean`
    for _ in range(60):
        factor = (low + high) / 2
        if scaled(lengths, factor).mean() < mean:
            low = factor
        else:
            high = factor
    return scaled(lengths, high)


def scaled(lengths: Ints, factor: float) -> Ints:
    """Multiply and round, each rounding error carried to the next length: traces repeat a few short
    lengths so often that rounding each alone would move the mean by jumps."""
    rounded = np.diff(np.rint(np.cumsum(lengths * factor)), prepend=0)
    return np.maximum(rounded, 1).astype(np.int64)


def arrival_times(config: WorkloadConfig, times: Floats | None) -> Floats:
    """Arrival times in seconds, first one at its own gap after 0 (trace: first one at 0).

    The gaps are scaled so that n requests arrive in exactly n / rate seconds. With
    `arrival=trace` the trace's own times are used, scaled to the rate when it is finite.
    """
    n = config.num_requests
    if config.arrival == "trace":
        if times is None:
            raise ConfigError(
                f"workload.arrival=trace needs a workload with times, {config.name} has none; "
                "use exponential or constant."
            )
        own: Floats = times[:n] - times[0]
        if (back := np.flatnonzero(np.diff(own) < 0)).size:
            raise ConfigError(
                f"workload.arrival=trace needs times in order, and request {back[0] + 2} comes "
                "before the one before it; sort the file, or use exponential or constant."
            )
        if math.isinf(config.rate):
            return own
        stretch = n / config.rate / own[-1] if own[-1] > 0 else 0.0
        return np.multiply(own, stretch)
    if math.isinf(config.rate):
        return np.zeros(n)
    if config.arrival == "constant":
        return np.arange(1, n + 1) / config.rate
    gaps = np.random.default_rng(config.seed).exponential(size=n)
    arrivals: Floats = np.cumsum(gaps) * (n / config.rate / gaps.sum())
    return arrivals


# Sources: each returns at least `num_requests` lengths, where it has them; those of files are in
# `trace_files`.


def fixed(config: WorkloadConfig) -> Lengths:
    assert isinstance(config, FixedWorkloadConfig)
    n = config.num_requests
    return Lengths(np.full(n, config.prompt_len), np.full(n, config.output_len))


def lognormal(config: WorkloadConfig) -> Lengths:
    assert isinstance(config, LognormalWorkloadConfig)
    # A stream of its own, so that lengths do not depend on the arrivals' draws.
    rng = np.random.default_rng([config.seed, 1])

    def draw(median: float, sigma: float) -> Ints:
        drawn = rng.lognormal(math.log(median), sigma, config.num_requests)
        return np.clip(np.rint(drawn), 1, config.max_len).astype(np.int64)

    prompt = draw(config.prompt_median, config.prompt_sigma)
    return Lengths(prompt, draw(config.output_median, config.output_sigma))


SOURCES: dict[str, Callable[[WorkloadConfig], Lengths]] = {
    "azure": azure,
    "sharegpt": sharegpt,
    "fixed": fixed,
    "lognormal": lognormal,
}


def means(requests: Sequence[RequestSpec]) -> tuple[float, float]:
    """Mean prompt and output length in tokens."""
    n = len(requests)
    return sum(r.prompt_len for r in requests) / n, sum(r.output_len for r in requests) / n
