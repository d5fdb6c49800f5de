"""Executables as Inductor leaves them: a function as text over shared libraries of kernels.

Inductor's own way to load an artefact imports the whole compiler, for 4 seconds, and asks a C++
compiler what it would do. What serves a batch needs neither: the function allocates, multiplies and
calls kernels. This file keeps that function on disk and runs it, and imports no compiler.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Where a kernel's library finds the function that takes a tensor's address.
_ADDRESS_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
_guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
_PRODUCTS = {"mm": torch.mm, "addmm": torch.addmm, "bias_addmm": torch.addmm, "bmm": torch.bmm}

# Of the runtime, as far as this release has them.
_HELPERS = ("assert_size_stride", "assert_alignment", "_empty_strided_cpu", "_reinterpret_tensor")


def _names() -> dict[str, Any]:
    """What the function may use, apart from its kernels."""
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "extern_kernels": SimpleNamespace(**_PRODUCTS),
        **{name.lstrip("_"): getattr(_guards, name) for name in _HELPERS if hasattr(_guards, name)},
    }


class Executable:
    """A loaded function, called with the stage's own arguments."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[list[Tensor]], tuple[Tensor, ...]]) -> None:
        self._call = call

    def __call__(self, *arguments: Tensor | None) -> Any:
        out = self._call([a for a in arguments if a is not None])
        return out if len(out) > 1 else out[0]


def save(source: str, kernels: Mapping[str, Any], file: Path, folder: Path) -> None:
    """Write to `file` the function `call` of `source`, a module that Inductor wrote, and copy the
    libraries of its kernels, loaded functions by name, into `folder`.

    RuntimeError where `call` needs more than there will be when it is loaded.
    """
    text = _function(source)
    unknown = _unknown(text, set(kernels))
    if unknown:
        raise RuntimeError(f"Inductor's code uses {', '.join(unknown)}, which `load` does not have")
    places = {}
    for name, kernel in kernels.items():
        library = Path(kernel.__self__.__file__)
        place = Path(library.parent.name, library.name)
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copyfile(library, folder / place)
        places[name] = str(place)
    file.write_text(json.dumps({"kernels": places, "function": text.splitlines()}, indent=1))


def load(file: Path, folder: Path) -> Executable:
    """What `save` wrote. The libraries are in `folder`."""
    stored = json.loads(file.read_text())
    scope = _names()
    for name, place in stored["kernels"].items():
        scope[name] = _library(folder / place).kernel
    exec(compile("\n".join(stored["function"]), str(file), "exec"), scope)
    return Executable(scope["call"])


def _library(path: Path) -> Any:
    """The library at `path`, an extension module; loaded once a process."""
    os.environ[_ADDRESS_VARIABLE] = str(_guards._torchinductor_pyobject_tensor_data_ptr)
    # The last part is the entry point's: the loader looks for PyInit_kernel.
    name = f"{path.name.partition('.')[0]}.kernel"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def _function(source: str) -> str:
    """The text of `call`, without the class around it."""
    nodes = ast.walk(ast.parse(source))
    node = next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "call")
    text = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
    return text.replace("def call(self, args):", "def call(args):", 1)


def _unknown(text: str, kernels: set[str]) -> list[str]:
    """Names that the function uses and `load` does not provide."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | {"args"}
    known = own | kernels | set(_names()) | set(dir(builtins))
    used = {node.id for node in names} - known
    products = {
        f"extern_kernels.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "extern_kernels"
        and node.attr not in _PRODUCTS
    }
    return sorted(used | products)
