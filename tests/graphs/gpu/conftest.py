"""The device of these tests; where there is no GPU, kernels are interpreted on the CPU."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
