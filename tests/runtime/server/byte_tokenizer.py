"""A tokenizer whose tokens are bytes, so that tests can predict every token and cut characters."""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dualpace.graphs.chat import ChatError

EOS = 256
VOCAB = 257


class ByteDetokenizer:
    def __init__(self, skip_special_tokens: bool = True) -> None:
        self._end = b"" if skip_special_tokens else b"<end>"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(bytes([i]) if i < EOS else self._end for i in ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def detokenizer(self, skip_special_tokens: bool = True) -> ByteDetokenizer:
        return ByteDetokenizer(skip_special_tokens)

    special_ids = frozenset([EOS])

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == EOS else bytes([token_id])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        end = "" if skip_special_tokens else "<end>"
        return "".join(chr(i) if i < EOS else end for i in ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The last message alone is the prompt; one of several is shown as JSON, and so are
        variables."""
        if variables:
            return json.dumps(variables)
        if not add_generation_prompt:
            return f"closed: {messages[-1]['content']}"
        if messages[-1]["role"] == "assistant":
            raise ChatError("the last message must be the user's")
        return str(messages[-1]["content"]) if len(messages) == 1 else json.dumps(list(messages))
