"""Hand-made views, for tests of where a budget ends: one engine's round without a state."""

from collections.abc import Sequence
from typing import Any

from dualpace.runtime.schedule import HostEnvelope, Limits, View
from dualpace.runtime.schedule.envelope import finish_growth, gpu_peak, migration_reserve
from dualpace.runtime.schedule.estimate import Declared
from dualpace.runtime.types import Owner, Phase, Request


def decoding(
    request_id: int, blocks: int, peak: int, kv_len: int | None = None, owner: Owner = Owner.GPU
) -> Request:
    """A request with KV; by default its next token needs no block."""
    kv_len = 16 * blocks - 1 if kv_len is None else kv_len
    return Request(
        request_id,
        prompt_len=kv_len,
        max_tokens=100,
        order=request_id,
        owner=owner,
        phase=Phase.DECODING,
        num_output=1,
        kv_len=kv_len,
        blocks=list(range(1, blocks + 1)),
        estimated_output=50,
        peak_blocks=peak,
    )


def on_host(request_id: int, blocks: int, peak: int, kv_len: int | None = None) -> Request:
    return decoding(request_id, blocks, peak, kv_len, Owner.CPU)


def prompt(request_id: int, length: int, max_tokens: int = 1) -> Request:
    """Of one token of output its finish peak is what it takes now."""
    return Request(request_id, length, max_tokens, order=request_id)


def in_progress(request_id: int, length: int, done: int, peak: int) -> Request:
    """A prompt whose first chunks are computed."""
    request = prompt(request_id, length, 2)
    request.kv_len, request.peak_blocks = done, peak
    request.blocks = list(range(1, -(-length // 16) + 1))
    return request


def view(
    *,
    gpu_running: Sequence[Request] = (),
    waiting: Sequence[Request] = (),
    cpu_running: Sequence[Request] = (),
    cpu_waiting: Sequence[Request] = (),
    hbm: int = 100,
    free: int | None = None,
    host: int = 100,
    gpu_rows: int = 8,
    soft: int = 256,
    hard: int = 1024,
    staging: int | None = None,
    **more: Any,
) -> View:
    """Pools of `hbm` and `host` usable blocks; `free` HBM blocks, by default those that nobody
    has; the reserve as `State` would publish it."""
    on_gpu = [*gpu_running, *(r for r in waiting if r.blocks)]
    host_residents = [*cpu_running, *cpu_waiting]
    used, peak = sum(len(r.blocks) for r in host_residents), gpu_peak(on_gpu)
    reserve = migration_reserve(reversed(gpu_running), peak, hbm)
    fields: dict[str, Any] = {
        "limits": Limits(gpu_rows, 8, soft, hard, staging),
        "waiting": waiting,
        "gpu_running": gpu_running,
        "cpu_waiting": cpu_waiting,
        "cpu_running": cpu_running,
        "marked": [r for r in host_residents if r.marked],
        "gpu_capacity": hbm,
        "gpu_free": hbm - sum(len(r.blocks) for r in on_gpu) if free is None else free,
        "gpu_peak": peak,
        "gpu_vacating": 0,
        "host_free": host - used,
        "envelope": HostEnvelope(host, used, 0, finish_growth(cpu_running), reserve),
        "rounds_in_flight": 0,
        "transfers_in_flight": 0,
        "staging_busy": False,
        "estimate": Declared().estimate,
    }
    return View(**fields | more)
