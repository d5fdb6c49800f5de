"""Tokenizer of a model: text to ids and back, chat prompts, special ids. No torch.

Built on the `tokenizers` library, from a Hugging Face folder's tokenizer.json or from the
vocabulary in a GGUF file (tokenizer_gguf.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dualpace.errors import ConfigError
from dualpace.graphs.chat import ChatError, ChatTemplate
from dualpace.graphs.detokenizer import IncrementalDetokenizer, byte_alphabet
from dualpace.graphs.hf_config import read_json
from dualpace.graphs.source import Source
from dualpace.graphs.special_tokens import SpecialTokens

_BYTE_OF = byte_alphabet()


class Tokenizer:
    """Thread-safe apart from what `tokenizers` itself locks."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self._backend = backend
        self._special = special
        self._template: ChatTemplate | None = None
        self._byte_level, self._strip_first_space = _decoder_kind(backend)
        self._bytes: dict[int, bytes] = {}
        eos = [self.token_id(special.names["eos_token"])] if "eos_token" in special.names else []
        self.eos_ids: tuple[int, ...] = tuple(
            dict.fromkeys(i for i in [*eos_ids, *eos] if i is not None)
        )
        self.special_ids = special.ids
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` puts a BOS in front where the model wants one."""
        # As a batch of one: only batches release the interpreter lock, and texts can be long.
        batch = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of `ids`."""
        detokenizer = self.detokenizer(skip_special_tokens, continues=False)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(
        self, skip_special_tokens: bool = True, continues: bool = True
    ) -> IncrementalDetokenizer:
        """A detokenizer for one sequence; `continues`: it goes on after a prompt, so that its first
        space is a space, not the mark that some vocabularies put before a text.
        """
        token_bytes = self._text_bytes if skip_special_tokens else self.token_bytes
        return IncrementalDetokenizer(token_bytes, self._strip_first_space and not continues)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, None for an unknown one."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, maybe a part of a character; nothing for an unknown id."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
            return token.encode()  # an added token, spelled as it is
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    @property
    def has_chat_template(self) -> bool:
        return self._special.chat_template is not None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it with add_special_tokens=False. `variables`
        are the template's own, but for those that are parameters here.

        ChatError when the model has no template or its template refuses the messages.
        """
        if self._special.chat_template is None:
            raise ChatError("the model has no chat template; use completions with a plain prompt")
        if self._template is None:
            self._template = ChatTemplate(self._special.chat_template, self._special.names)
        return self._template.render(messages, tools, add_generation_prompt, variables)


def load_tokenizer(source: Source) -> Tokenizer:
    """The tokenizer of a model; for random weights one of bytes and made-up words."""
    # Imported late: what only one kind of source needs.
    from dualpace.graphs.tokenizer_gguf import backend_from_gguf, byte_backend

    eos_ids = source.spec.eos_token_ids
    if source.kind == "random":
        backend = byte_backend(source.spec.vocab)
        return Tokenizer(backend, SpecialTokens({}, frozenset()), eos_ids)
    if source.kind == "gguf":
        assert source.file is not None
        try:
            return Tokenizer(*backend_from_gguf(source.file), eos_ids)
        except ConfigError:
            raise
        except Exception as error:  # the library raises nothing narrower
            file = source.file.path
            text = f"{file} has no tokenizer that can be read ({error!r}); fetch the model again"
            raise ConfigError(text) from error
    assert source.path is not None
    return Tokenizer(*_backend_from_folder(source.path), eos_ids)


def _backend_from_folder(folder: Path) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; save its tokenizer in the fast format")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path} is no tokenizer ({error}); fetch the model again") from error
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    names = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
    return backend, SpecialTokens(names, ids, _folder_template(folder, config))


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        path = folder / "tokenizer_config.json"
        template: Any = config.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template is None or isinstance(template, str):
            return template
    except (UnicodeDecodeError, KeyError, TypeError):
        pass
    raise ConfigError(f"{path} has a chat template that is no text; fetch the model again")


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(whether tokens are spelled in the byte alphabet, whether text loses its first space)."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if kinds & {"ByteFallback", "Metaspace"}:
        strips = any(s["type"] == "Strip" and s["start"] > 0 for s in steps)
        schemes = [s.get("prepend_scheme", "always") for s in steps if s["type"] == "Metaspace"]
        return False, strips or any(scheme != "never" for scheme in schemes)
    raise ConfigError(
        f"tokenizer with decoder {sorted(map(str, kinds))} is not supported; DualPace reads "
        "byte-level and SentencePiece BPE"
    )
