"""What the engine's own work on a round costs with both tiers full.

Two numbers a round. `round`: the scheduler alone, schedule and apply. `loop`: all that the live
loops do from a worker's result to its next batch: tokens and stop rules, apply, round log and
counters, the next round, its batch in wire format, the message to the owner. The workers are played
by whoever asks; nothing is computed.

Times are CPU times of this thread, so other processes on the machine add little beyond colder
caches and a slower clock: the minimum of many rounds is the cost, the median what it tends to be.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dualpace.block import BLOCK_TOKENS
from dualpace.options import sentences, whole_number
from dualpace.runtime import messages
from dualpace.runtime.engine.engine import LLMEngine
from dualpace.runtime.engine.pair import WorkerPair
from dualpace.runtime.plan import Plan
from dualpace.runtime.sampling_params import SamplingParams
from dualpace.runtime.schedule.rounds import CpuStep, GpuStep
from dualpace.runtime.simulate.cost import CostModel
from dualpace.runtime.simulate.times import step_times
from dualpace.runtime.submissions import Submission, encode
from dualpace.runtime.types import RowKind
from dualpace.runtime.wire import Message
from dualpace.settings.compose import load
from dualpace.settings.resolve import resolve

PROMPT, OUTPUT = 512, 1024  # tokens of each request
TURNS = 5  # of the event loop, after which all loops have done what a message made them do
Times = dict[str, list[float]]  # engine -> ms of each round


class IdleWorker:
    """Takes batches, encodes them as a channel would, and computes nothing."""

    ready = True

    def __init__(self) -> None:
        self.num_batches = 0
        self._buffer = bytearray(1 << 22)

    def send(self, message: Message) -> None:
        message.encode_into(self._buffer)
        self.num_batches += 1


class IdlePair(WorkerPair):
    """Two of them where an engine has its processes."""

    ready = True
    epoch = 0

    def __init__(self, *_: object) -> None:
        self.gpu: Any = IdleWorker()
        self.cpu: Any = IdleWorker()


class FullEngine(LLMEngine):
    """An engine with `rows` requests decoding on each tier, and whoever measures it as workers."""

    def __init__(self, rows: int) -> None:
        super().__init__(make_plan(rows), self._encode, IdlePair)
        self._rows = rows
        self._idle: dict[str, Any] = {"gpu": self._workers.gpu, "cpu": self._workers.cpu}
        self.on_message(prompts(2 * rows))
        self._fill()

    def _encode(self, message: Message) -> None:
        message.encode()

    def _fill(self) -> None:
        """Half of the requests to HBM and, with HBM shut, half to the host."""
        state, rows = self._state, self._rows
        self._prefill()
        shut = state.gpu_pool.allocate(state.gpu_pool.num_free - rows)  # next tokens still fit
        limits, state.limits = state.limits, replace(state.limits, gpu_rows=2 * rows)
        self._prefill()
        state.limits = limits
        state.gpu_pool.free(shut)
        assert len(state.gpu_running) == len(state.cpu_waiting) == rows

    def _prefill(self) -> None:
        step = self._state.schedule_gpu()
        assert step is not None
        for row in step.rows:
            self._conversations[row.request.id].tokens.append(1)
        self._state.apply_gpu(step, ())
        copies = [row.transfer_id for row in step.rows if row.kind is RowKind.PREFILL_CPU]
        self._state.transfer_done(copies)

    def rounds(self, count: int) -> Times:
        """ms of schedule and apply alone."""
        state, times = self._state, Times(gpu=[], cpu=[])
        for _ in range(count):
            times["gpu"].append(timed(lambda: self._turn(state.schedule_gpu, state.apply_gpu)))
            times["cpu"].append(timed(lambda: self._turn(state.schedule_cpu, state.apply_cpu)))
        return times

    def _turn(self, schedule: Callable[[], Any], apply: Callable[[Any, Any], object]) -> None:
        step = schedule()
        assert len(step.rows) == self._rows
        apply(step, ())

    async def loops(self, count: int) -> Times:
        """ms from a result to the next batch, through the live loops."""
        times = Times(gpu=[], cpu=[])
        loops = (self._gpu_loop(), self._cpu_loop(), self._completion_loop())
        tasks = [asyncio.create_task(loop) for loop in loops]
        await settle()
        for _ in range(count):
            for role, worker in self._idle.items():
                done, before = self._result(role), worker.num_batches
                begin = time.thread_time_ns()
                self._on_worker_message(role, done)
                await settle()
                times[role].append((time.thread_time_ns() - begin) / 1e6)
                assert worker.num_batches == before + 1
        for task in tasks:
            task.cancel()
        return times

    def _result(self, role: str) -> messages.StepDone:
        step: GpuStep | CpuStep | None = self._gpu_steps[0] if role == "gpu" else self._cpu_step
        assert step is not None
        tokens = np.ones(len(step.rows), np.int32)
        return messages.StepDone(step.number, time.monotonic(), 0.0, tokens, 0)


def make_plan(rows: int) -> Plan:
    """For `rows` requests on each tier at once, on any machine."""
    blocks, tokens = rows * (PROMPT + OUTPUT) // BLOCK_TOKENS, (PROMPT + 2) * rows
    limits = (f"gpu.max_batch_size={rows}", f"cpu.max_batch_size={rows}")
    budgets = (f"gpu.token_limit={tokens}", f"gpu.max_batched_tokens={tokens}")
    pools = (f"kv.gpu_blocks={blocks}", f"kv.host_blocks={2 * blocks}")
    return resolve(load("model=tiny_random", "gpu.device=cpu", *limits, *budgets, *pools))


def prompts(count: int) -> messages.Submit:
    asked = [SamplingParams(max_tokens=OUTPUT, seed=i, ignore_eos=True) for i in range(count)]
    return encode([Submission(i, 0.0, [1] * PROMPT, params) for i, params in enumerate(asked)])


def timed(work: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - begin) / 1e6


async def settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def predicted_ms(machine: str, rows: int) -> tuple[float, float]:
    """A GPU round and a CPU iteration of `rows` rows in the middle of their answers."""
    simulated = load(f"simulated={machine}", root="simulate").simulated
    limits = simulated.limits
    times = step_times(CostModel(simulated), (limits.post_attention_limit, limits.post_layer_limit))
    kv_tokens = rows * (PROMPT + OUTPUT // 2)
    gpu_s = times.gpu_decode_s(rows, kv_tokens)
    return 1e3 * gpu_s, 1e3 * times.cpu_decode_s(rows, kv_tokens, gpu_s)


def measure(rows: int, rounds: int) -> dict[str, float]:
    """Median, minimum and 99th percentile in ms."""
    kinds = {
        "round": FullEngine(rows).rounds(rounds),
        "loop": asyncio.run(FullEngine(rows).loops(rounds)),
    }
    result: dict[str, float] = {"rows": rows, "rounds": rounds}
    for kind, times in kinds.items():
        for engine, ms in times.items():
            key = f"{engine}_{kind}"
            result[f"{key}_ms"] = round(statistics.median(ms), 4)
            result[f"{key}_best_ms"] = round(min(ms), 4)
            result[f"{key}_p99_ms"] = round(statistics.quantiles(ms, n=100)[98], 4)
    return result


@sentences()
def main() -> None:
    """Prints lines for people and one of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="example: python scripts/bench_schedule.py --rows 64 --machine h200_llama_31_8b",
    )
    parser.add_argument("--rows", type=whole_number, default=256, help="requests on each tier")
    parser.add_argument("--rounds", type=whole_number, default=400, help="to measure")
    parser.add_argument(
        "--machine",
        default="rtx4090_llama31_8b",
        help="whose step to compare, as simulated= (default: %(default)s)",
    )
    parser.add_argument("--step-ms", type=float, help="a GPU step; default: predicted for it")
    args = parser.parse_args()
    gpu_ms, cpu_ms = predicted_ms(args.machine, args.rows)
    result = measure(args.rows, args.rounds)
    result["step_ms"] = args.step_ms or round(gpu_ms, 2)
    result["cpu_step_ms"] = round(cpu_ms, 2)
    for engine, step_ms in (("gpu", result["step_ms"]), ("cpu", cpu_ms)):
        print(f"{engine}, {args.rows} rows, beside a step of {step_ms:.1f} ms:")
        for kind, name in (("round", "schedule and apply"), ("loop", "live loop, batch included")):
            key = f"{engine}_{kind}"
            best, median, p99 = (result[f"{key}{end}_ms"] for end in ("_best", "", "_p99"))
            print(
                f"  {name:26} best {best:.3f}, median {median:.3f}, p99 {p99:.3f} ms of CPU time, "
                f"{100 * median / step_ms:.1f} % of the step"
            )
    print(json.dumps(result))
