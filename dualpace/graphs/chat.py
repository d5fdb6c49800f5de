"""Chat templates: a model's own Jinja template, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatError(ValueError):
    """Messages that a model's template does not accept; the sentence is for the client."""


def _raise(message: str) -> None:
    raise ChatError(message)


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class ChatTemplate:
    """One compiled template; `tokens` are names such as bos_token that templates mention. ChatError
    for a text that is no template."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, **tokens}
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ChatError(
                f"the model's chat template cannot be read ({error}): use completions with a plain "
                f"prompt"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation; `variables` are what else the template may ask for.
        ChatError when it refuses them."""
        try:
            return self._template.render(
                **(variables or {}),
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except ChatError:
            raise
        except Exception as error:  # a template is the model's own program
            raise ChatError(f"the model's chat template refused the messages: {error}") from error
