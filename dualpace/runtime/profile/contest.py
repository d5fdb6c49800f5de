"""Benchmark of CPU ranks: whole decode iterations by one rank with all cores and by several with a
share each, both kept ready in one run and timed by turns. See scripts/bench_tp.py.

A rank is the CPU worker as it serves (`contestant`), driven by the messages of serving; there is no
GPU worker, since every stage runs on the CPU.
"""

import copy
import json
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dualpace.cpu.topology import format_cpus, shares
from dualpace.errors import ConfigError
from dualpace.options import sentences
from dualpace.runtime.messages import CpuBatch, Phase, Ready, StepDone
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import ending
from dualpace.runtime.profile.peer import RankProcess, WorkerEndedError
from dualpace.runtime.profile.points import Point
from dualpace.runtime.profile.setting import measuring_plan
from dualpace.runtime.profile.station import Station
from dualpace.runtime.routing import Route
from dualpace.runtime.wire import Message
from dualpace.settings.compose import load
from dualpace.settings.hardware import Hardware, probe
from dualpace.settings.schema import ProfileHwConfig

CONTESTANT = "dualpace.runtime.profile.contestant"
TURNS = 7


@dataclass(frozen=True, slots=True)
class Turn:
    """One iteration, by rank: seconds in all, and of sums over ranks, waiting included."""

    seconds: Sequence[float]
    sums: Sequence[float]


class Group:
    """The ranks of one division of the CPU, ready and idle but for their turns."""

    def __init__(self, plan: Plan) -> None:
        self._station = station = Station(plan, temperature=0.0)
        fds, hello = station.fds("cpu", "gpu"), plan.to_json()
        self._ranks = [
            RankProcess(CONTESTANT, [], number, channel, fds, hello)
            for number, channel in enumerate(station.channels["cpu"])
        ]
        for rank in self._ranks:
            _hear(rank, Ready)

    def batch(self, rows: int, context: int) -> CpuBatch:
        return self._station.batches.host_decode(rows, context, Route.FULL_CPU)

    def run(self, batch: CpuBatch) -> Turn:
        for rank in self._ranks:
            rank.channel.send_down(batch)
        told = [_hear(rank, StepDone, Phase) for rank in self._ranks]
        return Turn(
            [done.duration_s for done, _ in told if isinstance(done, StepDone)],
            [float(sums.text) for _, sums in told if isinstance(sums, Phase)],
        )

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._station.close()


def _hear(rank: RankProcess, *kinds: type[Message]) -> list[Message]:
    """The next messages of these kinds, in this order. Raises WorkerEndedError."""
    poll, found = select.poll(), list[Message]()
    for fd in (rank.pidfd, rank.channel.bell_up):
        poll.register(fd, select.POLLIN)
    while len(found) < len(kinds):
        ready = {fd for fd, _ in poll.poll()}
        for message in rank.take():
            if len(found) < len(kinds) and isinstance(message, kinds[len(found)]):
                found.append(message)
        if rank.pidfd in ready and len(found) < len(kinds):
            raise WorkerEndedError(f"a CPU rank {ending(rank.process.wait())}")
    return found


def plan_of(config: ProfileHwConfig, size: int, hardware: Hardware) -> Plan:
    """`size` ranks that have all cores among them."""
    config = copy.deepcopy(config)
    config.gpu.device, config.gpu.tp, config.cpu.tp = "cpu", 1, size
    points = [Point("decode", batch) for batch in config.profile.decode_batches]
    plan = measuring_plan(config, config.profile, points, hardware)
    node_of = dict(zip(hardware.cores, hardware.numa_nodes, strict=True))
    cores = shares(hardware.cores, node_of, size)
    threads = min(map(len, cores))
    return replace(plan, cpu=replace(plan.cpu, rank_cores=cores, threads=threads))


def summary(turns: Mapping[int, Sequence[Turn]]) -> dict[str, Any]:
    """Of one batch, by number of ranks: median and best ms of the slowest rank, the median's gain
    over one rank, and the share of the time in sums: of the mean rank, and of the one that waits
    least."""
    slowest = {size: [1e3 * max(turn.seconds) for turn in of] for size, of in turns.items()}
    ms = {size: median(of) for size, of in slowest.items()}
    several = max(turns)
    spent = [(fmean(turn.sums), min(turn.sums), max(turn.seconds)) for turn in turns[several]]
    return {
        "ms": {str(size): round(value, 3) for size, value in ms.items()},
        "best_ms": {str(size): round(min(of), 3) for size, of in slowest.items()},
        "gain": round(ms[1] / ms[several], 3),
        "sums_share": round(median(mean / whole for mean, _, whole in spent), 4),
        "sums_least_share": round(median(least / whole for _, least, whole in spent), 4),
    }


def main(arguments: Sequence[str]) -> None:
    """`out=FILE`, all else as for scripts/profile_hw.py: cpu.tp, model, profile.decode_batches,
    decode_contexts and layers. Prints a table, then one JSON line."""
    with sentences():
        compare(arguments)


def compare(arguments: Sequence[str]) -> None:
    """Raises ConfigError for what a user can fix."""
    files = [word.removeprefix("out=") for word in arguments if word.startswith("out=")]
    config = load(*(a for a in arguments if not a.startswith("out=")), root="profile_hw")
    assert isinstance(config, ProfileHwConfig)
    several, sweep, hardware = config.cpu.tp, config.profile, probe()
    if several < 2:
        raise ConfigError("cpu.tp=1 leaves nothing to compare: set cpu.tp=2.")
    plans = {size: plan_of(config, size, hardware) for size in (1, several)}
    groups: dict[int, Group] = {}
    result: dict[str, Any] = {"model": plans[1].model.name, "layers": plans[1].model.num_layers}
    result["cores"] = {n: [format_cpus(c) for c in p.cpu.rank_cores] for n, p in plans.items()}
    result["iterations"] = found = []
    try:
        for size, plan in plans.items():  # one after another, or they would time each other
            print(f"{size} of {', '.join(result['cores'][size])}: starting", flush=True)
            groups[size] = Group(plan)
        print(
            f"{'rows':>5} {'context':>8} {'1 rank, ms':>11} {f'{several} ranks':>9}   gain   sums"
        )
        for rows, context in product(sweep.decode_batches, sweep.decode_contexts):
            turns = _by_turns(groups, rows, context)
            found.append({"rows": rows, "context": context, **summary(turns)})
            ms, last = found[-1]["ms"], found[-1]
            print(
                f"{rows:5} {context:8} {ms['1']:11.2f} {ms[str(several)]:9.2f} "
                f"{last['gain']:5.2f}x {last['sums_share']:6.1%}",
                flush=True,
            )
    finally:
        for group in groups.values():
            group.close()
    line = json.dumps(result)
    for file in files:
        Path(file).write_text(line + "\n")
    print(line)


def _by_turns(groups: Mapping[int, Group], rows: int, context: int) -> dict[int, list[Turn]]:
    batches = {size: group.batch(rows, context) for size, group in groups.items()}
    turns: dict[int, list[Turn]] = {size: [] for size in groups}
    for turn in range(1 + TURNS):
        for size, group in groups.items():
            taken = group.run(batches[size])
            if turn:  # the first warms up
                turns[size].append(taken)
    return turns
