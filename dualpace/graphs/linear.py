"""The one operation that knows what a weight is: a matrix, or the handle of a packed one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out]: [rows, out]."""
    assert weight.shape[0] == out_features
    return F.linear(x, weight, bias)
