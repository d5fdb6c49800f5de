"""From token ids to text, a token at a time: each token is some bytes, text is their UTF-8.

The cost of a token does not depend on how much text came before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

TokenBytes = Callable[[int], bytes]


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, and back: char -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {chr(byte): byte for byte in plain}
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}


class IncrementalDetokenizer:
    """Text of a growing token sequence, in pieces that never end inside a character."""

    def __init__(self, token_bytes: TokenBytes, strip_first_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_first_space = strip_first_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; bytes of an unfinished character wait for the next call."""
        return self._emit(b"".join(map(self._token_bytes, ids)), final=False)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._strip_first_space and text:
            self._strip_first_space = False
            text = text.removeprefix(" ")
        return text
