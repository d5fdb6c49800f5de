"""GraphCache: (stage, device, bucket, dtype, tensor-parallel size, backend) -> executable.

Knows nothing about KV, attention or requests. `build` returns the Stages that a worker calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dualpace.graphs import stages
from dualpace.graphs.backends import Stage, backend_of
from dualpace.graphs.executor import Stages
from dualpace.graphs.rope import rope_table
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.weights import Weights

ANY_ROWS = 0  # the bucket of an executable that takes any row count


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What an executable was built for."""

    stage: str
    device: str
    bucket: int
    dtype: str
    tp: int
    backend: str


class GraphCache:
    """The executables of one process."""

    def __init__(self) -> None:
        self.graphs: dict[GraphKey, Stage] = {}

    def build(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        device: str = "cpu",
        backend: str = "eager",
        buckets: Sequence[int] = (),
        max_context: int | None = None,
        tp: int = 1,
    ) -> Stages:
        """Build every stage for every bucket and return them ready to be called.

        Weights are on `device` already; `max_context` (tokens) bounds the RoPE table. ConfigError
        for a backend that is unknown or cannot run these weights.
        """
        maker = backend_of(backend)
        dtype = str(weights.embed.dtype).removeprefix("torch.")
        prepared = maker.prepare(weights)
        cos, sin = (t.to(device) for t in rope_table(spec, max_context or spec.max_context))
        result = Stages(prepared, cos, sin, maker)
        for stage, function in stage_functions(spec).items():
            for bucket in sorted(set(buckets)) if maker.static else [ANY_ROWS]:
                key = GraphKey(stage, device, bucket, dtype, tp, backend)
                if key not in self.graphs:
                    rows = example_rows(stage, spec, bucket or 1, cos.device, weights.embed.dtype)
                    example = (*rows, *result.weights_of(stage, 0))
                    self.graphs[key] = maker.build(function, example)
                result.add(stage, bucket, self.graphs[key])
        result.ready()
        return result


def stage_functions(spec: ModelSpec) -> dict[str, Stage]:
    """Each compiled stage as a function of tensors alone."""
    eps, heads = spec.rms_eps, (spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
    return {
        "pre_layer": stages.pre_layer,
        "pre_attention": partial(stages.pre_attention, heads=heads, eps=eps),
        "post_attention": partial(stages.post_attention, intermediate=spec.intermediate, eps=eps),
        "logits": partial(stages.logits, vocab=spec.vocab, eps=eps),
        "post_layer_greedy": partial(stages.post_layer_greedy, vocab=spec.vocab, eps=eps),
    }


def example_rows(
    stage: str, spec: ModelSpec, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The arguments of a stage that have one row a token, zeros of the right shapes."""
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    x = torch.zeros(rows, spec.hidden, dtype=dtype, device=device)
    attn = torch.zeros(rows, spec.q_size, dtype=dtype, device=device)
    return {"pre_layer": (ids,), "pre_attention": (x, ids), "post_attention": (attn, x)}.get(
        stage, (x,)
    )
