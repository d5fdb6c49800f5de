"""Arrays of the messages and the assist buffer as tensors."""

from dataclasses import replace

import numpy as np
import torch

from dualpace.graphs.sampling import SamplingRows
from dualpace.runtime.assist import AssistBuffer
from dualpace.runtime.messages import Edits, no_bytes
from dualpace.runtime.order import Decision
from dualpace.runtime.wire import decode
from dualpace.runtime.worker.edits import logit_edits, no_edits
from dualpace.runtime.worker.rows import SamplingArrays


class Activations:
    """`residual` and `result` [max_rows, H], `attention_parts` [max_rows, N * D], the columns of
    one CPU rank each, and `attention`, that of `rank`: shared memory.
    """

    def __init__(self, buffer: AssistBuffer, dtype: torch.dtype, rank: int = 0) -> None:
        self._buffer = buffer
        rows = buffer.layout.max_rows

        def view(name: str) -> torch.Tensor:
            return torch.frombuffer(buffer.bytes_of(name), dtype=dtype).view(rows, -1)

        self.residual = view("residual")
        parts = range(buffer.layout.attention_parts)
        self.attention_parts = [view(f"attention_{part}") for part in parts]
        self.attention = self.attention_parts[rank]
        self.result = view("result")

    def sampling(self, num_rows: int) -> SamplingArrays:
        """The sampling rows of the published batch, copied out."""
        parts = (self._buffer.temperature, self._buffer.top_k, self._buffer.top_p)
        temperature, top_k, top_p = (part[:num_rows].copy() for part in parts)
        uniform, encoded = self._buffer.uniform[:num_rows].copy(), self._buffer.edits()
        edits = decode(encoded.data) if len(encoded) else None
        assert edits is None or isinstance(edits, Edits)
        return SamplingArrays(temperature, top_k, top_p, uniform, edits)

    def write_sampling(self, sampling: SamplingArrays) -> None:
        rows = len(sampling.temperature)
        self._buffer.temperature[:rows] = sampling.temperature
        self._buffer.top_k[:rows] = sampling.top_k
        self._buffer.top_p[:rows] = sampling.top_p
        self._buffer.uniform[:rows] = sampling.uniform
        edits = sampling.edits
        encoded = no_bytes() if edits is None else np.frombuffer(edits.encode(), np.uint8)
        self._buffer.write_edits(encoded)


def sampling_rows(arrays: SamplingArrays, device: torch.device | None = None) -> SamplingRows:
    """On `device` (None: the host), with the flags that are read on the host."""
    parts = (arrays.temperature, arrays.top_k, arrays.top_p, arrays.uniform)
    rows = SamplingRows.of(*(torch.from_numpy(part) for part in parts))
    if arrays.edits is not None:
        rows = replace(rows, edits=logit_edits(arrays.edits, device or torch.device("cpu")))
    if device is None or device.type == "cpu":
        return rows
    return replace(
        rows,
        temperature=rows.temperature.to(device),
        top_k=rows.top_k.to(device),
        top_p=rows.top_p.to(device),
        u=rows.u.to(device),
    )


def sampling_like(decision: Decision) -> SamplingArrays:
    """For a rank that follows: what takes the same way through the stages as the first rank's
    sampling does, which it alone reads. Whatever tokens come out of it are not used.
    """
    rows = decision.rows
    temperature = np.full(rows, 0.0 if decision.all_greedy else 1.0, np.float32)
    top_p, uniform = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    edits = no_edits() if decision.has_edits else None
    return SamplingArrays(temperature, np.zeros(rows, np.int32), top_p, uniform, edits)
