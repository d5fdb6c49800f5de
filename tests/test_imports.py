"""What stays light to import, and free of the environment."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dualpace"
LIGHT = ("runtime/schedule", "runtime/kv", "runtime/routing.py", "runtime/types.py")


def imported(file: Path) -> Iterator[str]:
    """Every module that `file` imports anywhere, as an absolute name."""
    parents = file.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files(*places: str) -> list[Path]:
    found: list[Path] = []
    for place in places:
        path = PACKAGE / place
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return found


def offenders(places: tuple[str, ...], *forbidden: str) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files(*places)
        for name in imported(file)
        if any(name == module or name.startswith(f"{module}.") for module in forbidden)
    ]


def test_deciding_code_imports_no_tensor_library() -> None:
    assert offenders(LIGHT, "torch", "numba", "triton", "dualpace.graphs", "dualpace.cpu") == []


@pytest.mark.parametrize(
    "module",
    [
        "dualpace.cli",
        "dualpace.settings.resolve",
        "dualpace.runtime.server",  # the engine starts before the rest is imported
        "dualpace.runtime.engine.__main__",
        # A worker sets its thread counts, then imports what counts threads when it is loaded.
        "dualpace.runtime.worker.main",
    ],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    heavy = ("torch", "numba", "scipy", "fastapi", "tokenizers")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_runtime_reads_no_environment() -> None:
    """Settings have one way in; environments are only written, for child processes."""
    reading = {"os.getenv", "os.environ.get"}
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files("runtime")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in reading
    ]
    assert found == []
