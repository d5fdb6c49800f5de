"""Routes of the CPU worker, and Dense Assist between both workers."""

import pytest
import torch

from dualpace.runtime import messages as m
from dualpace.runtime.assist import AssistKind, AssistState
from dualpace.runtime.channel import ring
from dualpace.runtime.routing import Route
from dualpace.runtime.types import RowKind
from dualpace.runtime.worker.assist_service import AssistService

LAYERS = 5
ASSISTS = {Route.FULL_CPU: 0, Route.SPLIT_FINAL: 1, Route.FUSED_ASSIST: LAYERS}


@pytest.fixture
def on_host(talks):
    """Requests of these lengths, prefilled to the host."""

    def make(rig, *lengths, temperature=0.0):
        made = talks(*lengths, temperature=temperature)
        rig.gpu_step([rig.prefill(t, RowKind.PREFILL_CPU, transfer_id=t.id) for t in made])
        rig.transfer_done(*(t.id for t in made))
        return made

    return make


@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_route_gives_the_dense_models_tokens(rig, on_host, reference, route, temperature):
    made = on_host(rig, 7, 30, 16, temperature=temperature)
    for _ in range(5):
        rig.cpu_step(made, route)
        for _ in range(ASSISTS[route]):
            rig.gpu.expect(m.AssistDone)
    assert rig.gpu.silent(m.AssistDone, 0.02)
    assert reference.agrees(*made)


@pytest.mark.parametrize("route", [Route.SPLIT_FINAL, Route.FUSED_ASSIST])
def test_main_batches_and_assists_share_the_accelerator(rig, on_host, talks, reference, route):
    made = on_host(rig, 12, 25)
    here = talks(33, 18, 3)
    for talk in here:
        talk.id += 10
    rows = [rig.prefill(t) for t in here]
    for _ in range(6):
        main, side = rig.send_gpu(rows), rig.send_cpu(made, route)
        rig.gpu_done(main, rows)
        rig._done(rig.cpu, side, made)
        rows = [rig.decode(t) for t in here]
    assert len(here[0].output) == 6
    assert reference.agrees(*made, *here)


def test_an_assist_is_served_while_a_main_batch_waits_for_copies(
    make_rig, on_host, reference, talks
):
    rig = make_rig(copies="held")
    rig.copies.holding = False
    made = on_host(rig, 12)
    rig.copies.holding = True
    other = talks(21, 20)[1]
    step = rig.send_gpu([row := rig.prefill(other, RowKind.PREFILL_CPU, transfer_id=50)])
    rig.copies.wait_held(2)  # stuck between two of its layers
    rig.cpu_step(made, Route.FUSED_ASSIST)
    assert rig.gpu.silent(m.StepDone, 0.02)
    rig.copies.release()
    rig.gpu_done(step, [row])
    assert reference.agrees(*made, other)


def test_each_assist_is_reported_with_its_parts(rig, on_host):
    made = on_host(rig, 12, 14)
    rig.cpu_step(made, Route.FUSED_ASSIST)
    reports = [rig.gpu.expect(m.AssistDone) for _ in range(LAYERS)]
    kinds = [AssistKind.POST_ATTENTION] * (LAYERS - 1) + [AssistKind.POST_ATTENTION_FINAL]
    assert [r.kind_of_assist for r in reports] == kinds
    assert [r.layer for r in reports] == list(range(LAYERS))
    for r in reports:
        assert r.rows == 2
        parts = (r.wait_s, r.launch_s, r.h2d_s, r.compute_s, r.sampling_s, r.d2h_s, r.finalize_s)
        assert min(parts) >= 0
        assert r.compute_s > 0
    assert reports[-1].sampling_s > reports[0].sampling_s


def test_an_iteration_whose_assist_is_lost_is_dropped_and_runs_again(make_rig, talks, reference):
    rig = make_rig(start_gpu=False)
    (a,) = talks(20)
    # A prefill without a GPU thread: this one drives the worker.
    rows = [rig.prefill(a, RowKind.PREFILL_CPU, transfer_id=1)]
    step = rig.send_gpu(rows)
    while (done := rig.gpu._look(m.StepDone)) is None:
        rig.gpu_worker.turn()
    assert done.step == step
    a.tokens.append(int(done.tokens[0]))
    lost = rig.send_cpu([a], Route.FUSED_ASSIST)
    while rig.assist._control[0] != AssistState.CPU_READY:
        assert rig.cpu.silent(m.StepDone, 0.01)
    rig.assist.raise_epoch()  # the GPU worker has died
    ring(rig.cpu.channel.bell_down)
    dropped = rig.cpu.expect(m.StepDropped)
    assert dropped.step == lost
    rig.gpu.start(rig.gpu_worker)  # its successor
    for _ in range(3):
        rig.cpu_step([a], Route.FUSED_ASSIST)
    assert reference.agrees(a)


def test_an_assist_of_an_old_epoch_is_forgotten(make_rig, on_host, talks, reference):
    rig = make_rig()
    made = on_host(rig, 12)
    rig.assist.publish(AssistKind.POST_ATTENTION, 0, 1, rig.cpu.channel.bell_down)
    rig.assist.raise_epoch()  # the CPU worker has died after publishing
    rig.assist._control[0] = AssistState.CPU_READY  # its last store came late
    ring(rig.gpu.channel.bell_down)
    assert rig.gpu.silent(m.AssistDone)
    rig.cpu_step(made, Route.SPLIT_FINAL)
    assert reference.agrees(*made)


def test_an_assist_that_is_voided_while_it_runs_finishes_nothing(make_rig):
    rig = make_rig(start_gpu=False)

    class DyingPeer:
        def post_attention(self, layer, attention, x):
            rig.assist.raise_epoch()
            return x

    link = rig.gpu_worker._link
    service = AssistService(link, DyingPeer(), torch.float32, torch.device("cpu"))
    assert not service.serve()
    rig.assist.publish(AssistKind.POST_ATTENTION, 0, 1, rig.gpu.channel.bell_down)
    assert service.serve()
    assert rig.assist._control[0] == AssistState.IDLE


def test_without_reachable_assists_batches_run_whole(make_rig, talks, reference):
    rig = make_rig("assist.post_attention_limit=17", "assist.post_layer_limit=16")
    a, b = talks(20, 35)
    rig.gpu_step([rig.prefill(a), rig.prefill(b, RowKind.PREFILL_CPU, transfer_id=1)])
    rig.transfer_done(1)
    ahead = [rig.decode(a)], [rig.decode_ahead(a)]
    steps = [rig.send_gpu(rows) for rows in ahead]
    for step, rows in zip(steps, ahead, strict=True):
        rig.gpu_done(step, rows)
    rig.cpu_step([b])
    assert reference.agrees(a, b)


def test_more_reports_than_the_mailbox_holds_are_kept(rig, on_host, reference):
    made = on_host(rig, 12)
    for _ in range(60):  # 300 assists, and nobody reads the GPU worker's reports
        rig.cpu_step(made, Route.FUSED_ASSIST)
    for _ in range(60 * LAYERS):
        rig.gpu.expect(m.AssistDone)
    assert reference.agrees(*made)
