"""Post-attention of one layer as a whole on AMX tiles: O projection, residual, RMSNorm, gated MLP,
residual, with every elementwise step inside a product's epilogue but the norm.

A candidate executable beside compiled graphs, for bf16 weights without biases:
`post_attention(attn, x, handle)` with a handle of `pack_post_attention`. It computes what a graph
of the same stage does, through one operation that graphs can hold. This file knows nothing about
models, and shares nothing with the graphs but that signature.
"""

import itertools
import struct
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualpace.cpu import norm_kernel as kernel
from dualpace.cpu.gemm import Epilogue, TileLinear, fits
from dualpace.cpu.memory import Scratch
from dualpace.cpu.openmp import parallel


class Rooms:
    """Memory that layers which run after each other share. Not for two threads."""

    def __init__(self) -> None:
        self.tiles = Scratch()  # of the products
        self.rows = Scratch()  # between them


class PostAttention:
    """attn [rows, A], x [rows, H] -> [rows, H], all bf16, for the weights of one layer.

    o [H, A], norm [H], gate_up [2 I, H] (gate first), down [H, I]; the matrices are copied.
    native=False computes the same without a tile unit, slowly (tests). Raises ValueError for
    weights that the tile product does not take, RuntimeError where there is no tile unit.
    """

    def __init__(
        self,
        o: Tensor,
        norm: Tensor,
        gate_up: Tensor,
        down: Tensor,
        eps: float,
        rooms: Rooms | None = None,
        native: bool = True,
    ) -> None:
        self._rooms = rooms or Rooms()
        tiles = self._rooms.tiles
        self._o = TileLinear(o, Epilogue.ADD, native, tiles)
        self._gate_up = TileLinear(gate_up, Epilogue.SILU_MUL, native, tiles)
        self._down = TileLinear(down, Epilogue.ADD, native, tiles)
        if norm.dtype != torch.bfloat16 or norm.shape != (self._gate_up.inputs,):
            raise ValueError(f"norm must be bf16 [{self._gate_up.inputs}], not {tuple(norm.shape)}")
        if self._down.inputs != self._gate_up.outputs or self._o.outputs != self._gate_up.inputs:
            raise ValueError("the sizes of o, gate_up and down do not fit together")
        self._norm, self._eps = norm.contiguous(), eps
        kernel.norm_kernel()  # compiled now rather than in service

    def __call__(self, attn: Tensor, x: Tensor) -> Tensor:
        rows = x.shape[0]
        inside, normal, gated = self._rooms.rows.tensors(
            (rows, self._o.outputs), (rows, self._o.outputs), (rows, self._gate_up.outputs)
        )
        self._o(attn, x, inside)
        norm_rows(inside, self._norm, self._eps, normal)
        self._gate_up(normal, None, gated)
        return self._down(gated, inside)


def norm_rows(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = weight * (x over its root mean square), row by row: x, out [rows, H], weight [H], bf16
    with whole rows; rounded to bf16 before the weight as well.
    """
    assert x.dtype == out.dtype == weight.dtype == torch.bfloat16
    assert x.shape == out.shape and weight.shape == x.shape[1:] and weight.is_contiguous()
    assert x.stride(1) == out.stride(1) == 1
    (bits,) = struct.unpack("I", struct.pack("f", eps))
    fields = [0, *x.shape, x.data_ptr(), x.stride(0) * 2, weight.data_ptr()]
    block = np.array([*fields, out.data_ptr(), out.stride(0) * 2, bits], np.int64)
    assert len(block) == kernel.NUM_FIELDS
    threads = 1 if x.shape[0] == 1 else torch.get_num_threads()
    parallel(kernel.norm_kernel(), block.ctypes.data, threads)


# Operators are process-wide, and so is what their handles mean.
_stages: dict[int, PostAttention] = {}
_numbers = itertools.count(1)
_library: Any = torch.library.Library("dualpace", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("post_attention(Tensor attn, Tensor x, Tensor handle) -> Tensor")


def _run(attn: Tensor, x: Tensor, handle: Tensor) -> Tensor:
    return _stages[int(handle.item())](attn, x)


def _shape(attn: Tensor, x: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(x)


_library.impl("post_attention", _run, "CPU")
torch.library.register_fake("dualpace::post_attention", _shape, lib=_library)


def takes(o: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether `pack_post_attention` takes matrices of these dtypes and sizes."""
    return all(w.dtype == torch.bfloat16 and fits(*w.shape) for w in (o, gate_up, down))


def pack_post_attention(stage: PostAttention) -> Tensor:
    """A handle (0-d int64) for a layer, for `post_attention`. The layer lives as long as it."""
    number = next(_numbers)
    _stages[number] = stage
    handle = torch.tensor(number, dtype=torch.int64)
    weakref.finalize(handle, _stages.pop, number).atexit = False
    return handle


def post_attention(attn: Tensor, x: Tensor, handle: Tensor) -> Tensor:
    """attn [rows, A], x [rows, H] through the layer behind `handle`: [rows, H], like x."""
    result: Tensor = torch.ops.dualpace.post_attention(attn, x, handle)
    return result
