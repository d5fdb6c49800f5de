"""One simulation from its settings to its result: puts the parts together and writes the files."""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dualpace.cpu.config import MAX_BATCH_SIZE
from dualpace.errors import ConfigError
from dualpace.runtime.bench.metrics import summarize, window_rates
from dualpace.runtime.bench.workload import RequestSpec, load_workload, means
from dualpace.runtime.config import NEO_LAUNCH_MS, TOKEN_LIMIT, NeoPolicyConfig
from dualpace.runtime.engine.logs import RequestLog, RoundLog
from dualpace.runtime.routing import Route, route
from dualpace.runtime.schedule.estimate import make_estimator
from dualpace.runtime.schedule.host_admission import ProfiledAdmission
from dualpace.runtime.schedule.limits import Limits
from dualpace.runtime.schedule.log import round_record
from dualpace.runtime.schedule.policies import Policy, make_policy
from dualpace.runtime.schedule.rounds import Applied
from dualpace.runtime.schedule.state import State
from dualpace.runtime.simulate.cost import CostModel, Curve
from dualpace.runtime.simulate.predictor import LayerPredictor
from dualpace.runtime.simulate.simulator import Simulation, Timeline
from dualpace.runtime.simulate.times import step_times
from dualpace.runtime.simulate.work import GpuWorkModel
from dualpace.settings.hardware import GIB
from dualpace.settings.paths import log_file
from dualpace.settings.schema import SimulateConfig

TIMELINE_POINTS = 2000
MAX_BLOCKS = 10_000_000  # of a pool: 160 million tokens


def simulate(config: SimulateConfig) -> dict[str, Any]:
    """Run one simulation and return its result: the metrics, and what they were measured on.

    Writes `result`, `runtime.round_log` and `runtime.request_log` where they are named. Raises
    ConfigError for settings that cannot work.
    """
    config = with_files(config)
    requests = load_workload(config.workload)
    cost = CostModel(config.simulated, config.cpu.tp, config.assist.mode)
    state = make_state(config, cost)
    limits = assist_limits(config)
    with ExitStack() as stack:
        run = make_simulation(config, cost, state, requests, limits, stack)
        started = time.process_time()
        records = run.run()
        simulator_s = time.process_time() - started
    if not any(record.completed for record in records):
        raise ConfigError(f"None of {len(records)} requests can be served: {records[0].error}.")
    result = describe(config, state, requests, limits)
    result["assist_mode"] = "stream" if cost.beside else "boundary"
    result |= summarize(records)
    if config.window is not None:
        result |= window_rates(records, *config.window)
        result["window_host_share"] = host_share(run.timeline, *config.window)
    result |= occupancy(run, result["duration"])
    result["timeline"] = downsample(run.timeline, TIMELINE_POINTS)
    result["timeline"]["pauses"] = run.pauses.long
    result["simulator_s"] = round(simulator_s, 3)
    write_requests(config, run, requests)
    if config.result:
        Path(config.result).write_text(json.dumps(result))
    return result


def with_files(config: SimulateConfig) -> SimulateConfig:
    """`config` with absolute paths of files that can be written, tried before the run."""
    if config.result is not None:
        with suppress(OSError):  # log_file says what is wrong
            Path(config.result).expanduser().parent.mkdir(parents=True, exist_ok=True)
    logs = replace(
        config.runtime,
        round_log=log_file("runtime.round_log", config.runtime.round_log),
        request_log=log_file("runtime.request_log", config.runtime.request_log),
    )
    return replace(config, result=log_file("result", config.result), runtime=logs)


def make_state(config: SimulateConfig, cost: CostModel) -> State:
    """The scheduler as the live engine would build it, with the profile's pools by default."""
    gpu, limits = config.gpu, config.simulated.limits
    soft_tokens = gpu.token_limit or TOKEN_LIMIT
    kv = config.kv
    own = pool_blocks("gpu", kv.gpu_blocks, kv.gpu_gib, cost, limits.gpu_blocks)
    host = pool_blocks("host", kv.host_blocks, kv.host_gib, cost, limits.host_blocks)
    return State(
        Limits(
            gpu_rows=gpu.max_batch_size,
            cpu_rows=config.cpu.max_batch_size or MAX_BATCH_SIZE,
            soft_tokens=soft_tokens,
            hard_tokens=gpu.hard_limit(soft_tokens),
            cpu_waiting=config.cpu.max_waiting,
        ),
        own + 1,  # scratch
        host + 1,
        make_simulated_policy(config, cost),
        make_estimator(config.kv.output_estimate),
        config.runtime.look_ahead,
    )


def pool_blocks(
    tier: str, blocks: int | None, gib: float | None, cost: CostModel, default: int
) -> int:
    """ConfigError for more than `MAX_BLOCKS`, each of which is listed."""
    if blocks is None:
        blocks = default if gib is None else int(gib * GIB / cost.kv_block_bytes)
    if blocks > MAX_BLOCKS:
        raise ConfigError(
            f"kv.{tier}_blocks={blocks} is more than the {MAX_BLOCKS} blocks that a simulation "
            f"keeps account of: lower it, or kv.{tier}_gib."
        )
    return blocks


def assist_limits(config: SimulateConfig) -> tuple[int, int]:
    """(P, F): those that were set, else the profile's."""
    p, f = config.assist.post_attention_limit, config.assist.post_layer_limit
    if p is None or f is None:
        p = config.simulated.limits.post_attention_limit
        f = config.simulated.limits.post_layer_limit
    return p, f


