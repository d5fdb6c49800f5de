"""A worker that is lost by its own fault costs at most the request that is proven to be the cause.

Workers are played, so that every order of events is the test's.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from dualpace.runtime import messages
from dualpace.runtime.assist import AssistState
from dualpace.runtime.engine.group import MAX_SUSPECTED_IN_A_ROW
from tests.runtime.engine.fake_workers import HELD, Batch, Engine, FakeHandle, Fault, answer, play

LONG = 300  # tokens of a prompt that HBM has no room for: the host decodes it
BOTH = ("gpu", "cpu")


def deadly(
    ids: Collection[int],
    role: str = "gpu",
    how: str | int = "RuntimeError: no such row",
    rank: int = 0,
) -> Fault:
    """Each batch with one of these rows is the last of that worker."""

    def fault(handle: FakeHandle, batch: Batch) -> str | int | None:
        concerns = (handle.role, handle.rank) == (role, rank)
        return how if concerns and set(ids) & set(batch.request_ids.tolist()) else None

    return fault


def once(role: str, number: int, how: str | int) -> Fault:
    """That worker is lost with its batch of that number."""

    def fault(handle: FakeHandle, batch: Batch) -> str | int | None:
        return how if handle.role == role and len(handle.batches) == number else None

    return fault


def ask(*ids: int, prompt_len: int = 20, later: tuple[int, ...] = ()) -> Any:
    """A story: those, and once they are answered the others one after another."""

    async def story(engine: Engine) -> None:
        engine.ask(ids, prompt_len)
        await engine.until_answered()
        for one in later:
            engine.ask([one], prompt_len)
            await engine.until_answered()
        await engine.until_idle()

    return story


def assert_answered(engine: Engine, but: Collection[int] = (), prompt_len: int = 20) -> None:
    """All but those, with the tokens that they have anyhow; those were given up, each once."""
    assert engine.failure == "" and sorted(engine.given_up) == sorted(but)
    for request_id, tokens in engine.answers.items():
        whole = answer(request_id, prompt_len, 12)
        assert tokens == (whole[: len(tokens)] if request_id in but else whole)


@pytest.mark.parametrize("policy", ["dualpace", "gpu_only", "neo"])
@pytest.mark.parametrize("how", ["ValueError: a bug", -11])
def test_one_deadly_row_costs_its_request_alone(policy: str, how: str | int) -> None:
    engine = play(ask(*range(8)), f"policy={policy}", fault=deadly([3], how=how))
    assert_answered(engine, but=[3])
    assert engine.restarts[0] == 2 and engine.stats()["given_up"] == 1
    assert engine.stats()["rounds_lost"]["gpu"] >= 2


def test_a_deadly_row_on_the_host_costs_its_request_alone_and_no_kv() -> None:
    engine = play(ask(*range(4), prompt_len=LONG), "kv.host_blocks=100", fault=deadly([2], "cpu"))
    assert_answered(engine, but=[2], prompt_len=LONG)
    assert engine.restarts == [0, 2]
    prompts = [b for b in engine.handle("gpu").batches if len(b.request_ids)]
    assert len([i for b in prompts for i in b.request_ids]) == 4, "KV on the host is not lost"


NEO = ("policy=neo", "kv.gpu_blocks=8")  # HBM holds about two


@pytest.mark.parametrize("role", BOTH)
def test_a_deadly_host_row_in_lockstep_costs_its_request_alone(role: str) -> None:
    """With the CPU's worker the other one is ended too: it waits for attention."""
    on_host: list[int] = []

    def fault(handle: FakeHandle, batch: Batch) -> str | None:
        assert isinstance(batch, messages.GpuBatch)
        host = batch.request_ids[np.isin(batch.kinds, (3, 4))].tolist()
        on_host.extend(host)
        return "no such row" if handle.role == role and on_host and on_host[0] in host else None

    engine = play(ask(*range(6), prompt_len=40), *NEO, fault=fault)
    assert_answered(engine, but=on_host[:1], prompt_len=40)
    assert engine.restarts == ([2, 0] if role == "gpu" else [2, 2])


@pytest.mark.parametrize("role", BOTH)
def test_workers_in_lockstep_that_are_killed_now_and_then_last(role: str) -> None:
    def fault(handle: FakeHandle, batch: Batch) -> int | None:
        return -9 if handle.role == role and len(handle.batches) in (2, 5, 8, 11) else None

    engine = play(ask(*range(6), prompt_len=40), *NEO, fault=fault)
    assert_answered(engine, prompt_len=40)
    assert engine.restarts == ([4, 0] if role == "gpu" else [4, 4])


