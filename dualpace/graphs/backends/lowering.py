"""From a stage function to Inductor's code. Importing this imports the compiler, which takes
seconds: only who has something to compile does.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch._inductor import CompiledArtifact, standalone_compile
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from dualpace.graphs.backends import Arguments, Stage

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compiled(stage: Stage, example: Arguments) -> CompiledArtifact:
    """An artefact for the present arguments of `example`, whose files are where the compiler keeps
    them.

    The stage is traced once and its graph handed to Inductor directly: Dynamo takes no part.
    """
    present = [argument is not None for argument in example]
    tensors = [argument for argument in example if argument is not None]

    def of_tensors(*given: torch.Tensor) -> Any:
        rest = iter(given)
        return stage(*[next(rest) if there else None for there in present])

    if any(t.dim() == 0 for t in tensors):
        import dualpace.cpu.packed  # noqa: F401  (the operation behind handles)
    with torch.no_grad(), inductor_config.patch(compile_threads=1):
        # A pool of compiler processes would outlive the build for the few graphs there are.
        graph = make_fx(of_tensors, tracing_mode="fake")(*tensors)
        return standalone_compile(graph, tensors, dynamic_shapes="from_example_inputs")


def lowered(stage: Stage, example: Arguments, parent: Path) -> tuple[str, dict[str, Any]]:
    """(the module that Inductor writes, its kernels by name, loaded) for a stage on the CPU.

    What the compiler makes on the way lies under `parent` until this process ends.
    """
    with _compiler_folder(_workshop(parent)):
        _, sources = run_and_get_code(compiled, stage, example)
        source = sources[-1]
        scope: dict[str, Any] = {}
        with inductor_config.patch(compile_threads=1):
            exec(compile(source, stage_name(stage), "exec"), scope)
    kernels = {
        name: value
        for name, value in scope.items()
        if isinstance(value, BuiltinFunctionType) and name.startswith("cpp_")
    }
    return source, kernels


def stage_name(stage: Stage) -> str:
    function: Any = stage.func if isinstance(stage, functools.partial) else stage
    return str(function.__name__)


@functools.cache
def _workshop(parent: Path) -> Path:
    """Inductor remembers the kernels that it has made as long as the process lives, so their files
    have to stay as long.
    """
    folder = tempfile.TemporaryDirectory(prefix="making-", dir=parent)
    _workshops.append(folder)  # removed at exit
    return Path(folder.name)


_workshops: list[tempfile.TemporaryDirectory[str]] = []


@contextmanager
def _compiler_folder(folder: Path) -> Iterator[None]:
    """Inductor keeps its own files where this variable says, and sets it if nobody has."""
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CACHE_VARIABLE, None)
        else:
            os.environ[_CACHE_VARIABLE] = before
