"""Attention of a mixed batch on the stand-in, split by phase, with the KV writes that go before it.

Decode rows read the accelerator's pool through the paged kernel; prompts attend to themselves, and
later pieces of a chunked prompt to their earlier KV as well. Prompts whose KV goes to the host
leave none here. A GPU has a class of its own with the same two methods.
"""

import numpy as np
import torch
from torch import Tensor

from dualpace.cpu.append import kv_append
from dualpace.cpu.attention import PagedDecoder, plan_decode
from dualpace.graphs.attention import Context, causal_prefill, gather_context
from dualpace.runtime.worker.kv_pools import AcceleratorPool
from dualpace.runtime.worker.rows import DecodeArrays, GpuWork, PromptRow


class DecodeAttention:
    """Paged decode over the layers of one pool, planned once a batch."""

    def __init__(self, layers: list[Tensor], num_q_heads: int, num_threads: int) -> None:
        _, _, kv_heads, _, head_dim = layers[0].shape
        self._layers = layers
        self._kv_heads = kv_heads
        self._num_q_heads = num_q_heads
        self._num_threads = num_threads
        self.scale = head_dim**-0.5
        self.decoder = PagedDecoder(num_q_heads, kv_heads, head_dim, layers[0].dtype)

    def warm_up(self) -> None:
        """Compiles both kernels now, by a row of zeros in the scratch block."""
        none = np.zeros(1, np.int64)
        self.begin(DecodeArrays(none.astype(np.int32)[None], np.ones(1, np.int32), none))
        cache = self._layers[0]
        zeros = cache.new_zeros(1, self._num_q_heads, cache.shape[-1])
        kv_append(
            zeros[:, : self._kv_heads], zeros[:, : self._kv_heads], cache, torch.from_numpy(none)
        )
        self.run(0, zeros, torch.empty_like(zeros))

    def begin(self, decodes: DecodeArrays) -> None:
        plan = plan_decode(decodes.context_lens, self._kv_heads, self._num_threads)
        self.decoder.begin(plan, torch.from_numpy(decodes.block_tables))

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """q and out [B, N, D]."""
        self.decoder.run(q, self._layers[layer], self.scale, out)


class AcceleratorAttention:
    """`begin` once a batch, `run` once a layer."""

    def __init__(self, pool: AcceleratorPool, num_q_heads: int, num_threads: int) -> None:
        self._layers = pool.layers
        self._decode = DecodeAttention(pool.layers, num_q_heads, num_threads)

    def warm_up(self) -> None:
        self._decode.warm_up()

    def begin(self, work: GpuWork) -> None:
        self._work = work
        self._slots = torch.from_numpy(work.slots)
        if work.num_decodes:
            self._decode.begin(work.decodes)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v ([T, K, D]) of the rows that stay in HBM; q [T, N, D] -> [T, N * D]."""
        work = self._work
        stored = work.num_hbm_tokens
        kv_append(k[:stored], v[:stored], self._layers[layer], self._slots)
        out = torch.empty_like(q)
        if work.num_decodes:
            self._decode.run(layer, q[: work.num_decodes], out[: work.num_decodes])
        prompts = [*work.hbm_prompts, *work.host_prompts]
        if prompts:
            rows = slice(work.num_decodes, None)
            lens = [prompt.num_tokens for prompt in prompts]
            contexts = [self._earlier(layer, prompt) for prompt in prompts]
            out[rows] = causal_prefill(q[rows], k[rows], v[rows], lens, contexts)
        return out.flatten(1)

    def _earlier(self, layer: int, prompt: PromptRow) -> Context | None:
        """K and V that earlier pieces of the prompt have stored."""
        if not prompt.start:
            return None
        blocks = torch.from_numpy(prompt.blocks).long()
        return gather_context(self._layers[layer], blocks, prompt.start)