def test_an_accelerator_that_is_ended_for_the_host_is_not_to_blame() -> None:
    """However often, and though it comes to no round in between."""

    def fault(handle: FakeHandle, batch: Batch) -> str | None:
        is_host = handle.role == "cpu" and np.isin(batch.kinds, (3, 4)).any()  # type: ignore[union-attr]
        return "no such row" if is_host else None

    engine = play(ask(*range(6), prompt_len=40), *NEO, fault=fault)
    assert_answered(engine, but=engine.given_up, prompt_len=40)
    assert len(engine.given_up) >= 3 and engine.restarts[0] == engine.restarts[1] >= 4


def test_a_row_in_hbm_that_the_host_does_not_survive_ends_in_lockstep_too() -> None:
    """It meets it in company alone, so it is proven by nothing; but it comes to its end."""

    def fault(handle: FakeHandle, batch: Batch) -> str | None:
        return "no such row" if handle.role == "cpu" and 0 in batch.request_ids else None

    engine = play(ask(*range(6), prompt_len=40), *NEO, fault=fault)
    assert_answered(engine, but=engine.given_up, prompt_len=40)
    assert set(engine.given_up) <= {0} and engine.restarts[1] <= 8


def test_two_deadly_requests_one_after_the_other_leave_the_server_standing() -> None:
    engine = play(ask(0, later=(1, 2, 3)), fault=deadly([0, 1, 2]))
    assert_answered(engine, but=[0, 1, 2])
    assert engine.restarts == [6, 0]


def test_a_client_that_gives_up_and_asks_again_meanwhile_leaves_it_standing_too() -> None:
    async def story(engine: Engine) -> None:
        for one in range(5):
            engine.ask([one])
            await engine.until(lambda one=one: engine.restarts[0] > one)  # type: ignore[misc]
            engine.cancel(one)
        await ask(5)(engine)

    engine = play(story, fault=deadly(range(5)))
    assert not engine.failure and not engine.given_up
    assert engine.answers[5] == answer(5, 20, 12) and engine.restarts == [5, 0]


def test_a_worker_that_no_request_survives_ends_the_server() -> None:
    engine = play(ask(*range(20)), fault=deadly(range(20)))
    assert "died 8 times in a row with requests" in engine.failure
    assert len(engine.given_up) == MAX_SUSPECTED_IN_A_ROW - 1  # the first time they were together


def test_a_worker_that_fails_at_nobodys_row_ends_the_server_after_three() -> None:
    starts = [("gpu", 1), ("gpu", 2), ("gpu", 3)]
    engine = play(ask(0), faulty_starts=starts, fault=once("gpu", 4, "a bug"))
    assert "the gpu worker died 3 times in a row" in engine.failure
    assert "it cannot be loaded" in engine.failure and not engine.given_up


def test_a_start_that_fails_is_the_end_and_a_later_one_is_tried_again() -> None:
    assert play(ask(0), faulty_starts=[("cpu", 0)]).failure == "it cannot be loaded"
    engine = play(ask(0, 1), faulty_starts=[("gpu", 1)], fault=once("gpu", 4, "a bug"))
    assert_answered(engine)
    assert engine.restarts == [2, 0]


@pytest.mark.parametrize("how", ["a bug", -9, -11])
@pytest.mark.parametrize("role", BOTH)
def test_one_fault_costs_nobody_anything(role: str, how: str | int) -> None:
    engine = play(
        ask(*range(3), prompt_len=LONG if role == "cpu" else 20),
        "kv.host_blocks=100",
        fault=once(role, 3, how),
    )
    assert_answered(engine, prompt_len=LONG if role == "cpu" else 20)
    assert sorted(engine.restarts) == [0, 1]


