"""How many compilations this process has seen, whoever asked for them: Dynamo, Inductor, Numba.

Counts only grow. A module that has not been imported has compiled nothing, and is not imported.
"""

from __future__ import annotations

import sys
from typing import Any


class _Locks:
    """Listens to Numba, which takes its compiler lock to compile and to load what it once did."""

    def __init__(self) -> None:
        self.taken = 0
        self._listening = False

    def listen(self) -> None:
        event: Any = sys.modules.get("numba.core.event")
        if event is None or self._listening:
            return
        locks = self

        class Listener(event.Listener):  # type: ignore[misc, name-defined]
            def on_start(self, event: Any) -> None:
                locks.taken += 1

            def on_end(self, event: Any) -> None:
                pass

        event.register("numba:compiler_lock", Listener())
        self._listening = True


# Compilers are one a process, and so is their count.
_locks = _Locks()


def num_compiles() -> int:
    """Compilations so far, and loads of compiled code; constant while nothing of the kind runs."""
    _locks.listen()
    return _locks.taken + _inductor()


def _inductor() -> int:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    inductor, stats = utils.counters["inductor"], utils.counters["stats"]
    return int(
        inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"] + stats["unique_graphs"]
    )
