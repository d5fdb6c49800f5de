"""`migrate_every`: decodes leave HBM without need, come back with a token, and nothing is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dualpace.runtime.schedule import Limits, make_policy
from dualpace.runtime.schedule.draft import Departures
from dualpace.runtime.schedule.gpu_round import gpu_round
from tests.runtime.schedule.drive import add, cpu, gpu, ids, make
from tests.runtime.schedule.drive import decoding as rows_of
from tests.runtime.schedule.views import decoding, view
from tests.runtime.schedule.world import World

LIMITS = Limits(gpu_rows=6, cpu_rows=4, soft_tokens=64, hard_tokens=128)


def restless(every, **pools):
    return make(policy=make_policy("dualpace", migrate_every=every), **pools)


def test_a_decode_leaves_hbm_every_so_many_tokens_and_comes_back_with_one():
    state = restless(4)
    add(state, 0, 17, 40)
    gpu(state)
    ways = []
    for _ in range(12):
        step = gpu(state)
        ways.append("out" if step.swap_out else "in" if step.swap_in else "stays")
        assert rows_of(step) == ([] if step.swap_out else [0])
    assert ways == 2 * ["stays", "stays", "stays", "out", "in"] + ["stays", "stays"]


def test_others_go_on_in_the_round_in_which_one_leaves():
    state = restless(4)
    add(state, 0, 20, 40)  # due one round apart
    add(state, 1, 20, 40)
    gpu(state)
    step = gpu(state)
    assert (step.swap_out, rows_of(step)) == ([0], [1])
    cpu(state)
    assert state.requests[0].num_output == 2


def test_a_round_ahead_waits_for_who_is_due():
    state = restless(4, look_ahead=True)
    add(state, 0, 19, 40)
    first = state.schedule_gpu()
    second = state.schedule_gpu()
    assert state.schedule_gpu() is None
    state.apply_gpu(first, ())
    assert state.schedule_gpu() is None, "it is due when the round in flight has ended"
    state.apply_gpu(second, ())
    third = state.schedule_gpu()
    assert third.swap_out == [0]
    state.check()


def decided(every, *kv_lens, pinned=(), **more):
    """Who leaves and who decodes, of requests with two blocks each."""
    queue = [decoding(i, 2, 4, kv_len=kv_len) for i, kv_len in enumerate(kv_lens)]
    for request in queue:
        request.pins = int(request.id in pinned)
    decision = gpu_round(view(gpu_running=queue, **more), Departures(migrate_every=every))
    return ids(decision.swap_out), ids(decision.decode)


def test_what_those_who_are_due_leave_is_taken_before_another_has_to_leave():
    """Of four, each in need of a third block, the last one is due."""
    assert decided(5, 32, 32, 32, 32, free=1) == ([3], [0, 1, 2])
    assert decided(5, 32, 32, 32, 32, free=0) == ([3, 2], [0, 1])


def test_of_several_that_are_due_those_whom_nothing_touches_leave_the_youngest_first():
    assert decided(3, 30, 29, 26, 30) == ([3, 1, 0], [2])
    assert decided(3, 30, 29, 26, 30, pinned=[1]) == ([3, 0], [1, 2])
    assert decided(0, 30, 29, 26, 30) == ([], [0, 1, 2, 3])


def test_a_round_in_flight_is_waited_for_only_if_somebody_is_due():
    assert decided(7, 20, 20, rounds_in_flight=1) == ([], [])
    assert decided(7, 20, 21, rounds_in_flight=1) == ([], [0, 1])


def test_without_room_on_the_host_nobody_leaves():
    state = restless(1, host=1)
    add(state, 0, 20, 8)
    for _ in range(8):
        assert not gpu(state).swap_out
    assert state.idle


@settings(max_examples=60, deadline=None)
@given(
    every=st.integers(1, 9),
    gpu=st.integers(6, 40),
    host=st.integers(0, 60),
    requests=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 30)), min_size=1, max_size=14),
    seed=st.randoms(use_true_random=False),
    look_ahead=st.booleans(),
)
def test_everyone_ends_with_all_tokens_and_every_block_comes_back(
    every, gpu, host, requests, seed, look_ahead
):
    """Whatever the pools hold and in whatever order rounds and copies end."""
    policy = make_policy("dualpace", migrate_every=every)
    world = World.make(policy, gpu, host, LIMITS, look_ahead=look_ahead)
    for prompt_len, outputs in requests:
        world.arrive(prompt_len, outputs, outputs)
        world.shuffle(seed, 6)
    world.shuffle(seed, 60)
    world.drain()
