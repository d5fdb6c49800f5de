"""How many compilations this process has seen, whoever asked for them: Dynamo, Inductor, Numba,
Triton.

Counts only grow. A module that has not been imported has compiled nothing, and is not imported; nor
has one that another thread is just importing.
"""

from __future__ import annotations

import sys
from typing import Any


class _Events:
    """Listens to Numba, which takes its compiler lock to compile anything and to load what it once
    did, and to Triton, which calls a hook with every kernel.
    """

    def __init__(self) -> None:
        self.count = 0
        self._numba = False
        self._hook: Any = None

    def listen(self) -> None:
        """To those that have been imported by now."""
        numba = _imported("numba.core", "event")
        if numba is not None and not self._numba:
            self._numba = True
            self._listen_to_numba(numba)
        knobs = _imported("triton", "knobs")
        if knobs is not None and (before := knobs.runtime.jit_post_compile_hook) != self._hook:
            self._hook = knobs.runtime.jit_post_compile_hook = self._after(before)

    def _listen_to_numba(self, numba: Any) -> None:
        events = self

        class Listener(numba.Listener):  # type: ignore[misc, name-defined]
            def on_start(self, event: Any) -> None:
                events.count += 1

            def on_end(self, event: Any) -> None:
                pass

        numba.register("numba:compiler_lock", Listener())

    def _after(self, before: Any) -> Any:
        """A hook that counts, after the one that was there."""

        def compiled(*args: Any, already_compiled: bool = False, **kwargs: Any) -> Any:
            self.count += not already_compiled
            if before is not None:
                return before(*args, already_compiled=already_compiled, **kwargs)
            return None

        return compiled


# Compilers are one a process, and so is their count.
_events = _Events()


def num_compiles() -> int:
    """Compilations so far, and loads of compiled code; constant while nothing of the kind runs."""
    _events.listen()
    return _events.count + _inductor()


def _inductor() -> int:
    utils = _imported("torch._dynamo", "utils")
    if utils is None:
        return 0
    inductor, stats = utils.counters["inductor"], utils.counters["stats"]
    return int(
        inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"] + stats["unique_graphs"]
    )


def _imported(package: str, name: str) -> Any:
    """A module, or None. `sys.modules` has one from the first line of its import on, half empty;
    its package has it once it is whole."""
    return getattr(sys.modules.get(package), name, None)
