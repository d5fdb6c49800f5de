"""What each kind of point measures, through the parts that serve. Results are plain JSON values:
times in ms, throughput in tokens/s of one layer. Where the CPU has several ranks all of them run a
point of `ON_HOST`; the GPU is the first one's to drive, and so are the results.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch

from dualpace.graphs.weights import DTYPES
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.messages import AssistDone, CpuBatch, GpuBatch, TransfersDone
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.batches import BatchMaker
from dualpace.runtime.profile.config import SweepConfig
from dualpace.runtime.profile.host import HostWorker, Wait
from dualpace.runtime.profile.peer import GpuPeer
from dualpace.runtime.profile.points import Point, busy_rows, prefill_lengths
from dualpace.runtime.profile.station import Station
from dualpace.runtime.profile.team import Team
from dualpace.runtime.profile.timing import Effort, Sample, sample, wall_clock
from dualpace.runtime.routing import Route
from dualpace.runtime.scores import AssistCall
from dualpace.runtime.types import TransferKind
from dualpace.runtime.worker.rows import SamplingArrays, cpu_work

Values = dict[str, Any]


def effort_of(sweep: SweepConfig) -> Effort:
    return Effort(sweep.warmups, sweep.invocations, sweep.repeats, sweep.max_seconds)


class HostStation(Protocol):
    """What every CPU rank has; the first one's is a `Station`."""

    plan: Plan
    batches: BatchMaker

    @property
    def cpu(self) -> HostWorker: ...


@torch.inference_mode()
def measure(point: Point, station: HostStation, sweep: SweepConfig) -> Values:
    """The values of one point; on other ranks than the first, nothing that counts."""
    if point.kind in ON_HOST:
        values = ON_HOST[point.kind](point.batch, station, sweep)
        ends = station.cpu.team.of_ranks(-float(point.batch))
        assert set(ends) == {-float(point.batch)}, "ranks have made different calls"
        return values
    assert isinstance(station, Station)
    return _ON_GPU[point.kind](point.batch, station, sweep)


def device_ms(done: AssistDone) -> float:
    """G: the device's interval, data movement and kernels (Appendix B)."""
    return 1e3 * (done.h2d_s + done.compute_s + done.sampling_s + done.d2h_s)


# ---- route


def _route(rows: int, station: HostStation, sweep: SweepConfig) -> Values:
    samples = {
        name: sample(run, effort_of(sweep)) for name, run in _primitives(rows, station, sweep)
    }
    return {
        "samples": {name: taken.to_json() for name, taken in samples.items()},
        "assists": _assists(rows, station, sweep),
        "calls": _calibration(rows, station, sweep),
    }


def _primitives(
    rows: int, station: HostStation, sweep: SweepConfig
) -> Iterator[tuple[str, Callable[[int], Sequence[float]]]]:
    """Equation 11's CPU primitives by name; layers take turns, so that weights come from memory."""
    cpu, layers = station.cpu, station.cpu.num_layers
    x, attention, sampling = _activations(rows, station)
    positions = torch.full((rows,), sweep.calibration_context - 1)
    client, there = cpu.client, cpu.client.shared.residual[:rows]
    calls: dict[str, Callable[[int], object]] = {
        "post_attention": lambda i: cpu.full.finish_layer(i % layers, attention, x),
        "post_layer": lambda i: cpu.full.draw(x, sampling),
        # Attention writes its output there itself, and a layer's output stays there.
        "write": lambda i: client.write(there),
        "read": lambda i: client.shared.residual[:rows],
        "write_final": lambda i: client.write(x, sampling),
        "pre_attention": lambda i: cpu.stages.pre_attention(i % layers, x, positions),
    }
    for name, call in calls.items():
        yield name, wall_clock(call, cpu.team)


