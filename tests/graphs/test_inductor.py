"""Compiled stages equal eager ones, come from disk the second time, and never compile again.

All build from one store, which a fixture fills once: compilers are slow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dualpace.cpu.isa import has_bf16
from dualpace.errors import ConfigError
from dualpace.graphs.backends import backend_of
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.compiles import num_compiles
from dualpace.graphs.executor import Stages
from dualpace.graphs.job import Job, compile_all
from dualpace.graphs.load import load_weights
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.source import Source
from dualpace.graphs.store import GraphStore, environment_key
from tests.graphs.reference import run_logits

# Everything that a family can have: bias, QK norm, two layers that share their graphs.
SPEC = SHAPES["tiny"].from_dict(
    {
        **{f: getattr(SHAPES["tiny"], f) for f in SHAPES["tiny"].__slots__ if f != "rope_scaling"},
        "qkv_bias": True,
        "qk_norm": True,
        "max_context": 64,
    }
)
SOURCE = Source("random", None, SPEC, "tiny")
CANDIDATES = ("eager", "packed", "inductor-packed")
# Largest difference of a compiled stage from eager, relative to its largest output.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


def build(
    backend: str | tuple[str, ...],
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
    start: str = "ahead",
    buckets: tuple[int, ...] = (1, 4),
) -> tuple[GraphCache, Stages]:
    cache = GraphCache()
    stages = cache.build(
        SPEC,
        load_weights(SOURCE, dtype),
        backend=backend,
        buckets=buckets,
        cache_dir=folder,
        start=start,
    )
    stages.ready()
    return cache, stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled(folder: Path) -> tuple[GraphCache, Stages]:
    return build("inductor-packed", folder)


def eager_logits(ids: list[int]) -> Tensor:
    return run_logits(build("eager")[1], SPEC.num_layers, ids)


def test_logits_equal_eager_ones_at_every_bucket_edge(compiled: tuple[GraphCache, Stages]) -> None:
    stages = compiled[1]
    for rows in (1, 3, 4, 5, 9):
        ids = list(range(rows))
        logits = run_logits(stages, SPEC.num_layers, ids)
        torch.testing.assert_close(logits, eager_logits(ids), atol=1e-5, rtol=1e-5)
    assert stages.compiles_after_ready == 0


@pytest.mark.parametrize("backend", ["rows", "inductor-rows"])
def test_few_rows_over_plain_matrices_use_the_graphs_of_packed_ones(
    compiled: tuple[GraphCache, Stages], folder: Path, backend: str
) -> None:
    graphs = set(GraphStore(folder, environment_key()).folder.glob("*.graph"))
    _, stages = build(backend, folder)
    for rows in (1, 3, 4, 9):
        ids = list(range(rows))
        logits = run_logits(stages, SPEC.num_layers, ids)
        torch.testing.assert_close(logits, eager_logits(ids), atol=1e-5, rtol=1e-5)
    assert stages.compiles_after_ready == 0
    assert set(GraphStore(folder, environment_key()).folder.glob("*.graph")) == graphs


def test_a_batch_between_two_buckets_is_computed_as_it_is(
    compiled: tuple[GraphCache, Stages], folder: Path
) -> None:
    table = compiled[1].tables()["post_attention"]
    assert [compiled[1].bucket(rows) for rows in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert [(rows, computed) for rows, computed, _ in table.pieces(6)] == [(4, 4), (2, 2)]
    store = GraphStore(folder, environment_key())
    graphs = list(store.folder.glob("post_attention-*.graph"))
    assert len(graphs) == (1 if torch.get_num_threads() == 1 else 2)


def test_a_stage_that_depends_on_the_row_count_is_refused() -> None:
    from dualpace.graphs.backends.lowering import compile_for_any_rows

    def short_only(x_TH: Tensor) -> Tensor:
        return x_TH * 2 if x_TH.shape[0] < 9 else x_TH

    with pytest.raises(RuntimeError, match="short_only is not for any row count"):
        compile_for_any_rows(short_only, (torch.zeros(4, 8),), 1)


def test_who_shares_the_work_does_not_wait_for_what_others_make(tmp_path: Path) -> None:
    job = Job(SPEC, "float32", 64, torch.get_num_threads(), ("inductor-packed",), {"logits": (4,)})
    store = GraphStore(tmp_path, environment_key())
    (backend,) = job.backends().values()
    with store.alone(f"head-{backend.code_rows(4, job.threads)}"):
        assert list(compile_all(job, store, wait=False)) == [("logits", 4)]
    assert not list(store.folder.glob("*.graph"))


def test_one_executable_serves_all_layers(compiled: tuple[GraphCache, Stages]) -> None:
    keys = [key for key in compiled[0].graphs if key.bucket == 4]
    assert len(keys) == 4  # stages, whatever the number of layers


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_each_stage_is_within_its_tolerance_of_eager(
    dtype: torch.dtype, compiled: tuple[GraphCache, Stages], folder: Path
) -> None:
    stages = compiled[1]
    if dtype != torch.float32:
        if not has_bf16():
            pytest.skip("bf16 is emulated here, a minute of compiling for numbers nobody serves")
        _, stages = build("inductor-packed", folder, dtype, buckets=(4,))
    plain = build("eager", dtype=dtype)[1]
    x, positions = torch.randn(4, SPEC.hidden).to(dtype), torch.arange(4)
    attn = torch.randn(4, SPEC.q_size).to(dtype)
    pairs = [
        *zip(
            stages.pre_attention(1, x, positions), plain.pre_attention(1, x, positions), strict=True
        ),
        (stages.post_attention(1, attn, x), plain.post_attention(1, attn, x)),
        (stages.logits(x), plain.logits(x)),
    ]
    for ours, eager in pairs:
        error = float((ours.float() - eager.float()).abs().max() / eager.float().abs().max())
        assert error <= TOLERANCE[dtype]


def test_compilations_by_anybody_are_counted() -> None:
    before = num_compiles()
    torch.compile(lambda x: x * 3 + 1, backend="eager")(torch.ones(2))
    assert num_compiles() == before + 1


def test_compilations_by_numba_are_counted() -> None:
    import numba

    num_compiles()  # listens from now on
    before = num_compiles()
    numba.njit(lambda x: x + 1)(1)
    assert num_compiles() > before


def test_compilations_of_callbacks_are_counted_too() -> None:
    """Products and norms are callbacks, which Numba makes by another way than functions."""
    import numba

    num_compiles()
    before = num_compiles()
    numba.cfunc(numba.types.void(numba.types.intp))(lambda block: None)
    assert num_compiles() > before


def test_compilations_by_triton_are_counted_after_hooks_that_were_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton")
    seen: list[str] = []
    hook = lambda **facts: seen.append(facts["key"])  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    before = num_compiles()
    assert num_compiles() == before
    triton.knobs.runtime.jit_post_compile_hook(key="new", already_compiled=False)
    triton.knobs.runtime.jit_post_compile_hook(key="old", already_compiled=True)
    assert num_compiles() == before + 1
    assert seen == ["new", "old"]


def test_a_second_start_compiles_nothing_and_imports_no_compiler(
    compiled: tuple[GraphCache, Stages], folder: Path
) -> None:
    code = (
        f"import pathlib, sys, torch; torch.set_num_threads({torch.get_num_threads()})\n"
        "from tests.graphs.test_inductor import build\n"
        "from dualpace.graphs.compiles import num_compiles\n"
        f"build('inductor-packed', pathlib.Path({str(folder)!r}))\n"
        "sys.exit(num_compiles() + ('torch._inductor.codecache' in sys.modules))"
    )
    libraries = set(folder.rglob("*.so"))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert set(folder.rglob("*.so")) == libraries  # no C++ compiler ran either


def test_the_tuner_picks_the_fastest_and_remembers(
    compiled: tuple[GraphCache, Stages], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = build(CANDIDATES, folder)
    assert set(first.times) == {(s, b) for s in STAGES for b in (1, 4)}
    assert all(set(times) == set(CANDIDATES) for times in first.times.values())
    monkeypatch.setattr("dualpace.graphs.tuner._Bench", None)  # a second time would need it
    again, stages = build(CANDIDATES, folder)
    assert again.times == first.times
    torch.testing.assert_close(
        run_logits(stages, SPEC.num_layers, [1, 2, 3]),
        eager_logits([1, 2, 3]),
        atol=1e-5,
        rtol=1e-5,
    )


STAGES = ("pre_attention", "post_attention", "logits", "post_layer_greedy")


def test_a_tiered_start_serves_at_once_and_takes_over(
    compiled: tuple[GraphCache, Stages], folder: Path
) -> None:
    candidates = ("packed", "inductor-rows", "inductor-packed")  # not timed yet
    cache, stages = build(candidates, folder, start="tiered")
    try:
        assert {n for t in stages.tables().values() for n in t.names().items()} == {(0, "rows")}
        run_logits(stages, SPEC.num_layers, [1, 2, 3])
        background = cache.background
        assert background is not None and background.done.wait(200) and background.error is None
        assert all(stages.tables()[stage].any_rows is not None for stage in STAGES)
        stages.begin_round()
        assert all(stages.tables()[stage].any_rows is None for stage in STAGES)
        logits = run_logits(stages, SPEC.num_layers, [1, 2, 3])
        torch.testing.assert_close(logits, eager_logits([1, 2, 3]), atol=1e-5, rtol=1e-5)
        assert stages.compiles_after_ready == 0
    finally:
        cache.close()
    warm, stages = build(candidates, folder, start="tiered")
    assert warm.background is None
    assert stages.tables()["post_attention"].any_rows is None


def test_a_damaged_graph_is_made_anew(compiled: tuple[GraphCache, Stages], folder: Path) -> None:
    store = GraphStore(folder, environment_key())
    for path in store.folder.glob("post_attention-*.graph"):
        path.write_bytes(path.read_bytes()[:100])
    _, stages = build("inductor-packed", folder)
    torch.testing.assert_close(
        run_logits(stages, SPEC.num_layers, [7]), eager_logits([7]), atol=1e-5, rtol=1e-5
    )


def test_amx_is_refused_in_one_sentence_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="bf16 only"):
        backend_of("inductor-amx").check("float32")
    with pytest.raises(ConfigError, match="float32 only"):
        backend_of("inductor-rows").check("bf16")
