"""Binary messages without pickle: a message is a dataclass, its fields are its wire format.

`int` and `float` take 8 bytes, `str` and arrays a length and their bytes, all padded to 8. An
array field is annotated with one of the aliases below, which fixes its dtype. Knows nothing about
who sends what (`messages`) or how bytes travel (`channel`).
"""

import struct
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import numpy as np
import numpy.typing as npt

U8 = Annotated[npt.NDArray[np.uint8], np.dtype(np.uint8)]
I32 = Annotated[npt.NDArray[np.int32], np.dtype(np.int32)]
I64 = Annotated[npt.NDArray[np.int64], np.dtype(np.int64)]
F32 = Annotated[npt.NDArray[np.float32], np.dtype(np.float32)]
F64 = Annotated[npt.NDArray[np.float64], np.dtype(np.float64)]

Buffer = memoryview | bytearray | bytes

_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_KINDS: dict[int, type["Message"]] = {}
_FIELDS: dict[int, tuple[tuple[str, Any], ...]] = {}  # by kind, filled at the first use


def _wire_fields(cls: type["Message"]) -> tuple[tuple[str, Any], ...]:
    """Each field's name and wire type: int, float, str or a numpy dtype."""
    if cls.kind in _FIELDS:
        return _FIELDS[cls.kind]
    hints = get_type_hints(cls, include_extras=True)
    wire: list[tuple[str, Any]] = []
    for field in fields(cls):
        hint = hints[field.name]
        metadata = getattr(hint, "__metadata__", None)
        kind = metadata[0] if metadata else hint
        assert kind in (int, float, str) or isinstance(kind, np.dtype), (
            f"{cls.__name__}.{field.name}"
        )
        wire.append((field.name, kind))
    return _FIELDS.setdefault(cls.kind, tuple(wire))


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


@dataclass(slots=True)
class Message:
    """Base of all messages. A subclass names its number: `class Ready(Message, kind=3)`."""

    kind: ClassVar[int] = 0

    def __init_subclass__(cls, kind: int = 0) -> None:
        # `slots=True` makes a second class of the same name; it takes the first one's place.
        if kind:
            cls.kind = kind
        assert cls.kind, f"{cls.__name__} names no kind"
        known = _KINDS.get(cls.kind)
        assert known is None or known.__qualname__ == cls.__qualname__, f"kind {cls.kind} is taken"
        _KINDS[cls.kind] = cls

    def nbytes(self) -> int:
        """Bytes that `encode_into` will write."""
        total = 8
        for name, kind in _wire_fields(type(self)):
            value = getattr(self, name)
            if kind is str:
                total += 8 + _padded(len(value.encode()))
            elif isinstance(kind, np.dtype):
                total += 8 + _padded(value.size * kind.itemsize)
            else:
                total += 8
        return total

    def encode_into(self, buffer: memoryview | bytearray) -> int:
        """Writes the message at the start of `buffer` and returns its length in bytes."""
        _INT.pack_into(buffer, 0, self.kind)
        at = 8
        for name, kind in _wire_fields(type(self)):
            value = getattr(self, name)
            if kind is int:
                _INT.pack_into(buffer, at, value)
                at += 8
            elif kind is float:
                _FLOAT.pack_into(buffer, at, value)
                at += 8
            else:
                if kind is str:
                    raw: Any = value.encode()
                    count = len(raw)
                else:
                    raw = np.ascontiguousarray(value, kind).view(np.uint8).data
                    count = value.size
                _INT.pack_into(buffer, at, count)
                at += 8
                buffer[at : at + len(raw)] = raw
                at += _padded(len(raw))
        return at

    def encode(self) -> bytearray:
        buffer = bytearray(self.nbytes())
        self.encode_into(buffer)
        return buffer

    @classmethod
    def _decode_fields(cls, buffer: Buffer) -> Self:
        at = 8
        values: list[Any] = []
        for _, kind in _wire_fields(cls):
            if kind is int:
                values.append(_INT.unpack_from(buffer, at)[0])
                at += 8
            elif kind is float:
                values.append(_FLOAT.unpack_from(buffer, at)[0])
                at += 8
            else:
                count = _INT.unpack_from(buffer, at)[0]
                at += 8
                if kind is str:
                    values.append(bytes(buffer[at : at + count]).decode())
                    at += _padded(count)
                else:
                    array = np.frombuffer(buffer, kind, count, at)
                    values.append(array.copy())  # the buffer is reused by the next message
                    at += _padded(count * kind.itemsize)
        return cls(*values)


def decode(buffer: Buffer) -> Message:
    """The message at the start of `buffer`; its arrays are copies."""
    number = _INT.unpack_from(buffer, 0)[0]
    assert number in _KINDS, f"unknown message kind {number}"
    return _KINDS[number]._decode_fields(buffer)
