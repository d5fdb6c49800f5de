"""Arrays of the messages and the assist buffer as tensors."""

from dataclasses import replace

import numpy as np
import torch

from dualpace.graphs.logprobs import LogprobRows
from dualpace.graphs.sampling import Drawn, SamplingRows
from dualpace.runtime.assist import AssistBuffer
from dualpace.runtime.logprobs import num_words
from dualpace.runtime.messages import Edits, no_bytes
from dualpace.runtime.order import Decision
from dualpace.runtime.wire import decode
from dualpace.runtime.worker.edits import logit_edits, no_edits
from dualpace.runtime.worker.rows import Asking, SamplingArrays

_NOBODY = np.empty(0, np.int64)


class Activations:
    """`residual` [max_rows, H], whose place the layer's output takes, `attention_parts`
    [max_rows, N * D], the columns of one CPU rank each, and `attention`, that of `rank`: shared
    memory.
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

    def sampling(self, num_rows: int) -> SamplingArrays:
        """The sampling rows of the published batch, copied out."""
        parts = (self._buffer.temperature, self._buffer.top_k, self._buffer.top_p)
        temperature, top_k, top_p = (part[:num_rows].copy() for part in parts)
        uniform, encoded = self._buffer.uniform[:num_rows].copy(), self._buffer.edits()
        edits = decode(encoded.data) if len(encoded) else None
        assert edits is None or isinstance(edits, Edits)
        asking = _asking_in(self._buffer)
        return SamplingArrays(temperature, top_k, top_p, uniform, edits, asking)

    def write_sampling(self, sampling: SamplingArrays) -> None:
        rows = len(sampling.temperature)
        self._buffer.temperature[:rows] = sampling.temperature
        self._buffer.top_k[:rows] = sampling.top_k
        self._buffer.top_p[:rows] = sampling.top_p
        self._buffer.uniform[:rows] = sampling.uniform
        edits = sampling.edits
        encoded = no_bytes() if edits is None else np.frombuffer(edits.encode(), np.uint8)
        self._buffer.write_edits(encoded)
        asking = sampling.asking
        if asking is None:
            self._buffer.write_asking(_NOBODY, 0)
        else:
            self._buffer.write_asking(asking.rows, asking.best)

    def drawn(self, sampling: SamplingArrays) -> Drawn:
        """What came of a batch that was sampled so, copied out."""
        tokens = torch.from_numpy(self._buffer.tokens[: len(sampling.temperature)].copy())
        asking = sampling.asking
        if asking is None:
            return Drawn(tokens)
        count, words = len(asking.rows), num_words(asking.best)
        told = self._buffer.logprobs[: count * words].reshape(count, words)
        return Drawn(tokens, torch.from_numpy(told.copy()))

    def write_drawn(self, drawn: Drawn) -> None:
        """Waits for the device."""
        self._buffer.tokens[: len(drawn.tokens)] = drawn.tokens.cpu().numpy()
        if drawn.logprobs is not None:
            told = drawn.logprobs.cpu().numpy()
            self._buffer.logprobs[: told.size] = told.ravel()


def _asking_in(buffer: AssistBuffer) -> Asking | None:
    rows, best = buffer.asking()
    return Asking(rows.astype(np.int64), best) if len(rows) else None


def sampling_rows(arrays: SamplingArrays, device: torch.device | None = None) -> SamplingRows:
    """On `device` (None: the host), with the flags that are read on the host."""
    parts = (arrays.temperature, arrays.top_k, arrays.top_p, arrays.uniform)
    rows = SamplingRows.of(*(torch.from_numpy(part) for part in parts))
    if arrays.edits is not None:
        rows = replace(rows, edits=logit_edits(arrays.edits, device or torch.device("cpu")))
    if arrays.asking is not None:
        rows = replace(rows, logprobs=logprob_rows(arrays.asking, device or torch.device("cpu")))
    if device is None or device.type == "cpu":
        return rows
    return replace(
        rows,
        temperature=rows.temperature.to(device),
        top_k=rows.top_k.to(device),
        top_p=rows.top_p.to(device),
        u=rows.u.to(device),
    )


def logprob_rows(asking: Asking, device: torch.device) -> LogprobRows:
    """On `device`, by a copy that nothing waits for."""
    rows = torch.from_numpy(asking.rows)
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    return LogprobRows(rows, asking.best)


def sampling_like(decision: Decision) -> SamplingArrays:
    """For a rank that follows: what takes the same way through the stages as the first rank's
    sampling does, which it alone reads. Whatever tokens come out of it are not used.
    """
    rows = decision.rows
    temperature = np.full(rows, 0.0 if decision.all_greedy else 1.0, np.float32)
    top_p, uniform = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    edits = no_edits() if decision.needs_logits else None
    return SamplingArrays(temperature, np.zeros(rows, np.int32), top_p, uniform, edits)
