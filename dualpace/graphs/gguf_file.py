"""A reader of GGUF files: metadata and where each tensor lies. No torch, nothing copied.

The format is a header, key-value pairs, tensor records, padding, and the tensors' data. Reading
the 100,000 strings of a vocabulary takes tens of milliseconds, so a process opens a model once and
hands the file on.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualpace.errors import ConfigError, unreadable

# Value type of the format -> struct code.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

F32 = 0  # a ggml_type


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies; `shape` is in torch's order (rows first)."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # bytes from the start of the file


class GGUFFile:
    """`metadata` by key, `tensors` by name, and `data`, the mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                if file.read(4) != b"GGUF":
                    raise ConfigError(f"{path} is not a GGUF file; give a .gguf model")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            self._read_header()
        except (struct.error, KeyError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged or cut short; fetch it again") from error

    def _read_header(self) -> None:
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ConfigError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        records = [self._tensor_record() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise KeyError("general.alignment")
        start = -(-self._at // alignment) * alignment
        self.tensors = {
            name: TensorRecord(shape, ggml_type, start + offset)
            for name, shape, ggml_type, offset in records
        }

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self._at)[0]
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self._at)
        self._at += 8 + length
        if self._at > len(self.data):
            raise struct.error("string past the end of the file")
        return self.data[self._at - length : self._at].decode("utf-8")

    def _strings(self, count: int) -> list[str]:
        """As `_string` `count` times; a vocabulary has as many as to make calls dear."""
        data, at, length_at = self.data, self._at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            found.append(data[start:at].decode("utf-8"))
        if at > len(data):
            raise struct.error("string past the end of the file")
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return self._strings(count)
        if item == _ARRAY:
            return [self._value(item) for _ in range(count)]
        layout = f"<{count}{_SCALARS[item]}"
        values = list(struct.unpack_from(layout, self.data, self._at))
        self._at += struct.calcsize(layout)
        return values

    def _tensor_record(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")
