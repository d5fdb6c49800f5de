"""A batch's edits of logits as tensors. Knows nothing about what they do (`graphs.logit_edits`)."""

from collections.abc import Sequence

import numpy as np
import torch

from dualpace.graphs.logit_edits import LogitEdits
from dualpace.runtime.messages import Edits


def logit_edits(edits: Edits, device: torch.device) -> LogitEdits:
    """On `device`, by copies that nothing waits for."""
    places = (
        edits.rows,
        edits.bias_owner,
        edits.bias_token,
        edits.seen_owner,
        edits.seen_token,
        edits.rows[edits.only != 0],
        edits.rows[edits.masked != 0],
    )
    values = (
        edits.min_p,
        edits.presence,
        edits.frequency,
        edits.repetition,
        edits.bias,
        edits.seen_count,
    )
    rows, bias_owner, bias_token, seen_owner, seen_token, only, masked = _moved(
        places, np.int64, device
    )
    min_p, presence, frequency, repetition, bias, seen_count = _moved(values, np.float32, device)
    return LogitEdits(
        rows=rows,
        min_p=min_p,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        bias_owner=bias_owner,
        bias_token=bias_token,
        bias=bias,
        only=only,
        seen_owner=seen_owner,
        seen_token=seen_token,
        seen_count=seen_count,
        any_min_p=bool(edits.min_p.any()),
        masked=masked,
        masks=_masks(edits.masks, len(masked), device),
    )


def _masks(words: np.ndarray, count: int, device: torch.device) -> torch.Tensor:
    if not count:  # of most batches
        return torch.empty(0, 0, dtype=torch.int32, device=device)
    return _moved([words], np.int32, device)[0].view(count, -1)


def _moved(
    arrays: Sequence[np.ndarray], dtype: type, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """All as `dtype`, each a part of one tensor there."""
    packed = torch.from_numpy(np.concatenate(arrays, dtype=dtype))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return torch.split(packed, [len(array) for array in arrays])


def no_edits() -> Edits:
    """Edits of no row."""
    places, values = np.empty(0, np.int32), np.empty(0, np.float32)
    return Edits(
        rows=places,
        min_p=values,
        presence=values,
        frequency=values,
        repetition=values,
        bias_owner=places,
        bias_token=places,
        bias=values,
        only=np.empty(0, np.uint8),
        seen_owner=places,
        seen_token=places,
        seen_count=places,
        masked=np.empty(0, np.uint8),
        masks=places,
    )
