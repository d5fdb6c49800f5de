"""Compiles forms with the library xgrammar, which is loaded here and nowhere else, and late: with
it comes torch, which the engine does without.
"""

import re
from typing import TYPE_CHECKING

from dualpace.errors import ConfigError
from dualpace.runtime.engine.forms import FormRefused
from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.logit_rules import words_of_mask
from dualpace.runtime.plan import ModelPlan

if TYPE_CHECKING:
    import xgrammar

_MAX_WHITESPACE = 32  # characters between two parts of JSON
_CONTROLS = frozenset(range(32)).difference(b"\n\r")
_SHARED_BYTES = 16 << 20  # of what forms have in common, each way
_NAMES = {"regex": "the regular expression", "grammar": "the grammar"}


class XgrammarForm:
    def __init__(self, compiled: "xgrammar.CompiledGrammar", num_words: int) -> None:
        self._compiled = compiled
        self._num_words = num_words

    @property
    def nbytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def guide(self) -> Guide:
        import xgrammar

        return Guide(xgrammar.GrammarMatcher(self._compiled), self._num_words)


class XgrammarCompiler:
    """For one model. Thread-safe. Takes seconds to construct, of which half a second in one go."""

    def __init__(self, model: ModelPlan) -> None:
        """Raises FormRefused where the library or the model's tokenizer is missing."""
        try:
            import xgrammar
        except ImportError as error:
            raise FormRefused(
                f"structured outputs need the library xgrammar, and it cannot be loaded ({error}): "
                "pip install dualpace[structured]"
            ) from None
        from dualpace.graphs.source import resolve_source
        from dualpace.graphs.tokenizer import load_tokenizer

        try:
            tokenizer = load_tokenizer(resolve_source(model.source))
        except ConfigError as error:
            raise FormRefused(f"the model has no tokenizer that can be used: {error}") from None
        unsaid = {*tokenizer.special_ids, *model.eos_token_ids}
        # Of tokens that are no text, and of those that only the model's padding has, no bytes: they
        # never come.
        vocab = [b"" if i in unsaid else tokenizer.token_bytes(i) for i in range(model.vocab)]
        # Nor do control characters in JSON but for line breaks; the library lets them through in
        # some strings.
        in_json = [b"" if _CONTROLS.intersection(token) else token for token in vocab]
        self._num_words = words_of_mask(model.vocab)
        self._of_text, self._of_json = (
            xgrammar.GrammarCompiler(
                xgrammar.TokenizerInfo(
                    tokens, vocab_size=model.vocab, stop_token_ids=list(model.eos_token_ids)
                ),
                max_threads=1,
                cache_limit_bytes=_SHARED_BYTES,
            )
            for tokens in (vocab, in_json)
        )

    def compile(self, kind: str, text: str) -> XgrammarForm:
        try:
            return XgrammarForm(self._compiled(kind, text), self._num_words)
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            what, why = _NAMES.get(kind, "the schema"), _plain(str(error))
            if isinstance(error, MemoryError) or "bad_alloc" in why:
                why = "it takes too much memory, make it simpler"
            raise FormRefused(f"{what} cannot be compiled: {why}") from None

    def _compiled(self, kind: str, text: str) -> "xgrammar.CompiledGrammar":
        if kind == "json":
            return self._of_json.compile_json_schema(text, max_whitespace_cnt=_MAX_WHITESPACE)
        if kind == "compact":
            return self._of_json.compile_json_schema(text, any_whitespace=False)
        if kind == "regex":
            return self._of_text.compile_regex(text)
        return self._of_text.compile_grammar(text)


def _plain(text: str) -> str:
    """Without the time and the place in the library's source."""
    text = re.sub(r"^\[[^\]]*\] \S+: ", "", text).strip().removesuffix(".")
    return text[0].lower() + text[1:] if text[1:2].islower() else text
