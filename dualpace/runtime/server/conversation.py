"""Messages of a chat, from what clients send to what chat templates read.

Only text can be read; anything else is refused with its place: `messages[2].content[1]`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict

from dualpace.runtime.sampling_params import InvalidParameter
from dualpace.runtime.server.errors import APIError
from dualpace.runtime.server.lists import FIRST_FAULT
from dualpace.runtime.server.wording import shown

FRAME_CHARS = 20  # what a template writes around a message, which may be empty
_ROLES = ("system", "developer", "user", "assistant")
_TOOLS = "this server calls no tools"
# Roles and fields of messages that ask for what is not built; null and what is empty asks nothing.
_UNUSED: Sequence[Any] = (None, [], "", {})


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    name: str | None = None

    def for_template(self, where: str) -> dict[str, str]:
        """As chat templates read it. Raises APIError for what is no plain text."""
        self._check_role(f"{where}.role")
        _check_extra(where, self.model_extra or {})
        # "developer" is the newer word for the same thing; templates know the older one.
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self._text(f"{where}.content")}
        return message | ({"name": self.name} if self.name is not None else {})

    def _check_role(self, where: str) -> None:
        if self.role in ("tool", "function"):
            raise _refused(where, f"'{where}' is {shown(self.role)}: {_TOOLS}")
        if self.role not in _ROLES:
            known = ", ".join(map(shown, _ROLES[:-1]))
            text = f"'{where}' must be {known} or {shown(_ROLES[-1])}, not {shown(self.role)}."
            raise APIError(400, text, where, "invalid_value")

    def _text(self, where: str) -> str:
        content = self.content
        if content is None and "content" not in self.model_fields_set:
            raise APIError(400, f"'{where}' is missing.", where, "missing_required_parameter")
        if content is None or content == []:
            given = "null" if content is None else "an empty list"
            text = f"'{where}' must be a string or a list of text parts, not {given}."
            raise APIError(400, text, where, "invalid_type")
        if isinstance(content, str):
            return content
        return "\n".join(_part(f"{where}[{at}]", part) for at, part in enumerate(content))


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Raises APIError or InvalidParameter for what cannot be put to a model."""
    if not messages:
        raise InvalidParameter("messages", "'messages' is empty: send at least one.")
    return [message.for_template(f"messages[{at}]") for at, message in enumerate(messages)]


def _part(where: str, part: Mapping[str, Any]) -> str:
    """The text of a content part."""
    for key in ("type", "text"):
        name = f"{where}.{key}"
        if key == "text" and part["type"] != "text":
            kind = shown(part["type"])
            text = f"'{where}' is of type {kind}: this server reads text parts only"
            raise _refused(where, text)
        if key not in part:
            raise APIError(400, f"'{name}' is missing.", name, "missing_required_parameter")
        if not isinstance(part[key], str):
            text = f"'{name}' must be a string, not {shown(part[key])}."
            raise APIError(400, text, name, "invalid_type")
    _check_extra(where, {key: part[key] for key in part if key not in ("type", "text")})
    text = part["text"]
    assert isinstance(text, str)
    return text


def _check_extra(where: str, more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if value not in _UNUSED:
            why = f": {_TOOLS}" if name in ("tool_calls", "function_call") else ""
            text = f"'{where}.{name}' is not supported by this server{why or '; leave it out'}"
            raise _refused(f"{where}.{name}", text)


def _refused(param: str, text: str) -> APIError:
    return APIError(400, f"{text}.", param, "unsupported_parameter")
