"""Whether requests sent now will be answered, and if not, what is in the way: what /ready says.

The engine is asked each time, so that one that hangs, a worker that is being started again and a
process that someone has stopped are all noticed. Knows nothing about HTTP.
"""

import time
from dataclasses import dataclass

from dualpace.runtime.engine_client import EngineClient, EngineGone
from dualpace.runtime.process import is_stopped

_ANSWER_S = 2.0  # an engine that needs longer to say how it is does not serve
_STALL_S = 300.0  # without a token while requests wait; a long prompt may take minutes


@dataclass(frozen=True, slots=True)
class Condition:
    """status: ready | degraded | starting | restarting | stalled | draining; `phase` says it to
    people. Degraded: the CPU tier is being started again, all that has room in HBM is served."""

    status: str
    phase: str
    since_s: float  # of `time.monotonic()`


async def condition(client: EngineClient) -> Condition:
    """How a started engine is doing now."""
    now_s = time.monotonic()
    if client.num_requests and now_s - client.progress_s > _STALL_S:
        waiting = f"{client.num_requests} requests wait and no token comes"
        return Condition("stalled", waiting, client.progress_s)
    try:
        stats = await client.stats(_ANSWER_S)
    except TimeoutError:
        return Condition("stalled", "the engine process does not answer", now_s)
    except EngineGone as error:
        return Condition("stalled", str(error), now_s)
    for role, worker in stats["workers"].items():
        if not worker["ready"]:
            phase = f"{role} worker: {worker['phase']}"
            return Condition("degraded" if role == "cpu" else "restarting", phase, now_s)
        if any(is_stopped(pid) for pid in worker["pids"]):
            return Condition("stalled", f"the {role} worker is stopped by a signal", now_s)
    return Condition("ready", "ready", client.start_s)
