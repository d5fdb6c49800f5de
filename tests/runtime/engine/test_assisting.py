"""Which iterations of the CPU engine ask the GPU worker for dense stages."""

from dualpace.runtime.engine.assisting import Assisting
from dualpace.runtime.plan import AssistPlan
from dualpace.runtime.routing import Route
from tests.runtime.schedule.drive import add, gpu, make

LIMITS = AssistPlan(post_attention_limit=2, post_layer_limit=1, mode="boundary")


def test_by_size_where_there_is_a_gpu_worker() -> None:
    assisting = Assisting(LIMITS, make())
    routes = [assisting.route(range(count), True) for count in (1, 2, 3)]
    assert routes == [Route.FULL_CPU, Route.SPLIT_FINAL, Route.FUSED_ASSIST]
    assert assisting.route(range(3), False) is Route.FULL_CPU


def test_none_beside_a_suspect_that_must_be_alone() -> None:
    state = make()
    assisting = Assisting(LIMITS, state)
    add(state, 7, 20)
    state.schedule_gpu()
    state.accuse(state.requests[7].owner)
    state.lose_gpu()
    assert assisting.route(range(3), True) is Route.FULL_CPU
    gpu(state)
    assert assisting.route(range(3), True) is Route.FUSED_ASSIST


def test_none_with_who_was_assisted_when_the_worker_was_lost_until_that_one_has_ended() -> None:
    assisting = Assisting(LIMITS, make())
    assisting.no_more([1, 2])
    assert assisting.route([0, 1, 3], True) is Route.FULL_CPU
    assert assisting.route([0, 3, 4], True) is Route.FUSED_ASSIST
    assisting.forget(1)
    assert assisting.route([0, 1, 3], True) is Route.FUSED_ASSIST
    assert assisting.route([2, 1, 3], True) is Route.FULL_CPU
