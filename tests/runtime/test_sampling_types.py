"""Sampling parameters of types that Python lets pass and no engine could read."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dualpace import SamplingParams
from dualpace.runtime.sampling_params import InvalidParameter
from dualpace.runtime.sampling_types import _TAKES
from dualpace.runtime.structured import StructuredOutputsParams


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("temperature", "0.5", "a number"),
        ("temperature", None, "a number"),
        ("top_p", True, "a number"),
        ("top_k", 1.5, "an integer"),
        ("seed", 1.5, "an integer or None"),
        ("max_tokens", True, "an integer or None"),
        ("logprobs", 1.0, "an integer or None"),
        ("ignore_eos", "yes", "True or False"),
        ("stop", None, "a string or a list of strings"),
        ("stop", [1], "a string or a list of strings"),
        ("stop", b"end", "a string or a list of strings"),
        ("stop_token_ids", None, "a list of token ids"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", [1.0], "a list of token ids"),
        ("allowed_token_ids", np.array([1]), "a list of token ids"),
        ("logit_bias", {"10": 5}, "a dict of token ids and numbers"),
        ("logit_bias", {10: "5"}, "a dict of token ids and numbers"),
        ("logit_bias", [10], "a dict of token ids and numbers"),
        ("structured_outputs", {"regex": "a"}, "StructuredOutputsParams or None"),
    ],
)
def test_a_wrong_type_is_refused_by_name(name: str, value: Any, takes: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    assert str(refused.value).startswith(f"{name} must be {takes}, not ")


def test_what_fits_passes() -> None:
    form = StructuredOutputsParams(regex="a")
    assert SamplingParams(temperature=1, stop="end", structured_outputs=form).stops == ("end",)
    assert SamplingParams(logit_bias={1: 2}, stop_token_ids={3}, allowed_token_ids=range(2))


def test_each_parameter_has_a_type() -> None:
    assert set(_TAKES) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_a_long_value_is_cut() -> None:
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams(stop=b"x" * 10_000)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 150
