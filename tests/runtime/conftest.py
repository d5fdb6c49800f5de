"""A test that the hunt for mutants cannot run says so itself, and not only `test_mutants` does."""

import pytest

from tests.mutants import refusal


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := refusal(item):
        pytest.fail(reason, pytrace=False)
