"""These tests are the only proof of what a stand-in cannot show: kernels, graphs and streams."""

import pytest
import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu" and item.path.parent.parent.name == "tests":
            item.add_marker(pytest.mark.gpu)