def _activations(
    rows: int, station: HostStation
) -> tuple[torch.Tensor, torch.Tensor, SamplingArrays]:
    batch = station.batches.host_decode(rows, 1, Route.FULL_CPU)
    x = station.cpu.stages.pre_layer(torch.from_numpy(batch.token_ids.astype(np.int64)))
    attention = station.cpu.full.attention_out(x)
    attention.copy_(x.repeat(1, -(-attention.shape[1] // x.shape[1]))[:, : attention.shape[1]])
    return x, attention, cpu_work(batch).sampling


def _assists(rows: int, station: HostStation, sweep: SweepConfig) -> Values:
    """g_x and its parts with an idle GPU, as the GPU worker reports them; of several ranks the
    first one, which waits for the others' sums.
    """
    cpu, gpu = station.cpu, station.gpu if isinstance(station, Station) else None
    x, attention, sampling = _activations(rows, station)
    cpu.client.shared.attention[:rows] = attention
    asks: dict[AssistKind, Callable[[int], object]] = {
        AssistKind.POST_ATTENTION: lambda i: cpu.fused.finish_layer(
            i % (cpu.num_layers - 1), attention, x
        ),
        AssistKind.POST_ATTENTION_FINAL: lambda i: cpu.fused.draw(x, sampling),
        AssistKind.POST_LAYER: lambda i: cpu.split.draw(x, sampling),
    }
    found = {}
    for kind, ask in asks.items():
        records: list[AssistDone] = []
        taken = sample(partial(_one_assist, cpu.team, gpu, ask, records), effort_of(sweep))
        if gpu is None:
            continue
        timed = records[-taken.invocations * sweep.repeats :]
        parts = {
            part: 1e3 * float(np.mean([getattr(r, f"{part}_s") for r in timed]))
            for part in ("wait", "launch", "h2d", "compute", "sampling", "d2h", "finalize")
        }
        found[kind.name] = {**taken.to_json(), "parts": parts}
    cpu.take_waits()
    return found


def _one_assist(
    team: Team,
    gpu: GpuPeer | None,
    ask: Callable[[int], object],
    records: list[AssistDone],
    i: int,
) -> Sequence[float]:
    """Seconds on the device; the record is kept."""
    ask(i)
    seconds = 0.0
    if gpu is not None:
        records.append(gpu.expect(AssistDone))
        seconds = device_ms(records[-1]) / 1e3
    return (team.of_first(seconds),)


def _calibration(rows: int, station: HostStation, sweep: SweepConfig) -> list[Values]:
    """Assists of whole decode iterations while the GPU decodes a batch of its own."""
    if isinstance(station, Station) and sweep.calibration_rows:
        load = station.batches.decode(sweep.calibration_rows, sweep.calibration_context)
        station.gpu.run(load)
        with station.gpu.busy_with(load):
            _iterate(rows, station, sweep)
    else:
        _iterate(rows, station, sweep)
    waits = station.cpu.take_waits()
    if not isinstance(station, Station):
        return []
    records = [station.gpu.expect(AssistDone) for _ in waits]
    return [asdict(assist_call(wait, record)) for wait, record in zip(waits, records, strict=True)]


def _iterate(rows: int, station: HostStation, sweep: SweepConfig) -> None:
    """Fewer iterations where they would take longer than the time of one primitive and again."""
    cpu = station.cpu
    for route in (Route.FUSED_ASSIST, Route.SPLIT_FINAL):
        batch = station.batches.host_decode(rows, sweep.calibration_context, route)
        spent_s = 0.0
        for _ in range(sweep.calibration_iterations):
            spent_s += max(cpu.team.of_ranks(cpu.iterate(batch).duration_s))
            if spent_s > 2 * sweep.max_seconds:
                break


def assist_call(wait: Wait, record: AssistDone) -> AssistCall:
    """Both workers' records of one assist."""
    kind, rows, wait_s = wait
    assert (kind, rows) == (record.kind_of_assist, record.rows), "records come in order"
    launch, finalize = 1e3 * record.launch_s, 1e3 * record.finalize_s
    return AssistCall(kind, rows, 1e3 * wait_s, device_ms(record), launch, finalize)


# ---- beside


def _beside(rows: int, station: HostStation, sweep: SweepConfig) -> Values:
    """What post-attention assists of `rows` rows, one behind another, cost the GPU's decode steps:
    `loss` is the time that these take longer, as a share of the device's time for the assists."""
    cpu, effort = station.cpu, effort_of(sweep)
    x, attention, _ = _activations(rows, station)
    assist = partial(_one_behind_another, cpu, attention, x, sweep)
    if not isinstance(station, Station):
        assist()
        cpu.take_waits()
        return {}
    gpu = station.gpu
    load = station.batches.decode(busy_rows(sweep), sweep.calibration_context)
    wanted = 1 + effort.repeats * effort.affordable(gpu.run(load).duration_s)
    alone = [step.duration_s for step in gpu.stream(load, lambda sent: sent < wanted)]
    alone_s = fmean(alone[1:])  # the device had been idle before the first
    with gpu.busy_with(load) as steps:
        assist()
    assists_s = [device_ms(gpu.expect(AssistDone)) / 1e3 for _ in cpu.take_waits()]
    lost_s = sum(step.duration_s - alone_s for step in steps)
    return {
        "steps": len(steps),
        "alone_ms": 1e3 * alone_s,
        "beside_ms": 1e3 * fmean(step.duration_s for step in steps),
        "assists": len(assists_s),
        "assist_ms": 1e3 * fmean(assists_s),
        "loss": max(lost_s, 0.0) / sum(assists_s),
    }


def _one_behind_another(
    cpu: HostWorker, attention: torch.Tensor, x: torch.Tensor, sweep: SweepConfig
) -> None:
    """Post-attention assists, for as long as one primitive may take."""
    effort, end_s = effort_of(sweep), time.monotonic() + sweep.max_seconds
    for i in range(effort.repeats * effort.invocations):
        cpu.fused.finish_layer(i % (cpu.num_layers - 1), attention, x)
        if cpu.team.of_first(time.monotonic() - end_s) > 0:
            break


# ---- decode, prefill, step, copies


def _decode(rows: int, station: HostStation, sweep: SweepConfig) -> Values:
    cpu, layers = station.cpu, station.cpu.num_layers
    found = []
    for context in sorted(set(sweep.decode_contexts)):
        batch = station.batches.host_decode(rows, context, Route.FULL_CPU)
        taken = sample(partial(_iteration, cpu, batch), effort_of(sweep))
        found.append(
            {
                "context": context,
                **taken.to_json(),
                "attention": _attention(batch, station, sweep).to_json(),
                "throughput": rows * layers / taken.ms * 1e3,
            }
        )
    return {"contexts": found}


def _iteration(cpu: HostWorker, batch: CpuBatch, i: int) -> Sequence[float]:
    return cpu.team.of_ranks(cpu.iterate(batch).duration_s)


def _attention(batch: CpuBatch, station: HostStation, sweep: SweepConfig) -> Sample:
    """One layer's attention on the CPU."""
    cpu, model = station.cpu, station.plan.model
    work = cpu_work(batch)
    cpu.attention.begin(work.decodes)
    shape = (len(work.positions), cpu.num_q_heads, model.head_dim)
    q = torch.rand(shape).to(DTYPES[model.dtype])
    out = torch.empty_like(q)
    run = wall_clock(lambda i: cpu.attention.run(i % cpu.num_layers, q, out), cpu.team)
    return sample(run, effort_of(sweep))


def _prefill(num_prompts: int, station: Station, sweep: SweepConfig) -> Values:
    # A device is known to have ended only when it gives a token; the stand-in has ended anyway.
    sampled = 0 if station.plan.gpu.device == "cpu" else 1
    found = []
    for length in prefill_lengths(sweep, num_prompts):
        batch = station.batches.prefill(num_prompts, length, sampled)
        taken = sample(partial(_step, station.gpu, batch), effort_of(sweep))
        tokens = num_prompts * length
        throughput = tokens * station.plan.model.num_layers / taken.ms * 1e3
        found.append(
            {"length": length, "tokens": tokens, **taken.to_json(), "throughput": throughput}
        )
    return {"lengths": found}


def _decode_steps(rows: int, station: Station, sweep: SweepConfig) -> Values:
    found = []
    for context in sorted(set(sweep.step_contexts)):
        batch = station.batches.decode(rows, context)
        taken = sample(partial(_step, station.gpu, batch), effort_of(sweep))
        found.append({"context": context, **taken.to_json()})
    return {"contexts": found}


def _step(gpu: GpuPeer, batch: GpuBatch, i: int) -> Sequence[float]:
    return (gpu.run(batch).duration_s,)


def _copies(num_blocks: int, station: Station, sweep: SweepConfig) -> Values:
    """Swaps of `num_blocks` blocks, until the worker reports them."""
    found: Values = {"bytes": num_blocks * station.plan.kv.bytes_per_block}
    for name, kind in (("swap_out", TransferKind.SWAP_OUT), ("swap_in", TransferKind.SWAP_IN)):
        batch = station.batches.swap(num_blocks, kind)

        def swap(i: int, batch: GpuBatch = batch) -> None:
            station.gpu.run(batch)
            station.gpu.expect(TransfersDone)

        found[name] = sample(wall_clock(swap, Team(None)), effort_of(sweep)).to_json()
    return found


ON_HOST: dict[str, Callable[[int, HostStation, SweepConfig], Values]] = {
    "route": _route,
    "beside": _beside,
    "decode": _decode,
}
_ON_GPU: dict[str, Callable[[int, Station, SweepConfig], Values]] = {
    "prefill": _prefill,
    "step": _decode_steps,
    "copies": _copies,
}
