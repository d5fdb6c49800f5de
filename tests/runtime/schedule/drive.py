"""Small steps for tests that read like the paper: make a state, run one round to its end."""

from collections.abc import Collection, Iterable, Sequence

from dualpace.runtime.schedule import (
    CpuStep,
    GpuStep,
    Limits,
    Row,
    RowKind,
    State,
    make_estimator,
    make_policy,
)
from dualpace.runtime.schedule.estimate import Estimator
from dualpace.runtime.schedule.policies import Policy
from dualpace.runtime.schedule.rounds import Prefill
from dualpace.runtime.types import Request

BLOCK = 16


def make(
    gpu: int = 64,
    host: int = 64,
    *,
    policy: str | Policy = "dualpace",
    estimator: str | Estimator = "declared",
    look_ahead: bool = False,
    gpu_rows: int = 8,
    cpu_rows: int = 8,
    soft: int = 256,
    hard: int = 1024,
    staging: int | None = None,
    cpu_waiting: int | None = None,
) -> State:
    """A state with pools of so many usable blocks."""
    return State(
        Limits(gpu_rows, cpu_rows, soft, hard, staging, cpu_waiting),
        gpu + 1,
        host + 1,
        make_policy(policy) if isinstance(policy, str) else policy,
        make_estimator(estimator) if isinstance(estimator, str) else estimator,
        look_ahead,
    )


def add(state: State, request_id: int, prompt_len: int, max_tokens: int = 64) -> Request:
    request = Request(request_id, prompt_len, max_tokens, arrival_s=float(request_id))
    state.add(request)
    return request


def copies(step: GpuStep) -> list[int]:
    """Ids of all copies that a step starts."""
    prefills = [row.transfer_id for row in step.rows if row.kind is RowKind.PREFILL_CPU]
    return [t.id for t in step.transfers] + prefills


def gpu(state: State, finished: Collection[int] = (), *, report: bool = True) -> GpuStep:
    """One GPU round that must be due, run and applied; its copies are reported if so told."""
    step = state.schedule_gpu()
    assert step is not None, "no GPU round is due"
    state.check()
    state.apply_gpu(step, finished)
    if report:
        state.transfer_done(copies(step))
    state.check()
    return step


def cpu(state: State, finished: Collection[int] = ()) -> CpuStep:
    """One CPU round that must be due, run and applied."""
    step = state.schedule_cpu()
    assert step is not None, "no CPU round is due"
    state.check()
    state.apply_cpu(step, finished)
    state.check()
    return step


def ids(items: Iterable[Request | Row | Prefill]) -> list[int]:
    return [item.id if isinstance(item, Request) else item.request.id for item in items]


def decoding(step: GpuStep) -> list[int]:
    return ids([row for row in step.rows if row.kind is RowKind.DECODE])


def fill_host(
    state: State, request_ids: Sequence[int], prompt_len: int, max_tokens: int = 64
) -> None:
    """Puts ready requests in CPU waiting, by prefilling them while no prompt fits in HBM."""
    shut = state.gpu_pool.allocate(state.gpu_pool.num_free - len(state.gpu_running))
    for request_id in request_ids:
        add(state, request_id, prompt_len, max_tokens)
    while state.waiting:
        step = state.schedule_gpu()
        assert step is not None and not step.swap_out
        state.apply_gpu(step, ())
        state.transfer_done(copies(step))
    state.gpu_pool.free(shut)
    state.check()
