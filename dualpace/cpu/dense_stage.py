"""Post-attention of one layer as a whole on tiles: O projection, residual, RMSNorm, gated MLP,
residual, with every elementwise step inside a product's epilogue but the norm.

For bf16 weights without biases. This file knows nothing about models or graphs.
"""

import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dualpace.cpu import amx_ir
from dualpace.cpu import gemm_kernel as gemm
from dualpace.cpu import norm_kernel as kernel
from dualpace.cpu.gemm import (
    MAX_ROWS,
    TILES,
    Block,
    Call,
    Epilogue,
    TileLinear,
    Unit,
    count_tiles,
    fits,
    input_block,
)
from dualpace.cpu.memory import Scratch

_Calls = TypeVar("_Calls")


class Rooms:
    """Memory that layers which run after each other share. Not for two threads."""

    def __init__(self) -> None:
        self.tiles = Scratch()  # of the products
        self.rows = Scratch()  # between them
        self._calls: dict[Hashable, Any] = {}
        self._state = self.state

    @property
    def state(self) -> tuple[int, int, int]:
        """Differs from what it was where calls that were made then are not right any more."""
        return self.tiles.address, self.rows.address, torch.get_num_threads()

    def calls(self, key: Hashable, build: Callable[[], _Calls]) -> _Calls:
        """What `build` makes, kept: calls of kernels over this memory, which layers of equal sizes
        share. `key` says what they are made for.
        """
        while True:
            if self.state != self._state:
                self._calls, self._state = {}, self.state
            if key in self._calls:
                found: _Calls = self._calls[key]
                return found
            self._calls[key] = build()  # which may make the memory grow


class PostAttention:
    """attn [rows, A], x [rows, H] -> [rows, H], all bf16, for the weights of one layer.

    o [H, A], norm [H], gate_up [2 I, H] (gate first), down [H, I]; the matrices are copied.
    Raises ValueError for weights that the tile product does not take, RuntimeError where the unit
    cannot be used.
    """

    def __init__(
        self,
        o: Tensor,
        norm: Tensor,
        gate_up: Tensor,
        down: Tensor,
        eps: float,
        rooms: Rooms | None = None,
        unit: Unit = TILES,
    ) -> None:
        self._rooms = rooms or Rooms()
        tiles = self._rooms.tiles
        self._o = TileLinear(o, Epilogue.ADD, unit, tiles)
        self._gate_up = TileLinear(gate_up, Epilogue.SILU_MUL, unit, tiles)
        self._down = TileLinear(down, Epilogue.ADD, unit, tiles)
        if norm.dtype != torch.bfloat16 or norm.shape != (self._gate_up.inputs,):
            raise ValueError(f"norm must be bf16 [{self._gate_up.inputs}], not {tuple(norm.shape)}")
        if self._down.inputs != self._gate_up.outputs or self._o.outputs != self._gate_up.inputs:
            raise ValueError("the sizes of o, gate_up and down do not fit together")
        self._norm, self._bits = norm.contiguous(), float_bits(eps)
        kernel.norm_kernel()  # compiled now rather than in service
        self.calls(MAX_ROWS)  # room for all there will be

    def __call__(self, attn: Tensor, x: Tensor) -> Tensor:
        rows = len(x)
        for name, tensor, width in (
            ("attn", attn, self._o.inputs),
            ("x", x, self._o.outputs),
        ):
            whole = tensor.shape == (rows, width) and tensor.stride(1) == 1
            if not whole or tensor.dtype != torch.bfloat16:
                raise ValueError(f"{name} must be bf16 [{rows}, {width}] with whole rows")
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for first in range(0, rows, MAX_ROWS):
            piece = slice(first, first + MAX_ROWS)
            self._run(attn[piece], x[piece], out[piece])
        return out

    def _run(self, attn: Tensor, x: Tensor, out: Tensor) -> None:
        sizes = self._o.inputs, self._o.outputs, self._gate_up.outputs
        calls = self._rooms.calls(("post", len(x), sizes, self._bits), lambda: self.calls(len(x)))
        self.fill([call.block for call in calls], attn, x, out)
        for call in calls:
            call()

    def fill(self, blocks: Sequence[Block], attn: Tensor, x: Tensor, out: Tensor) -> None:
        """Make the blocks of `calls` of any layer of equal sizes this layer's; out may be x."""
        o, norm, gate_up, down = blocks
        o[gemm.INPUT] = attn.data_ptr()
        o[gemm.INPUT_STRIDE] = attn.stride(0) * 2
        o[gemm.WEIGHT] = self._o.address
        o[gemm.OTHER] = x.data_ptr()
        o[gemm.OTHER_STRIDE] = x.stride(0) * 2
        norm[kernel.WEIGHT] = self._norm.data_ptr()
        gate_up[gemm.WEIGHT] = self._gate_up.address
        down[gemm.WEIGHT] = self._down.address
        down[gemm.OUT] = out.data_ptr()

    def calls(self, rows: int) -> tuple[Call, Call, Call, Call]:
        """The four kernels for up to MAX_ROWS rows, right while the rooms' state is what it is.
        Between O and norm rows are rows; from then on they lie as tiles.
        """
        hidden, tiles = self._o.outputs, count_tiles(rows) * amx_ir.TILE
        gate_tiles = self._gate_up.outputs // 32
        inside, normal, gated = self._rooms.rows.take(
            rows * hidden * 2, hidden // 32 * tiles, gate_tiles * tiles
        )
        o, gate_up, down = (each.call(rows) for each in (self._o, self._gate_up, self._down))
        o.block[gemm.OUT] = inside
        o.block[gemm.OUT_STRIDE] = hidden * 2
        norm = norm_call(rows, hidden, self._bits)
        norm.block[kernel.INPUT] = inside
        norm.block[kernel.INPUT_STRIDE] = hidden * 2
        norm.block[kernel.OUT] = normal
        norm.block[kernel.K_BLOCK] = input_block(count_tiles(rows))
        gate_up.block[gemm.INPUT_TILES] = normal
        gate_up.block[gemm.OUT] = gated
        gate_up.block[gemm.OUT_TILES] = gate_tiles
        down.block[gemm.INPUT_TILES] = gated
        down.block[gemm.OUT_STRIDE] = hidden * 2
        down.block[gemm.OTHER] = inside
        down.block[gemm.OTHER_STRIDE] = hidden * 2
        return o, norm, gate_up, down


