"""POST /tokenize and /detokenize, as vLLM answers them: ids of a text, and the text of ids."""

from typing import Annotated, Any

from dualpace.runtime.generation import Tokenizer, chat_text, encode_text
from dualpace.runtime.server.conversation import FRAME_CHARS, ChatMessage, conversation
from dualpace.runtime.server.errors import APIError
from dualpace.runtime.server.lists import FIRST_FAULT, TokenIds
from dualpace.runtime.server.openai import Strict


class TokenizeRequest(Strict):
    """Of a prompt, as /v1/completions takes it, or of messages, as chat does; null is absent."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FIRST_FAULT] | None = None
    add_special_tokens: bool | None = None  # null: with a prompt; templates write their own
    add_generation_prompt: bool | None = None  # null: true
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """Characters, roughly; a template writes some around each message."""
        contents = [message.content for message in self.messages or ()]
        return len(self.prompt or "") + sum(len(str(each)) + FRAME_CHARS for each in contents)


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: TokenIds


def tokenize(tokenizer: Tokenizer, request: TokenizeRequest, max_context: int) -> dict[str, Any]:
    """Raises APIError and what `encode_text` and chat templates raise."""
    if (request.prompt is None) == (request.messages is None):
        code = "missing_required_parameter" if request.prompt is None else "invalid_value"
        raise APIError(400, "Send one of 'prompt' and 'messages'.", "prompt", code)
    if request.prompt is not None:
        text, special = request.prompt, True
    else:
        opens = request.add_generation_prompt is not False
        messages, variables = conversation(request.messages or []), request.chat_template_kwargs
        text, special = chat_text(tokenizer, messages, variables, opens), False
    if request.add_special_tokens is not None:
        special = request.add_special_tokens
    ids = encode_text(tokenizer, text, max_context, special)
    return {"count": len(ids), "max_model_len": max_context, "tokens": ids, "token_strs": None}


def detokenize(tokenizer: Tokenizer, request: DetokenizeRequest, vocab: int) -> dict[str, str]:
    """Special tokens are spelled out. Raises APIError for ids that are none."""
    for at, token in enumerate(request.tokens):
        if not 0 <= token < vocab:
            text = f"'tokens[{at}]' is {token}: token ids are 0 to {vocab - 1}."
            raise APIError(400, text, f"tokens[{at}]", "invalid_value")
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}
