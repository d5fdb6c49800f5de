"""The arrows between packages: each file has a layer, imports go down, and none form a circle.

`python tests/test_arrows.py` draws them.
"""

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dualpace"
# Bottom first. A file belongs to the longest place that holds it, but two names say more than their
# place: `config.py` is a component's schema, plain data that settings compose, and `bench.py` a
# command that measures its component.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors.py", "version.py", "block.py", "options.py"),
    ("config.py",),
    ("cpu",),
    ("graphs",),
    ("runtime",),  # what its packages share: plan, messages, shared memory, assist, routing, kv
    ("runtime/schedule",),
    ("runtime/worker",),
    ("runtime/engine",),
    ("runtime/engine_client.py", "runtime/generation.py"),
    ("runtime/server",),
    ("settings",),
    ("llm.py",),
    ("runtime/bench",),
    ("runtime/simulate",),
    ("runtime/profile",),
    ("bench.py",),
    ("command.py", "doctor.py"),
    ("cli.py", "__init__.py"),
)
LEVEL = {place: level for level, places in enumerate(LAYERS) for place in places}


def layer(file: Path) -> str:
    """The place in LAYERS that holds `file`."""
    if file.name in ("config.py", "bench.py"):
        return file.name
    path = file.relative_to(PACKAGE)
    places = [str(place) for place in (path, *path.parents) if str(place) in LEVEL]
    assert places, f"{path} has no layer: give it one in LAYERS"
    return places[0]


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(tree: ast.AST, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements at any depth; `types` adds those that only a type checker follows."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif types or not is_for_types(node):
            yield from imports(node, types)


@functools.cache
def tree(file: Path) -> ast.AST:
    return ast.parse(file.read_text())


@functools.cache
def targets(file: Path, types: bool) -> set[Path]:
    """Files of the package that `file` imports."""
    found: set[Path | None] = set()
    for node in imports(tree(file), types):
        if isinstance(node, ast.Import):
            found |= {module_file(alias.name) for alias in node.names}
            continue
        assert node.level == 0, f"{file} has a relative import"
        assert node.module is not None
        for alias in node.names:
            found.add(module_file(f"{node.module}.{alias.name}") or module_file(node.module))
    return {target for target in found if target is not None and target != file}


def module_file(name: str) -> Path | None:
    path = ROOT / name.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file() and file.is_relative_to(PACKAGE):
            return file
    return None


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("types", [False, True])
def test_imports_go_down(types: bool) -> None:
    up = [
        f"{file.relative_to(ROOT)} ({layer(file)}) imports {target.relative_to(ROOT)}"
        for file in files()
        for target in targets(file, types)
        if LEVEL[layer(target)] > LEVEL[layer(file)]
    ]
    assert up == []


def test_no_imports_form_a_circle() -> None:
    """Nor do those that a checker alone follows."""
    graph = {file: targets(file, types=True) for file in files()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = " -> ".join(str(file.relative_to(ROOT)) for file in error.args[1])
        pytest.fail(f"a circle: {circle}")


def test_every_layer_is_there() -> None:
    used = {layer(file) for file in files()}
    assert used == set(LEVEL)


if __name__ == "__main__":
    arrows: dict[str, set[str]] = {place: set() for place in LEVEL}
    for source in files():
        arrows[layer(source)] |= {layer(target) for target in targets(source, types=True)}
    for place in reversed(LEVEL):
        below = sorted(arrows[place] - {place}, key=LEVEL.__getitem__, reverse=True)
        print(f"{place:28} -> {', '.join(below) or 'nothing'}")
