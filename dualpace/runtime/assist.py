"""The shared buffer of GPU Dense Assist (paper section 4.2): CPU-Ready -> GPU-Running -> GPU-Done.

The CPU worker writes a batch's tensors and publishes; the GPU worker serves it at its next stage
boundary. The handshake changes no ownership. Every state carries the epoch of its publication:
when a worker dies, the engine raises the epoch and rings the survivor, and whatever an older
epoch left is void. Knows no torch: activations are byte regions of `AssistLayout`.
"""

import time
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dualpace.runtime.channel import ring
from dualpace.runtime.shared_memory import SharedRegion

_PAGE = 4096


class AssistState(IntEnum):
    IDLE = 0
    CPU_READY = 1
    GPU_RUNNING = 2
    GPU_DONE = 3


class AssistKind(IntEnum):
    """One post-attention; the last one with the post-layer; the post-layer alone."""

    POST_ATTENTION = 0
    POST_ATTENTION_FINAL = 1
    POST_LAYER = 2


class AssistLostError(Exception):
    """The worker on the other side was lost while this one waited."""


@dataclass(frozen=True, slots=True)
class AssistLayout:
    """Where each tensor lies. Activations have `itemsize` bytes an element; rows are contiguous."""

    max_rows: int
    hidden: int  # H: residual rows, before and after
    attention_width: int  # q_heads * head_dim: attention rows
    itemsize: int
    attention_parts: int = 1  # CPU ranks: each writes the columns of its own heads
    edits_bytes: int = 0  # the longest encoded `messages.Edits`
    logprob_words: int = 0  # the most that a row is told beside its token

    def offsets(self) -> dict[str, tuple[int, int]]:
        """Name -> (offset, bytes); every part starts on its own cache line, each rank's attention
        (`attention_0` ...) on a page of its own.
        """
        rows = self.max_rows
        width = self.attention_width // self.attention_parts
        sizes = {
            "control": 8 * 8,
            "epoch": 8,
            "times": 8 * 8,
            "temperature": 4 * rows,
            "top_k": 4 * rows,
            "top_p": 4 * rows,
            "uniform": 4 * rows,
            "edits": self.edits_bytes,
            "asking": 4 * rows,
            "tokens": 4 * rows,
            "logprobs": 4 * rows * self.logprob_words,
            "residual": rows * self.hidden * self.itemsize,
        }
        for rank in range(self.attention_parts):
            sizes[f"attention_{rank}"] = rows * width * self.itemsize
        at = 0
        offsets = {}
        for name, nbytes in sizes.items():
            unit = _PAGE if name.startswith("attention") else 64
            at = -(-at // unit) * unit
            offsets[name] = (at, nbytes)
            at += nbytes
        return offsets

    @property
    def nbytes(self) -> int:
        offset, nbytes = list(self.offsets().values())[-1]
        return -(-(offset + nbytes) // _PAGE) * _PAGE


class AssistBuffer:
    """One side's view of the buffer. `bytes_of` gives an activation region for torch to wrap."""

    def __init__(self, region: SharedRegion, layout: AssistLayout) -> None:
        self.layout = layout
        self._view = region.view
        self._offsets = layout.offsets()
        self._control = self._array(
            "control", np.int64
        )  # state, kind, layer, rows, publication's epoch, bytes of edits, rows asking, how much
        self._epoch = self._array("epoch", np.int64)
        self.times = self._array("times", np.float64)  # published, and the GPU's parts, seconds
        self.temperature = self._array("temperature", np.float32)
        self.top_k = self._array("top_k", np.int32)
        self.top_p = self._array("top_p", np.float32)
        self.uniform = self._array("uniform", np.float32)
        self.tokens = self._array("tokens", np.int32)
        self.logprobs = self._array("logprobs", np.int32)  # of the rows that ask, row after row
        self._edits = self._array("edits", np.uint8)
        self._asking = self._array("asking", np.int32)

    @property
    def memory(self) -> memoryview:
        """All of it, for a device to register."""
        return self._view

    def bytes_of(self, name: str) -> memoryview:
        offset, nbytes = self._offsets[name]
        return self._view[offset : offset + nbytes]

    def _array(self, name: str, dtype: type) -> np.ndarray:
        return np.frombuffer(self.bytes_of(name), dtype)

    @property
    def epoch(self) -> int:
        return int(self._epoch[0])

    @property
    def is_running(self) -> bool:
        return int(self._control[0]) == AssistState.GPU_RUNNING

    def raise_epoch(self) -> None:
        """Engine only, after a worker's death: whatever is published or running is void."""
        self._epoch[0] += 1
        self._control[0] = AssistState.IDLE

    # ---- CPU worker

    def publish(self, kind: AssistKind, layer: int, rows: int, gpu_doorbell: int) -> None:
        """The tensors of `rows` rows are in place: ask the GPU worker to run `kind`."""
        self._control[1:5] = kind, layer, rows, self.epoch
        self.times[0] = time.monotonic()
        self._control[0] = AssistState.CPU_READY
        ring(gpu_doorbell)

    def write_edits(self, encoded: np.ndarray) -> None:
        """What is done to the batch's logits: encoded `messages.Edits`, uint8, or no bytes."""
        self._edits[: len(encoded)] = encoded
        self._control[5] = len(encoded)

    def write_asking(self, rows: np.ndarray, best: int) -> None:
        """Rows whose log-probabilities are wanted, and of how many of the likeliest tokens."""
        self._asking[: len(rows)] = rows
        self._control[6:8] = len(rows), best

    def is_done(self) -> bool:
        """Raises AssistLostError when the epoch has moved on since the publication."""
        if self.epoch != self._control[4]:
            raise AssistLostError
        return int(self._control[0]) == AssistState.GPU_DONE

    def release(self) -> None:
        """The result has been read."""
        self._control[0] = AssistState.IDLE

    # ---- GPU worker

    def take(self) -> tuple[AssistKind, int, int, int] | None:
        """(kind, layer, rows, epoch) of a ready assist, which is now running, or None."""
        if self._control[0] != AssistState.CPU_READY or self._control[4] != self._epoch[0]:
            return None
        self._control[0] = AssistState.GPU_RUNNING
        return (
            AssistKind(int(self._control[1])),
            int(self._control[2]),
            int(self._control[3]),
            int(self._control[4]),
        )

    def edits(self) -> np.ndarray:
        """What `write_edits` was given, as uint8: a view."""
        return self._edits[: int(self._control[5])]

    def asking(self) -> tuple[np.ndarray, int]:
        """What `write_asking` was given; the rows are a view."""
        count, best = self._control[6:8].tolist()
        return self._asking[:count], best

    def finish(self, epoch: int, cpu_doorbell: int) -> None:
        """The result is in place. An assist of an older epoch is forgotten."""
        if epoch == self.epoch:
            self._control[0] = AssistState.GPU_DONE
            ring(cpu_doorbell)
