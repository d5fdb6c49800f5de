"""Linear layers over packed weights, as one operation that compiled graphs can hold.

Inductor takes no packed tensor as an input, so a graph gets a handle, a 0-d int64 tensor, and the
operation `dualpace::packed_linear(x, handle, out_features)` looks the weight up: one graph serves
every layer of a shape.
This file knows nothing about models.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dualpace.cpu.handles import Handles
from dualpace.cpu.isa import has_avx512

Linear = Callable[[Tensor], Tensor]

# Operators are process-wide, and so is what their handles mean.
LINEARS = Handles[Linear]()
_library: Any = torch.library.Library("dualpace", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor handle, SymInt out_features) -> Tensor")


def _run(x: Tensor, handle: Tensor, out_features: int) -> Tensor:
    return LINEARS[handle](x)


def _shape(x: Tensor, handle: Tensor, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


_library.impl("packed_linear", _run, "CPU")
torch.library.register_fake("dualpace::packed_linear", _shape, lib=_library)


def packed_linear(x: Tensor, handle: Tensor, out_features: int) -> Tensor:
    """x [..., in] times the weight behind `handle` (see `pack`): [..., out_features], like x."""
    result: Tensor = torch.ops.dualpace.packed_linear(x, handle, out_features)
    return result


def pack(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A handle (0-d int64) for the linear layer of weight [out, in] and bias [out].

    bf16 or float32 (ValueError otherwise). The weight is copied into the layout that suits this
    CPU; the caller may drop its own. Where the CPU has no AVX-512, bf16 weights are kept and
    multiplied as float32: ten times as fast as bf16 arithmetic there, for twice the memory.
    """
    return register(_onednn(weight, bias))


def register(linear: Linear) -> Tensor:
    """A handle for any implementation of a linear layer."""
    return LINEARS.add(linear)


def _onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    if weight.dtype not in (torch.bfloat16, torch.float32) or weight.ndim != 2:
        raise ValueError(f"a packed weight is a bf16 or float32 matrix, not {weight.dtype}")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return lambda x: F.linear(x, weight, bias)
    if weight.dtype == torch.bfloat16 and not has_avx512():
        return _through_float32(_onednn(weight.float(), None if bias is None else bias.float()))
    # One copy serves all batch sizes: the hint of 32 rows made no difference in measurements.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 32)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, packed, bias, "none", [], "")


def _through_float32(linear: Linear) -> Linear:
    return lambda x: linear(x.float()).to(torch.bfloat16)
