"""The one operation that knows what a weight is: a matrix, or the handle of a packed one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out]: [rows, out].

    A 0-d int64 weight is a handle (dualpace.cpu.packed), which has the bias inside.
    """
    if weight.dim() == 0:
        assert bias is None
        product: Tensor = torch.ops.dualpace.packed_linear(x, weight, out_features)
        return product
    assert weight.shape[0] == out_features
    return F.linear(x, weight, bias)
