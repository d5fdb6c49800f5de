"""Latency and throughput of a run from per-request records. Pure arithmetic: knows neither where
the records come from nor where the numbers go.

Keys are those of `vllm bench serve`'s result file, so both can be read by the same tools, plus what
the paper adds (section 6.1): mean normalized latency and the sustainable rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(slots=True)
class RequestRecord:
    """What a client saw of one request: when it arrived and when each token did (seconds).

    `cpu_tokens` counts tokens decoded while the KV lay in host memory. `output_len` is the server's
    own count, where several tokens may have come at one time. A request is completed when it has an
    output and no error.
    """

    id: int
    arrival_s: float
    prompt_len: int
    token_times_s: list[float] = field(default_factory=list)
    cpu_tokens: int = 0
    error: str | None = None
    output_len: int | None = None  # None: a token at each time

    @property
    def num_tokens(self) -> int:
        return len(self.token_times_s) if self.output_len is None else self.output_len

    @property
    def completed(self) -> bool:
        return self.error is None and bool(self.token_times_s)


def summarize(
    records: Sequence[RequestRecord],
    goodput_ms: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (99,),
) -> dict[str, Any]:
    """One run's result. `goodput_ms` maps any of ttft, itl, tpot, e2el to a target in ms; a request
    meets that of itl when none of its gaps is longer.

    Duration runs from 0, when the run starts, to the last token. TPOT leaves out requests with a
    single token; ITL is over all gaps of all requests. Empty samples count as 0, as in vLLM.
    """
    done = [record for record in records if record.completed]
    duration = max((record.token_times_s[-1] for record in done), default=0.0)
    output_lens = np.array([r.num_tokens for r in done], np.float64)
    prompt_tokens = sum(r.prompt_len for r in done)
    ttft = np.array([r.token_times_s[0] - r.arrival_s for r in done])
    e2el = np.array([r.token_times_s[-1] - r.arrival_s for r in done])
    several = output_lens > 1
    tpot = (e2el - ttft)[several] / (output_lens[several] - 1)
    gaps = [np.diff(r.token_times_s) for r in done]
    itl = np.concatenate(gaps) if gaps else np.empty(0)
    output_tokens = int(output_lens.sum())
    seconds = duration or math.inf
    cpu_tokens = sum(r.cpu_tokens for r in done)
    all_tpot = np.zeros(len(done))
    all_tpot[several] = tpot
    worst_gap = np.array([gap.max(initial=0.0) for gap in gaps])
    samples = {"ttft": ttft, "itl": worst_gap, "tpot": all_tpot, "e2el": e2el}
    good = count_good(samples, goodput_ms)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / seconds,
        "request_goodput": None if good is None else good / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
    }
    for name, sample in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2el", e2el)):
        result |= spread(name, sample * 1e3, percentiles)
    result["mean_normalized_latency_s_per_token"] = float(mean(e2el / output_lens))
    result["gpu_resident_tokens"] = output_tokens - cpu_tokens
    result["cpu_resident_tokens"] = cpu_tokens
    return result


def window_rates(records: Sequence[RequestRecord], low: float, high: float) -> dict[str, float]:
    """Requests that ended and tokens that came from `low` to before `high`, a second."""
    ends = [r.token_times_s[-1] for r in records if r.completed]
    times = np.concatenate([r.token_times_s for r in records] or [[]])
    width = max(high - low, 1e-9)
    return {
        "window_requests_per_s": sum(low <= end < high for end in ends) / width,
        "window_output_tokens_per_s": float(((times >= low) & (times < high)).sum() / width),
    }


def spread(name: str, sample_ms: Floats, percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles of a sample in ms, under vLLM's keys."""
    ms = sample_ms if sample_ms.size else np.zeros(1)
    values = {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
    }
    for p in percentiles:
        values[f"p{p:g}_{name}_ms"] = float(np.percentile(ms, p))
    return values


def mean(sample: Floats) -> float:
    return float(sample.mean()) if sample.size else 0.0


def count_good(
    samples_s: Mapping[str, Floats], goodput_ms: Mapping[str, float] | None
) -> int | None:
    """Requests that meet every target; None without targets."""
    if not goodput_ms:
        return None
    unknown = set(goodput_ms) - set(samples_s)
    if unknown:
        raise ValueError(f"goodput targets are {', '.join(samples_s)}, not {sorted(unknown)}")
    met = [samples_s[name] * 1e3 <= target for name, target in goodput_ms.items()]
    return int(np.logical_and.reduce(met).sum())


@dataclass(frozen=True, slots=True)
class SustainableRate:
    """The rate at which a metric meets its target, or the reason why the sweep does not say."""

    rate: float | None
    reason: str = ""


def sustainable_rate(
    rates: Sequence[float], values: Sequence[float], target: float
) -> SustainableRate:
    """Where the line between two adjacent measured rates first rises through `target` (6.1).

    Never extrapolates: a sweep that stays below or starts above has no answer.
    """
    points = sorted(zip(rates, values, strict=True))
    if len(points) < 2:
        return SustainableRate(None, "fewer than two rates were measured")
    if points[0][1] > target:
        return SustainableRate(
            None, f"already above {target:g} at the lowest rate {points[0][0]:g}"
        )
    for (r0, v0), (r1, v1) in pairwise(points):
        if v0 <= target < v1:
            return SustainableRate(r0 + (target - v0) / (v1 - v0) * (r1 - r0))
    return SustainableRate(None, f"still within {target:g} at the highest rate {points[-1][0]:g}")
