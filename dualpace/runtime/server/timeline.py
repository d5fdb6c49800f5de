"""The time line of a start as one table: seconds of each part, a column a worker."""

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "import": "importing torch",
    "weights": "loading weights",
    "stages": "building stages",
    "pools": "making KV pools",
    "host_pool": "waiting for memory",
    "attention": "warming up attention",
}
_WIDTH = 24


def start_table(info: Mapping[str, Any], ready_s: float) -> list[str]:
    """Lines for people. `info` is what the engine said when it was ready: each worker's seconds by
    phase (see `worker.progress.Progress`), phases of later versions included.
    """
    workers = {
        role: info[role]["seconds"] for role in ("gpu", "cpu") if "seconds" in info.get(role, {})
    }
    phases = dict.fromkeys(phase for seconds in workers.values() for phase in seconds)
    head = "".join(f"{role.upper() + ' worker':>14}" for role in workers)
    lines = [f"{'Start, seconds':{_WIDTH}}{head}"]
    for phase in phases:
        cells = "".join(
            f"{seconds[phase]:14.1f}" if phase in seconds else f"{'-':>14}"
            for seconds in workers.values()
        )
        lines.append(f"  {_NAMES.get(phase, phase):{_WIDTH - 2}}{cells}")
    lines.append(f"  {'ready after':{_WIDTH - 2}}{ready_s:14.1f}")
    return lines
