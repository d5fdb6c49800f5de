"""What the migration reserve is for: with it taken out of the CPU's view, GPU decodes get stuck."""

from dataclasses import replace

from dualpace.runtime.schedule import CpuRound, State, View
from dualpace.runtime.schedule.policies import Policy
from dualpace.runtime.schedule.policies.dualpace import DualPace
from tests.runtime.schedule.drive import add, copies, decoding, fill_host, make


class WithoutReserve(DualPace):
    """The CPU scheduler does not see what the GPU's later evictions need."""

    guards_host = False

    def cpu_round(self, view: View) -> CpuRound:
        return super().cpu_round(replace(view, envelope=replace(view.envelope, migration=0)))


def overcommitted(policy: Policy) -> State:
    """Two decodes that HBM cannot hold to their ends; an answer that the CPU could take next."""
    state = make(gpu=9, host=12, policy=policy)
    fill_host(state, [0], 16, 17)  # 1 block, peak 2
    first = state.schedule_cpu()
    assert first is not None
    fill_host(state, [1], 64, 81)  # 4 blocks, peak 9; for the next batch
    add(state, 2, 48, 49)  # 3 blocks, peak 6
    add(state, 3, 48, 49)
    step = state.schedule_gpu()
    assert step is not None and step.prefill_gpu == [2, 3]
    state.apply_gpu(step, ())
    assert state.envelope.migration == 6 and state.envelope.slack == 0
    state.apply_cpu(first, [0])
    return state


def run_cpu(state: State, rounds: int) -> None:
    """The CPU engine at its own pace, as far as it gets."""
    for _ in range(rounds):
        step = state.schedule_cpu()
        if step is not None:
            state.apply_cpu(step, ())


def run_gpu(state: State, rounds: int) -> list[int]:
    """GPU rounds as far as they get; returns the decodes that stood still in a round."""
    stood_still = []
    for _ in range(rounds):
        resident = {r.id for r in state.gpu_running}
        step = state.schedule_gpu()
        if step is not None:
            stood_still += sorted(resident - {*decoding(step), *step.swap_out})
            state.apply_gpu(step, ())
            state.transfer_done(copies(step))
    return stood_still


def test_with_the_reserve_every_gpu_decode_grows_or_is_evicted() -> None:
    state = overcommitted(DualPace())
    assert state.schedule_cpu() is None, "the head waits for the reserve alone"
    run_cpu(state, 70)
    assert run_gpu(state, 30) == []
    while not state.idle:
        run_cpu(state, 1)
        assert run_gpu(state, 1) == []


def test_without_it_the_cpu_takes_their_room_and_they_can_neither_grow_nor_leave() -> None:
    state = overcommitted(WithoutReserve())
    run_cpu(state, 70)
    assert not state.envelope.holds
    assert 3 in run_gpu(state, 30), "no block in HBM for its next token, no room on the host"
