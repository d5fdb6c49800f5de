"""Which iterations of the CPU engine ask the GPU worker for dense stages, and by which route."""

from collections.abc import Iterable, Sequence

from dualpace.runtime.plan import AssistPlan
from dualpace.runtime.routing import Route, route
from dualpace.runtime.schedule.state import State


class Assisting:
    """Every stage is local without a GPU worker, beside a suspect that must be alone there, and for
    whoever was assisted when one was lost by its own fault."""

    def __init__(self, limits: AssistPlan, state: State) -> None:
        self._limits = limits
        self._state = state
        self._unassisted: set[int] = set()

    def route(self, request_ids: Sequence[int], can_ask: bool) -> Route:
        """By the batch's size, if it may ask at all."""
        may_ask = can_ask and self._unassisted.isdisjoint(request_ids)
        if not may_ask or self._state.gpu_suspects:
            return Route.FULL_CPU
        limits = self._limits
        return route(len(request_ids), limits.post_attention_limit, limits.post_layer_limit)

    def no_more(self, request_ids: Iterable[int]) -> None:
        """The GPU worker was lost while it assisted these: perhaps by one of their rows."""
        self._unassisted.update(request_ids)

    def forget(self, request_id: int) -> None:
        self._unassisted.discard(request_id)
