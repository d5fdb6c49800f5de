"""What a server's own counters say about a run: Prometheus texts from before and after it."""

import re
from collections.abc import Mapping
from typing import Any

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# Result key -> metric, and the label value that picks one of its samples.
_RISES: Mapping[str, tuple[str, str | None]] = {
    "preemptions": ("vllm:num_preemptions_total", None),
    "gpu_rounds": ("dualpace_rounds_total", "gpu"),
    "cpu_rounds": ("dualpace_rounds_total", "cpu"),
    "assists": ("dualpace_assists_total", None),
    "transfers": ("dualpace_transfers_total", None),
    "compiles_after_ready": ("dualpace_graph_compiles_after_ready_total", None),
}
_ASSIST = "dualpace_assist_seconds_total"
_BUSY = {"gpu_busy": "gpu", "cpu_busy": "cpu"}
_POOLS = {"gpu_blocks": "gpu", "host_blocks": "host"}

Samples = dict[str, list[tuple[dict[str, str], float]]]


def parse(text: str) -> Samples:
    """Metric -> its samples with their labels."""
    found: Samples = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            name, labels, value = match.groups()
            found.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), float(value)))
    return found


def engine_facts(before: str | None, after: str | None, seconds: float) -> dict[str, Any]:
    """Counters' rises, busy shares of `seconds` and pool sizes, as far as the server has them."""
    if before is None or after is None:
        return {}
    old, new = parse(before), parse(after)
    facts: dict[str, Any] = {}
    for key, (name, label) in _RISES.items():
        if name in new:
            facts[key] = round(_value(new, name, label) - _value(old, name, label))
    for key, label in _BUSY.items():
        name = "dualpace_busy_seconds_total"
        if name in new and seconds > 0:
            facts[key] = (_value(new, name, label) - _value(old, name, label)) / seconds
    if _ASSIST in new:
        parts = [part for labels, _ in new[_ASSIST] for part in labels.values()]
        facts["assist_seconds"] = {
            part: _value(new, _ASSIST, part) - _value(old, _ASSIST, part) for part in parts
        }
    for key, label in _POOLS.items():
        if "dualpace_kv_blocks_capacity" in new:
            facts[key] = round(_value(new, "dualpace_kv_blocks_capacity", label))
    return facts


def _value(samples: Samples, name: str, label: str | None) -> float:
    """The sum of the samples that carry `label` as a label's value; of all, if it is None."""
    rows = samples.get(name, [])
    return sum(value for labels, value in rows if label is None or label in labels.values())
