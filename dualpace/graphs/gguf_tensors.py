"""Tensors of a GGUF file, dequantized straight into the place that they are wanted in.

The three simplest quantizations are decoded here, a few passes over the data in one thread; the
`gguf` package decodes every other.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dualpace.errors import ConfigError
from dualpace.graphs.gguf_file import F32, GGUFFile

# ggml_type -> (values a block, bytes a block)
_F16, _Q4_0, _Q4_1, _Q8_0, _BF16 = 1, 2, 3, 8, 30
_PLAIN = {F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}
_BLOCK_BYTES = {_Q4_0: 18, _Q4_1: 20, _Q8_0: 34}
_BLOCK_VALUES = 32
_PIECE_BLOCKS = 4096


class GGUFTensors:
    """Reads tensors by name."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch's order; ConfigError for a tensor that the file lacks, or cannot hold."""
        if not self.has(name):
            raise ConfigError(f"{self._file.path} has no tensor {name}; it is not a complete model")
        record = self._file.tensors[name]
        values, size = self._block_of(name)
        if not record.shape or record.shape[-1] % values:
            raise ConfigError(
                f"{self._file.path} has {name} of shape {list(record.shape)} in blocks of {values} "
                f"values; it is damaged, fetch it again"
            )
        if record.offset + math.prod(record.shape) // values * size > len(self._file.data):
            raise ConfigError(f"{self._file.path} is cut short; fetch it again")
        return record.shape

    def read_into(self, name: str, out: Tensor, rows: range, columns: range | None) -> None:
        """Write these rows and columns (None: of a vector) of a tensor to `out` (float32 or bf16,
        contiguous). Whole quantization blocks are read, and no others than the part touches. Its
        `shape` was asked for before.
        """
        record = self._file.tensors[name]
        if columns is None:
            rows, columns = range(1), rows
        values, size = self._block_of(name)
        first, last = columns.start // values, -(-columns.stop // values)
        width = record.shape[-1] // values * size  # bytes of a row
        height = math.prod(record.shape) // record.shape[-1]
        raw = self._bytes(record.offset, height * width).view(height, width)
        raw = raw[rows.start : rows.stop, first * size : last * size]
        if len(columns) == (last - first) * values:
            _decode(record.ggml_type, raw, out.view(len(rows), -1))
        else:
            blocks = out.new_empty(len(rows), (last - first) * values)
            _decode(record.ggml_type, raw, blocks)
            start = columns.start - first * values
            out.copy_(blocks[:, start : start + len(columns)].view_as(out))

    def _block_of(self, name: str) -> tuple[int, int]:
        """(values, bytes) of a block of the tensor's type; ConfigError for an unknown one."""
        kind = self._file.tensors[name].ggml_type
        if kind in _PLAIN:
            return 1, _PLAIN[kind].itemsize
        if kind in _BLOCK_BYTES:
            return _BLOCK_VALUES, _BLOCK_BYTES[kind]
        import gguf  # takes 0.2 s, and most files do not need it

        try:
            known = gguf.GGMLQuantizationType(kind)
            values, size = gguf.GGML_QUANT_SIZES[known]
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), known)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"{self._file.path} has {name} in a format that the installed gguf package cannot "
                f"read ({error}); use another file of the model"
            ) from error
        return values, size

    def _bytes(self, offset: int, size: int) -> Tensor:
        # frombuffer warns about a read-only buffer; nothing writes to these views.
        array = np.frombuffer(self._file.data, np.uint8, size, offset)
        array.flags.writeable = False
        return _borrow(array)


def _borrow(array: np.ndarray) -> Tensor:
    """A tensor over a read-only array; torch has no read-only tensors and warns."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _decode(kind: int, raw: Tensor, out: Tensor) -> None:
    """Decode whole blocks, `raw` [rows, bytes], to contiguous `out` [rows, values]."""
    if kind in _PLAIN:
        out.copy_(raw.view(_PLAIN[kind]))
    elif kind in _BLOCK_BYTES:
        _decode_blocks(kind, raw.reshape(-1, _BLOCK_BYTES[kind]), out.view(-1, _BLOCK_VALUES))
    else:
        import gguf

        decoded = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(kind))
        out.copy_(torch.from_numpy(decoded))


def _decode_blocks(kind: int, raw: Tensor, values: Tensor) -> None:
    """Decode `raw` [blocks, block bytes] to `values` [blocks, 32], piece by piece so that the work
    stays in cache.

    A block: scale (f16), for Q4_1 minimum (f16), then 32 values of 8 bits, or 16 bytes with values
    0-15 in the low and 16-31 in the high halves.
    """
    work = torch.empty(min(_PIECE_BLOCKS, len(raw)), _BLOCK_VALUES)
    for start in range(0, len(raw), _PIECE_BLOCKS):
        piece = raw[start : start + _PIECE_BLOCKS]
        decoded = work[: len(piece)]
        scale = piece[:, 0:2].contiguous().view(torch.float16).float()
        if kind == _Q8_0:
            decoded.copy_(piece[:, 2:].view(torch.int8)).mul_(scale)
        else:
            quants = piece[:, 4 if kind == _Q4_1 else 2 :]
            decoded[:, :16] = quants & 15
            decoded[:, 16:] = quants >> 4
            if kind == _Q4_0:
                decoded.sub_(8).mul_(scale)
            else:
                minimum = piece[:, 2:4].contiguous().view(torch.float16).float()
                decoded.mul_(scale).add_(minimum)
        values[start : start + len(piece)] = decoded