def norm_call(rows: int, width: int, eps_bits: int) -> Call:
    """A call of the norm's kernel, whose places are the caller's to fill in."""
    threads = 1 if rows == 1 else torch.get_num_threads()
    call = Call(kernel.norm_kernel(), kernel.NUM_FIELDS, kernel.NUM_ROWS, threads)
    call.block[kernel.NUM_ROWS] = rows
    call.block[kernel.WIDTH] = width
    call.block[kernel.EPSILON_BITS] = eps_bits
    return call


def norm_rows(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = weight * (x over its root mean square), row by row: x, out [rows, H], weight [H], bf16
    with whole rows; rounded to bf16 before the weight as well.
    """
    assert x.dtype == out.dtype == weight.dtype == torch.bfloat16
    assert x.shape == out.shape and weight.shape == x.shape[1:] and weight.is_contiguous()
    assert x.stride(1) == out.stride(1) == 1
    rows, width = x.shape
    call = norm_call(rows, width, float_bits(eps))
    call.block[kernel.INPUT] = x.data_ptr()
    call.block[kernel.INPUT_STRIDE] = x.stride(0) * 2
    call.block[kernel.WEIGHT] = weight.data_ptr()
    call.block[kernel.OUT] = out.data_ptr()
    call.block[kernel.OUT_STRIDE] = out.stride(0) * 2
    call()


def float_bits(value: float) -> int:
    """A float32 as an integer."""
    (bits,) = struct.unpack("I", struct.pack("f", value))
    return int(bits)


def takes(o: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether PostAttention takes matrices of these dtypes and sizes."""
    return all(w.dtype == torch.bfloat16 and fits(*w.shape) for w in (o, gate_up, down))
