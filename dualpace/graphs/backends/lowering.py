"""From a stage function to Inductor's code, for one row count or for any. Importing this imports
the compiler, which takes seconds: only who has something to compile does.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import CompiledArtifact, standalone_compile
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as symbols_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from dualpace.graphs.backends import Arguments, Stage

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compiled(stage: Stage, example: Arguments) -> CompiledArtifact:
    """An artefact for the shapes of `example`, whose files are where the compiler keeps them.

    The stage is traced once and its graph handed to Inductor directly: Dynamo takes no part.
    """
    tensors = [argument for argument in example if argument is not None]
    with _compiling(tensors):
        graph = make_fx(_of_present(stage, example), tracing_mode="fake")(*tensors)
        return standalone_compile(graph, tensors, dynamic_shapes="from_example_inputs")


def compile_for_any_rows(stage: Stage, example: Arguments, num_rows: int) -> None:
    """The same for any row count, which the first `num_rows` arguments have; only its code is
    wanted. Where Inductor weighs one way to write a loop against another, it assumes as many rows
    as in `example`.

    The row count alone is a symbol, all other sizes are as fixed as ever, so the loops over them
    are what they are in code for one row count. RuntimeError where Inductor's code would assume
    more about the count, a single row included.
    """
    sizes = ShapeEnv(specialize_zero_one=False)
    fake = FakeTensorMode(shape_env=sizes)
    tensors = []
    for place, argument in enumerate(example):
        if argument is None:
            continue
        if place >= num_rows:
            tensors.append(fake.from_tensor(argument, static_shapes=True))
            continue
        context = StatelessSymbolicContext(
            [DimDynamic.DUCK, *[DimDynamic.STATIC] * (argument.dim() - 1)]
        )
        source = ConstantSource(f"rows_{place}")
        tensors.append(fake.from_tensor(argument, symbolic_context=context, source=source))
    single_row_allowed = symbols_config.patch(backed_size_oblivious=True)
    # What Inductor keeps of one row count may assume other loops than another wants.
    keep_none = inductor_config.patch(fx_graph_cache=False)
    with _compiling(tensors), keep_none, single_row_allowed, tracing(TracingContext(fake)):
        with fake:
            graph = make_fx(_of_present(stage, example))(*tensors)
        _require_any_rows(sizes, stage)
        compile_fx(graph, tensors)
    counters["inductor"]["fxgraph_cache_bypass"] += 1  # Inductor counts where its cache is asked
    _require_any_rows(sizes, stage)


def _require_any_rows(sizes: ShapeEnv, stage: Stage) -> None:
    """RuntimeError if what has been traced or written holds for some row counts only."""
    if sizes.replacements or sizes.guards:
        raise RuntimeError(
            f"{stage_name(stage)} is not for any row count: "
            f"{sizes.replacements or [str(guard.expr) for guard in sizes.guards]}"
        )


def _of_present(stage: Stage, example: Arguments) -> Stage:
    """The stage as a function of the arguments that are there."""
    present = [argument is not None for argument in example]

    def of_tensors(*given: torch.Tensor) -> Any:
        rest = iter(given)
        return stage(*[next(rest) if there else None for there in present])

    return of_tensors


@contextmanager
def _compiling(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    if any(t.dim() == 0 for t in tensors):
        import dualpace.cpu.packed  # noqa: F401  (the operation behind handles)
    # A pool of compiler processes would outlive the build for the few graphs there are.
    with torch.no_grad(), inductor_config.patch(compile_threads=1):
        yield


def lowered(
    stage: Stage, example: Arguments, num_rows: int, parent: Path
) -> tuple[str, dict[str, Any]]:
    """(the module that Inductor writes, its kernels by name, loaded) for a stage on the CPU.

    For any row count, which the first `num_rows` arguments have. What the compiler makes on the
    way lies under `parent` until this process ends.
    """
    with _compiler_folder(_workshop(parent)):
        _, sources = run_and_get_code(compile_for_any_rows, stage, example, num_rows)
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
