"""Counting compilations: what is not imported whole yet has compiled nothing."""

import sys
from collections import Counter
from types import ModuleType

import pytest

from dualpace.graphs import compiles


@pytest.mark.parametrize(
    "package, name", [("torch._dynamo", "utils"), ("numba.core", "event"), ("triton", "knobs")]
)
def test_a_module_that_another_thread_is_just_importing_has_compiled_nothing(
    monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    monkeypatch.setattr(compiles, "_events", compiles._Events())
    for there in ("torch._dynamo", "numba.core", "triton"):
        monkeypatch.setitem(sys.modules, there, ModuleType(there))
    monkeypatch.setitem(sys.modules, f"{package}.{name}", ModuleType(f"{package}.{name}"))
    assert compiles.num_compiles() == 0


def test_dynamos_graphs_and_inductors_misses_count(monkeypatch: pytest.MonkeyPatch) -> None:
    package, utils = ModuleType("torch._dynamo"), ModuleType("torch._dynamo.utils")
    before = compiles._events.count
    vars(utils)["counters"] = {
        "inductor": Counter(fxgraph_cache_miss=2, fxgraph_cache_bypass=1, fxgraph_cache_hit=8),
        "stats": Counter(unique_graphs=4),
    }
    vars(package)["utils"] = utils
    monkeypatch.setitem(sys.modules, "torch._dynamo", package)
    assert compiles.num_compiles() == before + 7
