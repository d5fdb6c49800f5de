"""Who attends on the GPU: a registry, and the host's view of a paged batch.

FlashInfer where it is installed and the dtype is one of its own, else our Triton kernel for decode
and torch's SDPA for prompts. `choose` says which and why. Every implementation plans from host
tensors, once a round, and runs once a layer.

Shape suffixes: B rows, T rows of all prompts, N and K query and key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dualpace.block import BLOCK_TOKENS
from dualpace.errors import ConfigError

ATTENTION = {
    "flashinfer": "dualpace.graphs.gpu.flashinfer_attention",
    "triton": "dualpace.graphs.gpu.triton_attention",
}


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, key/value heads, head size."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Which blocks each row reads, as host tensors: int32, rows one after another."""

    indptr: Tensor  # [B + 1]
    indices: Tensor  # [indptr[-1]] block ids
    last_lens: Tensor  # [B] tokens in each row's last block, 1..16

    @classmethod
    def of(
        cls, tables: Sequence[Sequence[int]], context_lens: Sequence[int], bucket: int = 0
    ) -> PagedRows:
        """`tables[i]` covers `context_lens[i]` >= 1 tokens. Rows up to `bucket` have length 1 and
        lie in block 0."""
        lens = np.array(context_lens, np.int64)
        lens = np.concatenate((lens, np.ones(max(0, bucket - len(lens)), np.int64)))
        counts = -(-lens // BLOCK_TOKENS)
        indptr = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        indices = np.zeros(indptr[-1], np.int32)
        for i, table in enumerate(tables):
            indices[indptr[i] : indptr[i + 1]] = table[: counts[i]]
        last = (lens - (counts - 1) * BLOCK_TOKENS).astype(np.int32)
        return cls(torch.from_numpy(indptr), torch.from_numpy(indices), torch.from_numpy(last))

    @classmethod
    def idle(cls, bucket: int) -> PagedRows:
        """Padding rows alone."""
        return cls.of([], [], bucket)

    def context_lens(self) -> Tensor:
        """Tokens of each row: int32 [B]."""
        return (self.indptr[1:] - self.indptr[:-1] - 1) * BLOCK_TOKENS + self.last_lens


class Decode(Protocol):
    """One query a row over its paged context, for batches of one bucket; may be captured."""

    def plan(self, rows: PagedRows) -> None:
        """Once a round. Returns before the device has seen it; in stream order with `run`."""

    def run(self, q_BND: Tensor, cache: Tensor, out_BND: Tensor) -> None:
        """cache: [blocks, 2, K, 16, D] of one layer."""


class Prefill(Protocol):
    """Prompts and later chunks of prompts, causal within each."""

    def plan(self, query_lens: Sequence[int], context: PagedRows | None = None) -> None:
        """`context`: for chunks that are not the first of their prompt, the blocks that hold their
        whole context, these tokens included (they have been appended before `run`)."""

    def run(
        self,
        q_TND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_TND: Tensor,
        cache: Tensor | None = None,
    ) -> None:
        """k and v are read where no context was planned, `cache` where one was."""


class Maker(Protocol):
    """What an implementation's module offers as `make(heads, dtype, device)`."""

    def decode(self, bucket: int, max_blocks: int) -> Decode:
        """For `bucket` rows whose contexts take at most `max_blocks` blocks together."""

    def prefill(self) -> Prefill: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """An implementation and the sentence that says why."""

    name: str
    reason: str


def choose(dtype: torch.dtype, name: str = "auto") -> Choice:
    """ConfigError where `name` is unknown or cannot run this dtype here."""
    installed = find_spec("flashinfer") is not None
    half = dtype in (torch.bfloat16, torch.float16)
    if name == "auto":
        if not half:
            return Choice("triton", f"FlashInfer has no {dtype} attention")
        if not installed:
            return Choice("triton", "FlashInfer is not installed")
        return Choice("flashinfer", "FlashInfer is installed and the fastest")
    if name not in ATTENTION:
        raise ConfigError(f"attention={name} is unknown; give one of auto, {', '.join(ATTENTION)}")
    if name == "flashinfer" and not (installed and half):
        lack = "it is not installed" if half else f"it has no {dtype} attention"
        raise ConfigError(f"attention=flashinfer cannot run: {lack}; leave it at auto")
    return Choice(name, "asked for")


def make(choice: Choice, heads: Heads, dtype: torch.dtype, device: torch.device) -> Maker:
    """The chosen implementation for one model on one device."""
    module = import_module(ATTENTION[choice.name])
    maker: Maker = module.make(heads, dtype, device)
    return maker
