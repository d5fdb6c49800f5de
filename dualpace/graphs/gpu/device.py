"""What the kernels must know of the device that they run on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 4 elsewhere, so that tests cover several programs."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (Hopper and later).

    Every kernel that is launched so waits for its predecessor before it reads or writes anything
    but weights; that makes the chain as safe as plain stream order.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a kernel that takes the constant PDL."""
    if has_dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
