"""The model on a CUDA device as few fused kernels: what is captured, and what prompts run.

The maths of stages.py with other seams: a layer ends with the next layer's norm, so that a
residual sum, a split product's reduction and the norm are one kernel. `Rows` are the buffers of
one batch; a Dense Assist has its own. On one rank of several, products are its parts, and sums over
ranks stand between them, on the same stream and in the same graphs. Knows nothing about how KV is
attended to.

Shape suffixes: M rows, H hidden, N and K query and key heads, D head size, V vocabulary, S splits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from dualpace.graphs.collective import Alone, Collective
from dualpace.graphs.gpu import fused, sampling, skinny
from dualpace.graphs.gpu.linear import Choices, Workspace
from dualpace.graphs.gpu.peer_sums import PeerSums
from dualpace.graphs.logit_edits import edit
from dualpace.graphs.logprobs import RawLogits
from dualpace.graphs.sampling import SamplingRows
from dualpace.graphs.shard import WHOLE, Shard
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.weights import Weights


@dataclass(slots=True)
class Rows:
    """Activations of one batch of M rows; views of larger buffers where batches take turns."""

    x: Tensor  # [M, H] residual stream
    h: Tensor  # [M, H] its norm, for whichever stage comes next
    q: Tensor  # [M, N, D]
    k: Tensor  # [M, K, D]
    v: Tensor  # [M, K, D]
    attn: Tensor  # [M, N * D]
    act: Tensor  # [M, I]
    tokens: Tensor  # int32 [M], sampled

    @classmethod
    def empty(
        cls, spec: ModelSpec, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> Rows:
        def make(*shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        kv = (spec.num_kv_heads, spec.head_dim)
        return cls(
            make(spec.hidden),
            make(spec.hidden),
            make(spec.num_q_heads, spec.head_dim),
            make(*kv),
            make(*kv),
            make(spec.q_size),
            make(spec.intermediate),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
        )

    def first(self, num_rows: int) -> Rows:
        """The first rows of every buffer."""
        names = self.__slots__
        return Rows(*(getattr(self, name)[:num_rows] for name in names))


class Forward:
    """The stages of one model over `Rows`, in place."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        cos: Tensor,
        sin: Tensor,
        max_rows: int,
        choices: Choices | None = None,
        max_partial: int | None = None,
        shard: Shard = WHOLE,
        collective: Collective | None = None,
        peers: PeerSums | None = None,
    ) -> None:
        """`max_rows` bounds the rows of a batch; weights and the RoPE table are on the device. Of a
        `shard` that is not the whole model, which `spec` describes, the weights are its part and
        `collective` joins it to the others; the forward's own `spec` has the local sizes. `peers`
        adds few rows up faster, where GPUs can read each other's memory.
        """
        self._peers = peers
        self.shard, self.collective = shard, collective or Alone()
        assert (self.collective.rank, self.collective.size) == (shard.rank, shard.size)
        self.vocab = spec.vocab  # of the whole model
        self.spec = spec = shard.local(spec)
        self._first_token = shard.rank * spec.vocab
        self.weights = weights
        self.choices = choices or Choices()
        self.device, self.dtype = weights.embed.device, weights.embed.dtype
        self._cos, self._sin = cos, sin
        widest = max(2 * spec.intermediate, spec.q_size + 2 * spec.kv_size, spec.hidden)
        few = min(max_rows, skinny.MAX_ROWS)
        partial = max_partial or skinny.MAX_SPLIT * few * (
            spec.q_size + 2 * spec.kv_size + spec.hidden
        )
        self._work = Workspace(self.device, self.dtype, max_rows * widest, partial)

    @property
    def is_part(self) -> bool:
        """Whether other ranks have the rest of the model."""
        return self.shard.size > 1

    def apart(self) -> Forward:
        """The same part with nobody to add up with: for timing what is here."""
        other = copy.copy(self)
        other.collective, other._peers = Alone(), None
        return other

    def norm_after(self, layer: int) -> Tensor:
        """The norm that follows a layer: the next layer's first, or the final one."""
        layers = self.weights.layers
        return layers[layer + 1].attn_norm if layer + 1 < len(layers) else self.weights.final_norm

    # ---- stages

    def embed(self, rows: Rows, token_ids: Tensor, source: Tensor, sampled: Tensor) -> None:
        """Tokens -> x, h (fused.embed_norm)."""
        norm = self.weights.layers[0].attn_norm
        table, eps = self.weights.embed, self.spec.rms_eps
        first = self._first_token if self.is_part else None
        fused.embed_norm(token_ids, source, sampled, table, norm, rows.x, rows.h, eps, first)
        if self.is_part:
            self.collective.all_reduce(rows.x)
            self.normed(rows, norm)

    def pre_attention(
        self,
        layer: int,
        rows: Rows,
        positions: Tensor,
        cache: Tensor | None = None,
        slots: Tensor | None = None,
        emit: bool = True,
    ) -> None:
        """h -> q, k, v; k and v also into `cache` at `slots` (fused.rope_append)."""
        w = self.weights.layers[layer]
        fused.rope_append(
            self.multiply("qkv", rows.h, w.qkv),
            positions,
            self._cos,
            self._sin,
            w.qkv_bias,
            w.q_norm,
            w.k_norm,
            rows.q,
            rows.k,
            rows.v,
            cache,
            slots,
            self.spec.rms_eps,
            emit,
        )

    def post_attention(self, layer: int, rows: Rows) -> None:
        """attn, x -> x after the layer, h for what follows."""
        self.output(layer, rows)
        self.gate_up(layer, rows)
        self.down(layer, rows)

    def output(self, layer: int, rows: Rows) -> None:
        w = self.weights.layers[layer]
        self._add_norm(self.multiply("o", rows.attn, w.o), rows, w.mlp_norm, turn=0)

    def gate_up(self, layer: int, rows: Rows) -> None:
        weight = self.weights.layers[layer].gate_up
        how = self.choices.of("gate_up", rows.h.shape[0])
        if how is not None:
            skinny.silu_gate_up(rows.h, weight, rows.act, how)
        else:
            fused.silu_mul(self.multiply("gate_up", rows.h, weight)[0], rows.act)

    def down(self, layer: int, rows: Rows) -> None:
        parts = self.multiply("down", rows.act, self.weights.layers[layer].down)
        self._add_norm(parts, rows, self.norm_after(layer), turn=1)

    def normed(self, rows: Rows, weight: Tensor) -> None:
        """h = norm(x), for rows that come from elsewhere (a Dense Assist)."""
        fused.add_norm(rows.x[None][:0], rows.x, weight, rows.h, self.spec.rms_eps)

    def greedy(self, h_BH: Tensor, tokens_B: Tensor) -> None:
        """The best token of each row of final-normed h, int32; ties go to the lower id."""
        if self.is_part:
            best_B2 = torch.empty(len(h_BH), 2, dtype=torch.int32, device=self.device)
            self._best(h_BH, best_B2, self._first_token)
            of_ranks = self.collective.all_gather(best_B2).view(len(h_BH), -1, 2)
            sampling.best_rank(of_ranks, tokens_B, self.vocab)
        else:
            self._best(h_BH, tokens_B)

    def _best(self, h_BH: Tensor, out: Tensor, first: int | None = None) -> None:
        """The best of the tokens that are here, as sampling.best_tile leaves it."""
        how = self.choices.of("head", h_BH.shape[0])
        if how is not None:
            tiles = self.weights.head.shape[0] // how.columns
            value = torch.empty(tiles, h_BH.shape[0], dtype=torch.float32, device=self.device)
            index = torch.empty_like(value, dtype=torch.int32)
            skinny.best_of_tiles(h_BH, self.weights.head, value, index, how)
            sampling.best_tile(value, index, out, first)
        elif first is None:
            sampling.argmax(self._logits(h_BH), out)
        else:
            sampling.best_part(self._logits(h_BH), first, out)

    def sample(self, h_BH: Tensor, how: SamplingRows, tokens_B: Tensor) -> Tensor | None:
        """One token a row by its sampling parameters; never waits for the device. Returns the
        log-probabilities that rows ask for (logprobs.log_probabilities), if any does. They and
        edits depend on the batch, so what makes them is launched, not captured."""
        logits_BV, raw = self.logits(h_BH), None
        if how.logprobs is not None:
            raw = RawLogits.of(logits_BV, how.logprobs, how.edits is not None)
        if how.edits is not None:
            edit(logits_BV, how.edits, how.temperature)
        sampling.sample(logits_BV, how, tokens_B)
        return None if raw is None else raw.told(tokens_B)

    def logits(self, h_BH: Tensor) -> Tensor:
        """Final-normed h -> float32 [B, V], not rounded in between."""
        here = self._logits(h_BH)
        return self.collective.all_gather(here)[:, : self.vocab] if self.is_part else here

    def _logits(self, h_BH: Tensor) -> Tensor:
        head = self.weights.head
        if h_BH.is_cuda and h_BH.dtype != torch.float32:
            out: Tensor = torch.mm(h_BH, head.t(), out_dtype=torch.float32)
            return out
        return torch.mm(h_BH, head.t()).float()

    # ---- products

    def multiply(self, product: str, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """x times w transposed as parts to be added up: [S, M, N], valid until the next product."""
        rows, columns = x_MK.shape[0], w_NK.shape[0]
        how = self.choices.of(product, rows)
        if how is None:
            out = self._work.plain(1, rows, columns)
            torch.mm(x_MK, w_NK.t(), out=out[0])
        else:
            out = self._work.partial(how.split, rows, columns)
            skinny.partials(x_MK, w_NK, out, how)
        return out

    # ---- sums over ranks

    def _add_norm(self, parts_SMH: Tensor, rows: Rows, weight: Tensor, turn: int) -> None:
        """x += the parts of all ranks, h = norm(x). Sums alternate between turns 0 and 1."""
        eps = self.spec.rms_eps
        if self._peers is not None and len(rows.x) <= self._peers.max_rows:
            self._peers.add_norm(parts_SMH, rows.x, weight, rows.h, eps, turn)
        else:
            fused.add_norm(self._of_ranks(parts_SMH), rows.x, weight, rows.h, eps)

    def _of_ranks(self, parts_SMN: Tensor) -> Tensor:
        """The parts of all ranks, to be added up: one part, rounded to the model's dtype, where
        there are several ranks.
        """
        if not self.is_part:
            return parts_SMN
        if parts_SMN.dtype != self.dtype or len(parts_SMN) > 1:
            summed = self._work.plain(1, *parts_SMN.shape[1:])
            fused.add_up(parts_SMN, summed[0])
            parts_SMN = summed
        self.collective.all_reduce(parts_SMN[0])
        return parts_SMN
