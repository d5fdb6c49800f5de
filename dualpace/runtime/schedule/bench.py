"""Times one scheduling round with both engines full."""

import json
import statistics
import time
from dataclasses import replace

from dualpace.runtime.schedule.limits import Limits
from dualpace.runtime.schedule.policies import make_policy
from dualpace.runtime.schedule.rounds import RowKind
from dualpace.runtime.schedule.state import State
from dualpace.runtime.types import Request, blocks_for


def full_state(rows: int) -> State:
    """`rows` requests of 512 tokens decode on each engine, with room for 512."""
    blocks_each = blocks_for(512 + 512)
    limits = Limits(rows, rows, soft_tokens=513 * rows, hard_tokens=513 * rows)
    pool = rows * blocks_each + 1
    state = State(limits, pool, 2 * pool, make_policy("dualpace"), look_ahead=True)
    for index in range(2 * rows):
        state.add(Request(index, 512, 512))
    prefill(state)
    spare = state.gpu_pool.num_free - rows  # the next tokens fit, prompts do not
    shut = state.gpu_pool.allocate(spare)
    state.limits = replace(limits, gpu_rows=2 * rows)
    prefill(state)
    state.gpu_pool.free(shut)
    state.limits = limits
    return state


def prefill(state: State) -> None:
    step = state.schedule_gpu()
    assert step is not None
    state.apply_gpu(step, ())
    state.transfer_done([row.transfer_id for row in step.rows if row.kind is RowKind.PREFILL_CPU])


def measure(rows: int, rounds: int) -> dict[str, float]:
    """Cost of one round in ms, schedule and apply together: median, minimum, 99th percentile."""
    state = full_state(rows)
    times: dict[str, list[float]] = {"gpu": [], "cpu": []}
    sizes = {"gpu": 0, "cpu": 0}
    for _ in range(rounds):
        begin = time.perf_counter()
        step = state.schedule_gpu()
        if step:
            state.apply_gpu(step, ())
            times["gpu"].append(time.perf_counter() - begin)
            sizes["gpu"] = len(step.rows)
        begin = time.perf_counter()
        cpu = state.schedule_cpu()
        if cpu:
            state.apply_cpu(cpu, ())
            times["cpu"].append(time.perf_counter() - begin)
            sizes["cpu"] = len(cpu.rows)
    result: dict[str, float] = {}
    for engine, seconds in times.items():
        result[f"{engine}_rows"] = sizes[engine]
        result[f"{engine}_round_ms"] = round(statistics.median(seconds) * 1e3, 4)
        result[f"{engine}_round_best_ms"] = round(min(seconds) * 1e3, 4)
        result[f"{engine}_round_p99_ms"] = round(statistics.quantiles(seconds, n=100)[98] * 1e3, 4)
    return result


def main(rows: int = 256, rounds: int = 500) -> None:
    """Prints a line for people and one of JSON."""
    result = measure(rows, rounds)
    for engine in ("gpu", "cpu"):
        print(
            f"{engine} round of {result[f'{engine}_rows']} rows: schedule and apply "
            f"{result[f'{engine}_round_ms']} ms, p99 {result[f'{engine}_round_p99_ms']} ms"
        )
    print(json.dumps(result))
