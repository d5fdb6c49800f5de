"""The form that an answer is asked to have, in OpenAI's words and in vLLM's, newer and older."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dualpace.runtime.sampling_params import InvalidParameter
from dualpace.runtime.server.errors import APIError
from dualpace.runtime.server.lists import Texts
from dualpace.runtime.structured import StructuredOutputsParams


class _Words(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    def refuse_extra(self, where: str) -> None:
        """Raises APIError for a name that is no field and asks for something."""
        for name, value in (self.model_extra or {}).items():
            if value not in (None, False):
                param = f"{where}.{name}"
                text = f"'{param}' is not supported by this server; leave it out."
                raise APIError(400, text, param, "unsupported_parameter")


class JsonSchema(_Words):
    """`strict` changes nothing: answers always keep to the schema."""

    name: str
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(_Words):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def params(self) -> StructuredOutputsParams | None:
        self.refuse_extra("response_format")
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True, asked_as="response_format")
        if self.json_schema is None:
            param = "response_format.json_schema"
            raise APIError(400, f"'{param}' is missing.", param, "missing_required_parameter")
        self.json_schema.refuse_extra("response_format.json_schema")
        name = "response_format.json_schema.schema"
        return StructuredOutputsParams(json=self.json_schema.schema_, asked_as=name)


class StructuredOutputs(_Words):
    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None

    def params(self) -> StructuredOutputsParams:
        self.refuse_extra("structured_outputs")
        return StructuredOutputsParams(
            json=self.json_,
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            disable_any_whitespace=self.disable_any_whitespace,
        )


def structured_params(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    guided: Mapping[str, Any],
) -> StructuredOutputsParams | None:
    """`guided`: by what stands behind `guided_`. Raises APIError, for several InvalidParameter."""
    found = {
        "response_format": response_format.params() if response_format else None,
        "structured_outputs": structured_outputs.params() if structured_outputs else None,
    }
    for way, value in guided.items():
        name = f"guided_{way}"
        asked = {way: value, "asked_as": name}
        found[name] = None if value is None else StructuredOutputsParams(**asked)
    given = {name: params for name, params in found.items() if params is not None}
    if len(given) > 1:
        first, *_, last = given
        raise InvalidParameter(last, f"'{first}' and '{last}' cannot both be used: send one.")
    return next(iter(given.values()), None)
