"""The store publishes whole graphs only, and drops damaged ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dualpace.errors import ConfigError
from dualpace.graphs.store import GraphStore


def make(file: Path, compiler: Path) -> None:
    file.write_bytes(b"graph")
    (compiler / "ab").mkdir()
    (compiler / "ab" / "kernel.so").write_bytes(b"code")


@pytest.fixture
def store(tmp_path: Path) -> GraphStore:
    store = GraphStore(tmp_path, "key")
    assert store.publish("stage-1", make)
    store.write_note("done-1", {"all": True})
    return store


def test_a_published_graph_is_there_once(store: GraphStore) -> None:
    def again(file: Path, compiler: Path) -> None:
        raise AssertionError("made twice")

    assert store.publish("stage-1", again)
    assert store.graph("stage-1") is not None
    assert (store.compiler / "ab" / "kernel.so").read_bytes() == b"code"
    store.check()
    assert store.graph("stage-1") is not None and store.note("done-1") is not None


@pytest.mark.parametrize("damage", ["stage-1.graph", "compiler/ab/kernel.so", "stage-1.json"])
def test_a_damaged_graph_is_dropped(damage: str, store: GraphStore) -> None:
    assert store.publish("stage-2", lambda file, _: _other(file))
    (store.folder / damage).write_bytes(b"gr")
    store.check()
    assert store.graph("stage-1") is None
    assert store.graph("stage-2") is not None
    assert store.note("done-1") is None
    assert store.publish("stage-1", make)
    store.check()
    assert store.graph("stage-1") is not None


def _other(file: Path) -> None:
    file.write_bytes(b"other")


def test_a_failed_make_leaves_nothing(store: GraphStore) -> None:
    def fail(file: Path, compiler: Path) -> None:
        make(file, compiler)
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        store.publish("stage-3", fail)
    assert store.graph("stage-3") is None
    assert not list(store.folder.glob("making-*"))


def test_what_a_killed_builder_left_goes_after_an_hour(store: GraphStore) -> None:
    for name, age_s in (("making-old", 4000), ("making-new", 10)):
        (store.folder / name).mkdir()
        os.utime(store.folder / name, (time.time() - age_s,) * 2)
    store.check()
    assert [path.name for path in store.folder.glob("making-*")] == ["making-new"]


def test_who_finds_a_graph_being_made_does_not_wait(store: GraphStore) -> None:
    def busy(file: Path, compiler: Path) -> None:
        assert not GraphStore(store.folder.parent.parent, "key").publish("stage-4", make)
        make(file, compiler)

    assert store.publish("stage-4", busy)


def test_unreadable_notes_are_no_notes(store: GraphStore) -> None:
    (store.folder / "times.note").write_text("{")
    assert store.note("times") is None
    assert store.notes() == {"done-1": {"all": True}}


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "graphs").write_text("in the way")
    with pytest.raises(ConfigError, match=r"compile\.cache_dir=.* cannot be written"):
        GraphStore(tmp_path, "key")
