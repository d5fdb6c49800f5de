"""Both workers as a measuring process has them: results like an engine's; a worker that ends."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.messages import AssistDone, TransfersDone
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile.child import Order
from dualpace.runtime.profile.config import SweepConfig
from dualpace.runtime.profile.measure import measure
from dualpace.runtime.profile.peer import WorkerEndedError
from dualpace.runtime.profile.points import Point
from dualpace.runtime.profile.setting import measuring_plan
from dualpace.runtime.profile.station import Station
from dualpace.runtime.routing import Route
from dualpace.runtime.types import TransferKind
from dualpace.settings.compose import load
from dualpace.settings.hardware import probe
from dualpace.settings.schema import ProfileHwConfig


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    config = load("model=tiny_random", "compile=eager", "gpu.device=cpu", root="profile_hw")
    assert isinstance(config, ProfileHwConfig)
    sweep = SweepConfig(
        results=str(tmp_path_factory.mktemp("points")),
        route_batches=[6],
        decode_batches=[4],
        prefill_lengths=[24],
    )
    points = [Point("route", 6), Point("prefill", 4), Point("step", 4), Point("copies", 8)]
    return measuring_plan(config, sweep, points, probe())


@pytest.fixture(scope="module")
def station(plan: Plan) -> Iterator[Station]:
    """Of two GPU ranks, who compute and assist as one; one alone is measured in test_sweep."""
    gpu = replace(plan.gpu, tp=2, rank_cores=plan.gpu.rank_cores * 2)
    made = Station(replace(plan, gpu=gpu), temperature=0.0)
    yield made
    made.close()


def test_batches_are_computed_by_the_worker(station: Station) -> None:
    done = station.gpu.run(station.batches.prefill(3, 24, sampled=1))
    assert (done.tokens >= 0).tolist() == [False, False, True]
    done = station.gpu.run(station.batches.decode(4, 40))
    assert (done.tokens >= 0).all() and done.duration_s > 0
    station.gpu.run(station.batches.swap(8, TransferKind.SWAP_OUT))
    assert len(station.gpu.expect(TransfersDone).transfer_ids) == 1


def test_all_routes_give_the_same_tokens_and_one_record_an_assist(station: Station) -> None:
    fused = station.cpu.iterate(station.batches.host_decode(5, 20, Route.FUSED_ASSIST))
    split = station.cpu.iterate(station.batches.host_decode(5, 20, Route.SPLIT_FINAL))
    assert fused.tokens.tolist() == split.tokens.tolist()
    waits = station.cpu.take_waits()
    records = [station.gpu.expect(AssistDone) for _ in waits]
    kinds = [AssistKind(record.kind_of_assist) for record in records]
    assert kinds == list(AssistKind) == [kind for kind, _, _ in waits]  # two layers
    for (_, rows, wait_s), record in zip(waits, records, strict=True):
        assert rows == record.rows == 5
        assert wait_s >= record.h2d_s + record.compute_s + record.sampling_s + record.d2h_s


def test_assists_are_served_while_the_gpu_is_busy(station: Station) -> None:
    with station.gpu.busy_with(station.batches.decode(4, 40)):
        done = station.cpu.iterate(station.batches.host_decode(6, 20, Route.FUSED_ASSIST))
    assert len(done.tokens) == 6
    assert len([station.gpu.expect(AssistDone) for _ in station.cpu.take_waits()]) == 2
    assert station.gpu.run(station.batches.decode(1, 16)).tokens.shape == (1,)  # nothing is left


def test_two_cpu_ranks_measure_as_one(plan: Plan) -> None:
    """A follower makes the same calls, as often; what is found is the slowest rank's."""
    sweep = SweepConfig(
        decode_contexts=[16], calibration_rows=2, calibration_context=20, calibration_iterations=2,
        warmups=1, invocations=2, repeats=2, max_seconds=0.05,
    )  # fmt: skip
    two = replace(plan, cpu=replace(plan.cpu, tp=2, rank_cores=plan.cpu.rank_cores * 2))
    points = [Point("route", 4), Point("beside", 4), Point("decode", 4)]
    order = Order(os.getpid(), "", two.to_json(), sweep, points, [{}] * len(points))
    station = Station(two, 0.0, order.to_json())
    route, beside, decode = (measure(point, station, sweep) for point in points)
    station.close()
    assert all(taken["ms"] > 0 for taken in route["samples"].values())
    assert {AssistKind(call["kind"]) for call in route["calls"]} == set(AssistKind)
    assert all(call["wait"] > call["device"] > 0 for call in route["calls"])
    assert beside["assists"] > 0 and beside["steps"] > 0
    assert decode["contexts"][0]["throughput"] > 0


def test_a_worker_that_ends_is_an_error_and_no_wait(plan: Plan) -> None:
    gone = replace(plan, runtime=replace(plan.runtime, worker_module="no_such_module"))
    broken = Station(gone, temperature=0.0)
    with pytest.raises(WorkerEndedError, match="ended with status 1"):
        broken.gpu.run(broken.batches.decode(1, 16))
    broken.close()


def test_what_a_user_can_fix_stays_a_sentence(plan: Plan, tmp_path: Path) -> None:
    gone = replace(plan, model=replace(plan.model, source=str(tmp_path / "no_model")))
    broken = Station(gone, temperature=0.0)
    with pytest.raises(ConfigError, match="no_model is neither a folder"):
        broken.gpu.run(broken.batches.decode(1, 16))
    broken.close()
