"""The plan under which points are measured: the user's own, with pools and limits that the sizes
need, every assist reachable, and as many layers as asked for."""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from dualpace.errors import ConfigError
from dualpace.graphs.source import resolve_source
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.batches import blocks_of
from dualpace.runtime.profile.config import SweepConfig
from dualpace.runtime.profile.points import (
    KINDS,
    Point,
    all_points,
    busy_rows,
    prefill_lengths,
)
from dualpace.settings.hardware import Hardware
from dualpace.settings.resolve import resolve
from dualpace.settings.schema import SystemConfig

C = TypeVar("C", bound=SystemConfig)


def measuring_plan(
    config: SystemConfig, sweep: SweepConfig, points: Sequence[Point], hardware: Hardware
) -> Plan:
    """Limits are those of the whole sweep, so that every point runs the same graphs; pools hold
    what these points need. Raises ConfigError where the machine's memory does not."""
    config = copy.deepcopy(config)
    config.hw.profile = None
    context = served_context(config, sweep, hardware)
    config.compile.start = "ahead"  # nothing may compile beside a measurement
    config.assist.post_attention_limit = config.assist.post_layer_limit = 0
    batches = {kind: [p.batch for p in all_points(sweep) if p.kind == kind] for kind in KINDS}
    config.cpu.max_batch_size = max([1, *batches["route"], *batches["beside"], *batches["decode"]])
    config.gpu.max_batch_size = max(
        [1, sweep.calibration_rows, *batches["step"], *batches["prefill"]]
    )
    tokens = [b * n for b in batches["prefill"] for n in prefill_lengths(sweep, b)]
    config.gpu.max_batched_tokens = max([config.gpu.max_batch_size, *tokens])
    config.gpu.token_limit = config.gpu.max_batched_tokens
    config.model.max_context = None  # what these pools allow
    config.kv.gpu_gib = config.kv.host_gib = None
    config.kv.gpu_blocks, config.kv.host_blocks = pool_sizes(sweep, points)
    short = shortened_source(config, sweep)
    plan = resolve(short, hardware)
    plan = replace(plan, model=replace(plan.model, max_context=context))
    if sweep.layers is None or plan.model.num_layers <= sweep.layers or plan.gpu.device != "cpu":
        return plan
    # The stand-in runs the first layers of a checkpoint; a device's graphs hold all of them.
    per_layer = plan.kv.bytes_per_block // plan.model.num_layers
    return replace(
        plan,
        model=replace(plan.model, num_layers=sweep.layers),
        kv=replace(plan.kv, bytes_per_block=sweep.layers * per_layer),
    )


def served_context(config: SystemConfig, sweep: SweepConfig, hardware: Hardware) -> int:
    """Tokens that graphs are built for: as in serving, so that these are the graphs of serving."""
    spec = resolve_source(config.model.source).spec
    longest = max(
        *sweep.decode_contexts, *sweep.step_contexts, *sweep.prefill_lengths,
        sweep.calibration_context,
    )  # fmt: skip
    if longest > spec.max_context:
        raise ConfigError(
            f"the longest context or prompt of this sweep, {longest} tokens, is beyond the model's "
            f"{spec.max_context}: shorten profile.decode_contexts, step_contexts or "
            f"prefill_lengths."
        )
    return max(resolve(config, hardware).model.max_context, longest)


def pool_sizes(sweep: SweepConfig, points: Sequence[Point]) -> tuple[int, int]:
    """Usable blocks of both pools for the largest batch of these points."""
    context = sweep.calibration_context
    gpu, host = [1, blocks_of(busy_rows(sweep), context)], [1]
    for point in points:
        match point.kind:
            case "route":
                host.append(blocks_of(point.batch, context))
            case "beside":
                host.append(blocks_of(point.batch, 1))
            case "decode":
                host += [blocks_of(point.batch, n) for n in sweep.decode_contexts]
            case "prefill":
                gpu += [blocks_of(point.batch, n) for n in prefill_lengths(sweep, point.batch)]
            case "step":
                gpu += [blocks_of(point.batch, n) for n in sweep.step_contexts]
            case "copies":
                gpu.append(point.batch)
                host.append(point.batch)
    return max(gpu), max(host)


def shortened_source(config: C, sweep: SweepConfig) -> C:
    """Random weights of fewer layers cost less to make; a file beside the points says which."""
    source = resolve_source(config.model.source)
    if sweep.layers is None or source.kind != "random" or source.spec.num_layers <= sweep.layers:
        return config
    folder = Path(sweep.results).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{source.name}-{sweep.layers}-layers.json"
    spec = replace(source.spec, num_layers=sweep.layers)
    file.write_text(json.dumps(asdict(spec)))
    config.model.source = f"random:{file}"
    return config
