"""Counters of a running engine, and the snapshot that /metrics and `LLM` read."""

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dualpace.runtime.messages import AssistDone, MovesChecked, StepDone
from dualpace.runtime.types import ENGINES, Owner

if TYPE_CHECKING:
    from dualpace.runtime.engine.pair import WorkerPair
    from dualpace.runtime.schedule.state import State

log = logging.getLogger(__name__)

_ASSIST_PARTS = ("wait", "launch", "h2d", "compute", "sampling", "d2h", "finalize")


@dataclass(slots=True)
class EngineStats:
    """Everything only grows, so a reader may take differences."""

    is_ready: bool = False
    transfers: int = 0
    blocks_checked: int = 0  # under kv.check_moves, by each rank its part
    tokens: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    rounds_lost: Counter[str] = field(default_factory=Counter)  # with their worker
    given_up: int = 0  # requests that no worker survives
    busy_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    routes: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    compiles_after_ready: Counter[str] = field(default_factory=Counter)
    assist_calls: int = 0
    assist_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def count_tokens(self, owner: Owner, num_tokens: int) -> None:
        self.tokens[ENGINES[owner]] += num_tokens

    def count_round(self, owner: Owner, done: StepDone, record: dict[str, Any]) -> None:
        """`done` is the worker's word of it, `record` the round log's."""
        name = ENGINES[owner]
        self.rounds[name] += 1
        self.busy_s[name] += done.duration_s
        if done.compiles_after_ready > self.compiles_after_ready[name]:
            log.error("the %s worker compiled in step %d, after it was ready", name, done.step)
        self.compiles_after_ready[name] = done.compiles_after_ready
        if record["route"]:
            self.routes[record["route"]] += 1
        for event in ("prefill_gpu", "prefill_cpu", "swap_out", "swap_in", "marked", "preempted"):
            self.events[event] += len(record[event])

    def count_checked(self, found: MovesChecked, state: "State") -> str:
        """What to end the engine with, if a block was changed on its way."""
        self.blocks_checked += found.blocks
        if not found.difference:
            return ""
        transfer = state.transfers.get(found.transfer_id)  # None: lost with its worker
        whose = "an earlier round" if transfer is None else f"request {transfer.request.id}"
        return f"KV of {whose} was changed on its way: {found.difference}"

    def count_assist(self, record: AssistDone) -> None:
        self.assist_calls += 1
        for part in _ASSIST_PARTS:
            self.assist_s[part] += getattr(record, f"{part}_s")

    def snapshot(
        self, state: "State", workers: "WorkerPair", num_forming: int = 0
    ) -> dict[str, Any]:
        """`num_forming`: requests that wait for their forms, which the state does not know yet."""
        return {
            "forming": num_forming,
            "waiting": len(state.waiting),
            "gpu_running": len(state.gpu_running),
            "cpu_waiting": len(state.cpu_waiting),
            "cpu_running": len(state.cpu_running),
            "copying": sum(not request.ready for request in state.cpu_waiting),
            "gpu_blocks": {"capacity": state.gpu_pool.capacity, "used": state.gpu_pool.num_used},
            "host_blocks": {"capacity": state.host_pool.capacity, "used": state.host_pool.num_used},
            "tokens": dict(self.tokens),
            "rounds": dict(self.rounds),
            "rounds_lost": dict(self.rounds_lost),
            "given_up": self.given_up,
            "busy_s": dict(self.busy_s),
            "routes": dict(self.routes),
            "events": dict(self.events),
            "transfers": self.transfers,
            "blocks_checked": self.blocks_checked,
            "assist_calls": self.assist_calls,
            "assist_s": dict(self.assist_s),
            "compiles_after_ready": sum(self.compiles_after_ready.values()),
            "workers": {
                handle.role: {
                    "ready": handle.ready,
                    "phase": handle.phase,
                    "restarts": handle.restarts,
                    "pid": handle.pid if handle.ready else None,
                    "pids": handle.pids,
                }
                for handle in (workers.gpu, workers.cpu)
            },
        }