def test_who_is_killed_from_outside_twice_while_alone_is_not_to_blame() -> None:
    def fault(handle: FakeHandle, batch: Batch) -> int | None:
        return -9 if handle.role == "gpu" and len(handle.batches) in (3, 4) else None

    engine = play(ask(0), fault=fault)
    assert_answered(engine)
    assert engine.restarts == [2, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_may_fail_and_all_of_its_group_are_started_again(rank: int) -> None:
    engine = play(ask(*range(5)), "gpu.tp=2", fault=deadly([4], rank=rank))
    assert_answered(engine, but=[4])
    assert [engine.handle("gpu", r).num_starts for r in (0, 1)] == [3, 3]


def test_who_was_assisted_when_the_gpu_worker_was_lost_goes_on_without() -> None:
    assisted: list[int] = []

    def fault(handle: FakeHandle, batch: Batch) -> str | None:
        if not isinstance(batch, messages.CpuBatch) or not batch.route:
            return None
        (engine,) = engines
        assisted.append(len(batch.request_ids))
        engine._workers._assist._control[0] = AssistState.GPU_RUNNING
        engine.handle("gpu").fail("an assist")
        handle.drop(batch)
        return HELD

    engines: list[Engine] = []

    async def story(engine: Engine) -> None:
        engines.append(engine)
        await ask(0, 1, prompt_len=LONG, later=(2,))(engine)

    limits = ("assist.post_attention_limit=0", "assist.post_layer_limit=0")
    engine = play(story, "kv.host_blocks=100", *limits, fault=fault)
    assert_answered(engine, prompt_len=LONG)
    assert engine.restarts == [len(assisted), 0] and assisted in ([1, 1], [2, 1])


def test_who_is_cancelled_while_the_assist_of_its_iteration_is_lost_is_not_run_again() -> None:
    """Nobody else is held up by that."""

    def fault(handle: FakeHandle, batch: Batch) -> str | None:
        if handle.role == "gpu" or len(handle.batches) != 3:
            return None
        (engine,) = engines
        engine.cancel(0)
        handle.drop(batch)
        return HELD

    engines: list[Engine] = []

    async def story(engine: Engine) -> None:
        engines.append(engine)
        await ask(0, 1, prompt_len=LONG)(engine)

    engine = play(story, "kv.host_blocks=100", fault=fault)
    assert engine.answers[1] == answer(1, LONG, 12) and not engine.failure
    assert len(engine.answers[0]) < 12


def test_a_defect_of_the_engine_itself_ends_it_with_a_reason() -> None:
    """And does not leave it waiting for ever, wherever it is met."""

    def fault(handle: FakeHandle, batch: Batch) -> str | None:
        if len(handle.batches) == 3:
            handle.answer_twice(batch)
        return None

    engine = play(ask(0, 1), fault=fault)
    assert "a callback failed: IndexError" in engine.failure


@pytest.mark.parametrize("pool", ["gpu_pool", "host_pool"])
def test_a_block_that_is_not_given_back_ends_the_engine_when_it_is_idle(pool: str) -> None:
    async def story(engine: Engine) -> None:
        getattr(engine._state, pool).allocate(1)
        engine.ask([0])
        await engine.until(lambda: bool(engine.failure))

    failure = play(story).failure
    assert failure == "gpu_loop failed: AssertionError('0 blocks held, 1 used')", failure


def test_a_block_that_was_changed_on_its_way_ends_the_engine_and_names_its_request() -> None:
    """The host's is one; before the copy is reported."""

    def fault(handle: FakeHandle, batch: Batch) -> None:
        if handle.role == "gpu":
            for copy in batch.transfer_ids[batch.transfer_ids >= 0]:  # type: ignore[union-attr]
                handle.check(3)
                handle.check(2, int(copy), "layer 5 of block 9 is not what left by a prefill")

    engine = play(ask(4, prompt_len=LONG), "kv.host_blocks=100", fault=fault)
    layer = "layer 5 of block 9 is not what left by a prefill"
    assert engine.failure == f"KV of request 4 was changed on its way: {layer}"
    assert engine.stats()["blocks_checked"] == 5


@pytest.mark.parametrize("role", BOTH)
def test_cancels_while_a_worker_starts_again_leave_nothing_behind(role: str) -> None:
    async def story(engine: Engine) -> None:
        length = LONG if role == "cpu" else 20
        engine.ask(range(4), length)
        await engine.until(lambda: engine.rounds_lost > 0)
        for one in (0, 1, 2):
            engine.cancel(one)
        await engine.until_answered()
        await engine.until_idle()
        assert engine.answers[3] == answer(3, length, 12)

    engine = play(story, "kv.host_blocks=100", fault=once(role, 3, "a bug"))
    assert not engine.failure and sorted(engine.restarts) == [0, 1]


def test_a_drain_waits_for_a_worker_that_starts_again() -> None:
    async def story(engine: Engine) -> None:
        engine.ask([0, 1])
        await engine.until(lambda: engine.rounds_lost > 0)
        engine.on_message(messages.Shutdown(1e3))
        await engine.until(lambda: False)

    engine = play(story, fault=once("gpu", 3, "a bug"))
    assert_answered(engine)
