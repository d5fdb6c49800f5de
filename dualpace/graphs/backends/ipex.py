"""Matrices packed by Intel Extension for PyTorch, where it is installed beside the torch it is for.

Imported only when chosen. The extension ended with 2.8, so this runs in an environment of its own
(`make test-ipex`); nothing depends on it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from dualpace.errors import ConfigError
from dualpace.graphs.backends import Pack
from dualpace.graphs.backends.eager import Eager

_PACKAGE = "intel-extension-for-pytorch"


class Ipex(Eager):
    """Stages run operation by operation over the extension's linear layers."""

    name = "ipex"
    form = "ipex"

    @property
    def pack(self) -> Pack | None:
        return _pack

    def check(self, dtype: str) -> None:
        if dtype != "bf16":
            raise ConfigError(
                "compile.backend=ipex multiplies bf16 only: set model.dtype=bf16, or another "
                "backend"
            )
        require_match(torch.__version__, _installed())
        if not packs_bf16():
            raise ConfigError(
                "compile.backend=ipex packs bf16 on CPUs with AVX-512 only, which this one lacks: "
                "choose another backend"
            )


def packs_bf16() -> bool:
    """Whether the installed extension packs bf16 matrices on this CPU."""
    from intel_extension_for_pytorch._C import (  # type: ignore[import-not-found]
        onednn_has_bf16_support,
    )

    return bool(onednn_has_bf16_support())


def require_match(torch_version: str, ipex_version: str | None) -> None:
    """ConfigError unless the extension is there and made for this torch."""
    if ipex_version is None:
        raise ConfigError(
            f"compile.backend=ipex needs {_PACKAGE}, which is not installed: see make test-ipex, "
            "or choose another backend"
        )
    if torch_version.split(".")[:2] != ipex_version.split(".")[:2]:
        raise ConfigError(
            f"compile.backend=ipex: {_PACKAGE} {ipex_version} is not made for torch "
            f"{torch_version}; install the same release of both (make test-ipex), or choose "
            "another backend"
        )


def _installed() -> str | None:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        return None


def _pack(weight: Tensor, bias: Tensor | None) -> Tensor:
    import intel_extension_for_pytorch as ipex  # type: ignore[import-not-found]

    from dualpace.cpu.packed import register

    outputs, inputs = weight.shape
    linear = torch.nn.Linear(inputs, outputs, bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    # Looking for norms to fold, it makes a graph of a lone layer, which it then does not pack.
    packed: Any = ipex.optimize(
        linear.eval(),
        dtype=weight.dtype,
        inplace=True,
        conv_bn_folding=False,
        linear_bn_folding=False,
    )
    return register(packed)
