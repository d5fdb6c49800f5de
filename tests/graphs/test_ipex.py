"""Choosing IPEX where it cannot run is one sentence."""

import pytest

from dualpace.errors import ConfigError
from dualpace.graphs.backends.ipex import require_match


@pytest.mark.parametrize(
    ("torch_version", "ipex_version", "sentence"),
    [
        ("2.13.0+cpu", None, "not installed"),
        ("2.13.0+cpu", "2.8.0", r"2\.8\.0 is not made for torch 2\.13\.0"),
    ],
)
def test_a_mismatch_is_one_sentence(
    torch_version: str, ipex_version: str | None, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        require_match(torch_version, ipex_version)


def test_the_same_release_is_accepted() -> None:
    require_match("2.8.0+cpu", "2.8.10")
