"""Records of the round log and the request log: the one format for live and simulated runs."""

from typing import Any

from dualpace.runtime.routing import Route
from dualpace.runtime.schedule.rounds import Applied, GpuStep
from dualpace.runtime.types import Request


def round_record(
    engine: str, applied: Applied, started_s: float, duration_s: float, route: Route | None = None
) -> dict[str, Any]:
    """One applied round as a JSON-ready dict. `engine` is "gpu" or "cpu"; `started_s` is when its
    batch started on the device.

    Block counts and queue lengths are those the round ran with, right after its commit, so
    Equation 2 can be checked wherever something was admitted; `batch` and `finished` are what
    came of it. `marked` are marks newly set, `prefill_gpu` every prompt or chunk. `preempted`
    holds whoever lost its KV since this engine's last round, a lost worker's requests included.
    """
    step = applied.step
    gpu = step if isinstance(step, GpuStep) else None
    seen, host = step.snapshot, step.snapshot.host
    return {
        "t": started_s,
        "engine": engine,
        "round": step.number,
        "batch": applied.batch,
        "prefill_gpu": gpu.prefill_gpu if gpu else [],
        "prefill_cpu": gpu.prefill_cpu if gpu else [],
        "swap_out": gpu.swap_out if gpu else [],
        "swap_in": gpu.swap_in if gpu else [],
        "marked": gpu.marked if gpu else [],
        "finished": [r.id for r in applied.finished],
        "preempted": step.preempted,
        "gpu_blocks": {"capacity": seen.gpu_capacity, "used": seen.gpu_used},
        "host_blocks": {
            "capacity": host.capacity,
            "used": host.used,
            "planned": host.planned,
            "growth": host.growth,
            "migration": host.migration,
        },
        "waiting": seen.waiting,
        "gpu_running": seen.gpu_running,
        "cpu_waiting": seen.cpu_waiting,
        "cpu_running": seen.cpu_running,
        "route": route.name if route is not None else None,
        "duration": duration_s,
    }


def request_record(
    request: Request, output_len: int, *, refused: bool = False, cancelled: bool = False
) -> dict[str, Any]:
    """One entry of the request log; arrival in seconds."""
    record: dict[str, Any] = {
        "id": request.id,
        "arrival": request.arrival_s,
        "prompt_len": request.prompt_len,
        "output_len": output_len,
        "max_tokens": request.max_tokens,
    }
    if request.num_preemptions:  # times that its KV was dropped and computed again
        record["preemptions"] = request.num_preemptions
    if refused:
        record["refused"] = True
    if cancelled:
        record["cancelled"] = True
    return record
