"""Attention by FlashInfer: tensor-core paged decode in CUDA graphs, ragged and paged prefill.

Decode has one wrapper a bucket with fixed device buffers. Planning fills a pinned buffer that an
earlier copy may still read, so two of them take turns, each guarded by an event.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import flashinfer
import torch
from torch import Tensor

from dualpace.block import BLOCK_TOKENS
from dualpace.graphs.gpu.attention import Heads, PagedRows
from dualpace.graphs.gpu.planned import PackedInputs

_WORKSPACE_BYTES = 512 << 20  # partial results of split contexts, shared by all wrappers
_DECODE = "fa2"  # its FA3 decodes four times slower
_PREFILL = "fa2"  # shares decode's module; "fa3" is another one, for Hopper


class FlashInferDecode:
    """Decode of one bucket; `run` may be captured, `plan` goes before every replay."""

    def __init__(
        self, heads: Heads, dtype: torch.dtype, bucket: int, max_blocks: int, workspace: Tensor
    ) -> None:
        self._heads, self._dtype = heads, dtype
        sizes = {"indptr": bucket + 1, "last_lens": bucket, "indices": max_blocks}
        self._inputs = PackedInputs(
            {name: (torch.int32, size) for name, size in sizes.items()}, workspace.device
        )
        views = self._inputs.views
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=views["indptr"],
            paged_kv_indices_buffer=views["indices"],
            paged_kv_last_page_len_buffer=views["last_lens"],
            backend=_DECODE,
        )
        first = self._wrapper._pin_memory_int_workspace_buffer
        self._pinned = [first, torch.empty_like(first, pin_memory=True)]
        idle = PagedRows.idle(bucket)
        self._wrapper.plan(
            idle.indptr, idle.indices, idle.last_lens, *self._shape(), **self._types()
        )
        torch.cuda.synchronize(workspace.device)

    def _shape(self) -> tuple[int, int, int, int]:
        return self._heads.query, self._heads.kv, self._heads.dim, BLOCK_TOKENS

    def _types(self) -> dict[str, torch.dtype]:
        # Contexts are split even where splits never fit: without splits a captured run has no mask
        # of its padding programs, which then follow indices that nobody wrote.
        return {"q_data_type": self._dtype, "kv_data_type": self._dtype}

    def plan(self, rows: PagedRows) -> None:
        arrays = {
            "indptr": rows.indptr.numpy(),
            "last_lens": rows.last_lens.numpy(),
            "indices": rows.indices.numpy(),
        }
        turn = self._inputs.send(arrays, "indices")
        self._wrapper._pin_memory_int_workspace_buffer = self._pinned[turn]
        flashinfer.fast_decode_plan(
            self._wrapper,
            rows.indptr,
            rows.indices,
            rows.last_lens,
            *self._shape(),
            **self._types(),
            global_override_indptr_cpu=rows.indptr,
        )
        self._inputs.sent()

    def run(self, q_BND: Tensor, cache: Tensor, out_BND: Tensor) -> None:
        self._wrapper.run(q_BND, cache, out=out_BND)


class FlashInferPrefill:
    """Prompts by the ragged wrapper, later chunks by the paged one."""

    def __init__(self, heads: Heads, dtype: torch.dtype, workspace: Tensor, backend: str) -> None:
        self._heads, self._dtype = heads, dtype
        make = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        self._ragged = make(workspace, "NHD", backend=backend)
        paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._paged = paged(workspace, "HND", backend=backend)
        self._is_paged = False

    def plan(self, query_lens: Sequence[int], context: PagedRows | None = None) -> None:
        starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
        heads, kinds = self._heads, {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        self._is_paged = context is not None
        if context is None:
            shape = (heads.query, heads.kv, heads.dim)
            self._ragged.plan(starts, starts, *shape, causal=True, **kinds)
        else:
            pages = (context.indptr, context.indices, context.last_lens)
            shape = (heads.query, heads.kv, heads.dim)
            self._paged.plan(starts, *pages, *shape, BLOCK_TOKENS, causal=True, **kinds)

    def run(
        self,
        q_TND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_TND: Tensor,
        cache: Tensor | None = None,
    ) -> None:
        if self._is_paged:
            self._paged.run(q_TND, cache, out=out_TND)
        else:
            self._ragged.run(q_TND, k_TKD, v_TKD, out=out_TND)


class FlashInfer:
    """One model on one device; all wrappers share a workspace, for they run in stream order."""

    def __init__(self, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
        self._heads, self._dtype = heads, dtype
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def decode(self, bucket: int, max_blocks: int) -> FlashInferDecode:
        return FlashInferDecode(self._heads, self._dtype, bucket, max_blocks, self._workspace)

    def prefill(self, backend: str = _PREFILL) -> FlashInferPrefill:
        return FlashInferPrefill(self._heads, self._dtype, self._workspace, backend)


make = FlashInfer
