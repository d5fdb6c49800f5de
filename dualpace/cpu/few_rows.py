"""Linear layers in float32 whose weights stay as they are, for the few rows of a decode round.

Such a product is as long as its weights take to be read. All threads read them, each a long piece
at a time. More rows go to torch. This file knows nothing about models.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dualpace.cpu import few_rows_kernel as kernel
from dualpace.cpu.gemm import Call
from dualpace.cpu.isa import has_avx512

MAX_ROWS = 8
_PIECES = 4  # of the outputs, a thread: one that is held up leaves work to the others


class RowsLinear:
    """x [rows, in] -> [rows, out] for one weight [out, in] and bias [out], which are kept.

    Sums are in another order than torch's. Raises ValueError for a weight that is not float32 with
    whole rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dtype != torch.float32 or weight.ndim != 2 or weight.stride(1) != 1:
            raise ValueError(f"a weight for few rows is a float32 matrix, not {weight.dtype}")
        self._weight, self._bias = weight, bias
        self._outputs, self._inputs = weight.shape
        added = weight.new_zeros(self._outputs) if bias is None else bias.contiguous()
        self._lanes, threads = 16 if has_avx512() else 8, torch.get_num_threads()
        function = kernel.rows_kernel(self._lanes)  # now rather than in service
        self._call = Call(function, kernel.NUM_FIELDS, kernel.NUM_ROWS, threads)
        self._call.kept = (added,)
        block = self._call.block
        block[kernel.INPUTS], block[kernel.OUTPUTS] = self._inputs, self._outputs
        vectors = -(-self._outputs // self._lanes)
        block[kernel.AT_ONCE] = -(-vectors // (threads * _PIECES)) * self._lanes
        block[kernel.WEIGHT], block[kernel.WEIGHT_STRIDE] = weight.data_ptr(), weight.stride(0) * 4
        block[kernel.BIAS], block[kernel.OUT_STRIDE] = added.data_ptr(), self._outputs * 4

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if not 0 < rows <= MAX_ROWS:
            return F.linear(x, self._weight, self._bias)
        assert x.shape == (rows, self._inputs) and x.stride(1) == 1 and x.dtype == torch.float32
        out, block = x.new_empty(rows, self._outputs), self._call.block
        block[kernel.NUM_ROWS] = rows
        block[kernel.INPUT], block[kernel.INPUT_STRIDE] = x.data_ptr(), x.stride(0) * 4
        block[kernel.OUT] = out.data_ptr()
        self._call()
        return out
