"""Compiled stages equal eager ones, come from disk the second time, and never compile again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dualpace.errors import ConfigError
from dualpace.graphs.backends.inductor import Inductor
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.executor import Stages
from dualpace.graphs.load import load_weights
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.source import Source
from dualpace.graphs.store import GraphStore
from tests.graphs.reference import run_logits

pytestmark = pytest.mark.timeout(300)  # compilers are slow on a busy machine

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
BACKENDS = ["inductor", "inductor-packed"]


def build(backend: str, folder: Path | None = None, bucket: int = 4) -> tuple[GraphCache, Stages]:
    cache = GraphCache()
    weights = load_weights(SOURCE, torch.float32)
    return cache, cache.build(
        SPEC,
        weights,
        backend=backend,
        buckets=[bucket] if backend != "eager" else [],
        cache_dir=folder,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=BACKENDS)
def compiled(request: pytest.FixtureRequest, folder: Path) -> tuple[GraphCache, Stages]:
    return build(request.param, folder)


def eager_logits(ids: list[int]) -> Tensor:
    return run_logits(build("eager")[1], SPEC.num_layers, ids)


def test_logits_equal_eager_ones_at_every_bucket_edge(compiled: tuple[GraphCache, Stages]) -> None:
    stages = compiled[1]
    for rows in (1, 3, 4, 5, 9):
        ids = list(range(rows))
        logits = run_logits(stages, SPEC.num_layers, ids)
        torch.testing.assert_close(logits, eager_logits(ids), atol=1e-5, rtol=1e-5)
    assert stages.compiles_after_ready == 0


def test_one_executable_serves_all_layers(compiled: tuple[GraphCache, Stages]) -> None:
    assert len(compiled[0].graphs) == 5  # stages, whatever the number of layers


def test_compilations_by_anybody_are_counted() -> None:
    before = Inductor().num_compiles()
    torch.compile(lambda x: x * 3 + 1, backend="eager")(torch.ones(2))
    assert Inductor().num_compiles() == before + 1


def test_a_second_start_compiles_nothing(folder: Path) -> None:
    build("inductor-packed", folder)  # from disk by now
    code = (
        f"import pathlib, sys, torch; torch.set_num_threads({torch.get_num_threads()})\n"
        "from tests.graphs.test_inductor import build\n"
        f"_, stages = build('inductor-packed', pathlib.Path({str(folder)!r}))\n"
        "sys.exit(stages._backend.num_compiles())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def store_with_files(folder: Path) -> GraphStore:
    store = GraphStore(folder, "key")
    (store.compiler / "kernel.so").write_bytes(b"code")
    written = store.folder / "written"
    written.write_bytes(b"graph")
    with store.locked():
        store.publish("stage-1", written)
    return store


@pytest.mark.parametrize("damage", ["stage-1.graph", "compiler/kernel.so", "stage-1.json"])
def test_a_damaged_folder_is_emptied(damage: str, tmp_path: Path) -> None:
    store = store_with_files(tmp_path)
    with store.locked():
        assert store.graph("stage-1") is not None
    (store.folder / damage).write_bytes(b"gr")
    with store.locked():
        assert store.graph("stage-1") is None
        assert not list(store.compiler.iterdir())


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "graphs").write_text("in the way")
    with pytest.raises(ConfigError, match=r"compile\.cache_dir=.* cannot be written"):
        GraphStore(tmp_path, "key")
