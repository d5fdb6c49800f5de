"""Result files of the simulator and the benchmark, found and read. Knows only their keys."""

import json
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dualpace.errors import ConfigError

log = logging.getLogger(__name__)

Result = dict[str, Any]

# What tables and figures take for granted in every result; the rate may be "inf", too.
_TEXTS = ("policy", "profile", "workload")
_NUMBERS = (
    *("num_requests", "prompt_mean", "output_mean", "seed", "failed"),
    *("request_throughput", "output_throughput", "total_output_tokens", "cpu_resident_tokens"),
    *("mean_normalized_latency_s_per_token", "mean_e2el_ms", "median_itl_ms"),
    *("p99_ttft_ms", "p99_itl_ms", "p99_tpot_ms"),
)


def load_results(paths: Iterable[str]) -> list[Result]:
    """Every result under the given files and folders; other JSON is passed over. ConfigError for
    what cannot be read, and where there is none."""
    paths = list(paths)
    results: list[Result] = []
    for path in (Path(path).expanduser() for path in paths):
        if not path.exists():
            raise ConfigError(f"results={path} does not exist: name files or folders of results.")
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            results += _in_file(file)
    if not results:
        raise ConfigError(
            f"results=[{','.join(paths)}] hold no result: scripts/simulate.py and scripts/bench.py "
            f"write one with result=FILE."
        )
    return results


def _in_file(file: Path) -> list[Result]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"results: {file} cannot be read ({error.strerror}).") from None
    except ValueError as error:  # no JSON, or no text
        raise ConfigError(f"results: {file} is not valid JSON: {error}.") from None
    found = []
    for item in content if isinstance(content, list) else [content]:
        if not isinstance(item, dict) or "policy" not in item:
            continue
        if faults := _faults(item):
            where = "is no result and passed over: missing or of another type"
            log.info("%s %s: %s", file, where, ", ".join(faults))
            continue
        found.append(item)
    return found


def _faults(item: Result) -> list[str]:
    """Keys of what should be a result that are not there, or not as they are in one."""
    faults = [key for key in _TEXTS if not isinstance(item.get(key), str)]
    faults += [key for key in _NUMBERS if not _is_number(item.get(key))]
    if item.get("rate") != "inf" and not _is_number(item.get("rate")):
        faults.append("rate")
    if not isinstance(item.get("variant", 0), str | None):
        faults.append("variant")
    timeline = item.get("timeline")
    if timeline is not None and not (
        isinstance(timeline, dict) and {"t", "tokens", "cpu_tokens"} <= timeline.keys()
    ):
        faults.append("timeline")
    return faults


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def in_order(results: Sequence[Result], profiles: Sequence[str]) -> list[Result]:
    """The results of these profiles, in this order; all of them if none is named."""
    if not profiles:
        return list(results)
    there = {str(r["profile"]) for r in results}
    if unknown := [name for name in profiles if name not in there]:
        raise ConfigError(
            f"profiles=[{','.join(unknown)}] are in none of the results, which have "
            f"{', '.join(sorted(there))}."
        )
    chosen = [r for r in results if r["profile"] in profiles]
    return sorted(chosen, key=lambda r: profiles.index(r["profile"]))