def make_simulation(
    config: SimulateConfig,
    cost: CostModel,
    state: State,
    requests: Sequence[RequestSpec],
    limits: tuple[int, int],
    stack: ExitStack,
) -> Simulation:
    p, f = limits
    has_cpu_engine = state.policy.has_cpu_engine
    reaches_assist = has_cpu_engine and (config.cpu.max_batch_size or MAX_BATCH_SIZE) > f
    has_boundaries = reaches_assist and not cost.beside
    poll_s = config.simulated.gpu.poll_us / 1e6 if has_boundaries else 0.0
    return Simulation(
        state,
        cost,
        GpuWorkModel(cost, host_kernel(config, cost), poll_s),
        requests,
        route=(lambda rows: route(rows, p, f)) if has_cpu_engine else None,
        on_round=round_writer(config, stack),
    )


def round_writer(
    config: SimulateConfig, stack: ExitStack
) -> Callable[[str, Applied, Route | None, float, float], None] | None:
    """Writes each applied round to the round log; None if no log is named."""
    if config.runtime.round_log is None:
        return None
    log = RoundLog(config.runtime.round_log)
    stack.callback(log.flush)

    def write(
        engine: str, applied: Applied, taken: Route | None, start_s: float, duration_s: float
    ) -> None:
        log.write(round_record(engine, applied, start_s, duration_s, taken))

    return write


def write_requests(
    config: SimulateConfig, run: Simulation, requests: Sequence[RequestSpec]
) -> None:
    if config.runtime.request_log is None:
        return
    log = RequestLog(config.runtime.request_log)
    for spec in requests:
        record = run.records[spec.id]
        refused = record.error is not None
        tokens = len(record.token_times_s)
        log.write(run.requests[spec.id], tokens, refused=refused)
    log.close()


def describe(
    config: SimulateConfig,
    state: State,
    requests: Sequence[RequestSpec],
    limits: tuple[int, int],
) -> dict[str, Any]:
    """What the numbers were measured on."""
    prompt_mean, output_mean = means(requests)
    return {
        "kind": "simulated",
        "profile": config.simulated.name,
        "policy": config.policy.name,
        "variant": config.variant,
        "workload": config.workload.label or config.workload.name,
        "rate": config.workload.rate if math.isfinite(config.workload.rate) else "inf",
        "arrival": config.workload.arrival,
        "num_requests": len(requests),
        "prompt_mean": prompt_mean,
        "output_mean": output_mean,
        "seed": config.workload.seed,
        "gpu_blocks": state.gpu_pool.capacity,
        "host_blocks": state.host_pool.capacity,
        "output_estimate": config.kv.output_estimate,
        "post_attention_limit": limits[0],
        "post_layer_limit": limits[1],
    }


def occupancy(run: Simulation, duration: float) -> dict[str, Any]:
    """Counters beyond vLLM's: how much the devices worked and what moved."""
    seconds = duration or 1.0
    return {
        "gpu_rounds": run.rounds["gpu"],
        "cpu_rounds": run.rounds["cpu"],
        "preemptions": run.preemptions,
        "gpu_busy": (run.gpu.busy_s + run.gpu.assist_s) / seconds,
        "gpu_assist": run.gpu.assist_s / seconds,
        "cpu_busy": run.cpu.busy_s / seconds,
        "host_pause_max_s": run.pauses.longest_s,
        "host_pause_above_1s_s": sum(end - start for start, end in run.pauses.long),
        "to_host_gib": run.link.to_host_bytes / GIB,
        "to_gpu_gib": run.link.to_gpu_bytes / GIB,
    }


def host_share(timeline: Timeline, low: float, high: float) -> float:
    """Of the tokens from `low` to before `high`, those decoded in host memory."""
    tokens = on_host = 0
    for t, count, here in zip(timeline.t, timeline.tokens, timeline.cpu_tokens, strict=True):
        if low <= t < high:
            tokens, on_host = tokens + count, on_host + here
    return on_host / max(tokens, 1)


def downsample(timeline: Timeline, points: int) -> dict[str, list[Any]]:
    """Cumulative tokens, all and CPU-resident, at evenly spaced times (seconds)."""
    if not timeline.t:
        return {"t": [], "tokens": [], "cpu_tokens": []}
    end = timeline.t[-1]
    marks = [end * i / points for i in range(points + 1)]
    result: dict[str, list[Any]] = {"t": marks, "tokens": [], "cpu_tokens": []}
    place = tokens = cpu_tokens = 0
    for mark in marks:
        while place < len(timeline.t) and timeline.t[place] <= mark:
            tokens += timeline.tokens[place]
            cpu_tokens += timeline.cpu_tokens[place]
            place += 1
        result["tokens"].append(tokens)
        result["cpu_tokens"].append(cpu_tokens)
    return result


def make_simulated_policy(config: SimulateConfig, cost: CostModel) -> Policy:
    """The policy under its own options; predictions are of the same costs that are then paid."""
    policy = config.policy
    options = {f.name: getattr(policy, f.name) for f in fields(policy)}
    name = options.pop("name")
    if options.pop("host_admission", None) == "profile":
        options["admission"] = ProfiledAdmission(step_times(cost, assist_limits(config)))
    if isinstance(policy, NeoPolicyConfig):
        del options["launch_ms"], options["fp16_kernel"]
        kernel = host_kernel(config, cost)
        launch_ms = NEO_LAUNCH_MS if policy.launch_ms is None else policy.launch_ms
        options["predictor"] = LayerPredictor(cost, kernel, launch_ms / 1e3)
    return make_policy(name, **options)


def host_kernel(config: SimulateConfig, cost: CostModel) -> Curve:
    """The CPU attention kernel that rows in lockstep with the GPU run."""
    policy = config.policy
    fp16 = isinstance(policy, NeoPolicyConfig) and policy.fp16_kernel
    return cost.cpu_attention_fp16 if fp16 else cost.cpu_attention
