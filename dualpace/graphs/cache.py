"""GraphCache: (stage, device, bucket, dtype, tensor-parallel size, backend) -> executable.

Knows nothing about KV, attention or requests. `build` returns the Stages that a worker calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dualpace.graphs import stages
from dualpace.graphs.backends import Backend, Stage, backend_of
from dualpace.graphs.buckets import default_buckets
from dualpace.graphs.executor import Stages
from dualpace.graphs.rope import rope_table
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.store import GraphStore, environment_key
from dualpace.graphs.weights import Weights

ANY_ROWS = 0  # the bucket of an executable that takes any row count

Report = Callable[[int, int], None]  # graphs made so far, graphs in all


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
    """The executables of one process, which serves one model."""

    def __init__(self) -> None:
        self.graphs: dict[GraphKey, Stage] = {}
        self._spec: ModelSpec | None = None

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
        cache_dir: str | Path | None = None,
        report: Report | None = None,
    ) -> Stages:
        """Build every stage for every bucket (none given: the default ones) and return them.

        Weights are on `device` already; `max_context` (tokens) bounds the RoPE table; `cache_dir`
        keeps what is compiled for the next start. ConfigError for a backend that is unknown or
        cannot run these weights, and for a folder that cannot be written.
        """
        assert self._spec in (None, spec), "one cache serves one model"
        self._spec = spec
        maker = backend_of(backend)
        dtype = weights.embed.dtype
        cos, sin = (t.to(device) for t in rope_table(spec, max_context or spec.max_context))
        result = Stages(maker.prepare(weights), cos, sin, maker)
        sizes = sorted(set(buckets) or default_buckets(512)) if maker.static else [ANY_ROWS]
        plan = [
            (stage, function, GraphKey(stage, device, size, _name(dtype), tp, backend))
            for stage, function in stage_functions(spec).items()
            for size in sizes
        ]
        store = _store(maker, cache_dir)
        with store.locked() if store is not None else nullcontext():
            for done, (stage, function, key) in enumerate(plan, start=1):
                if key not in self.graphs:
                    rows = example_rows(stage, spec, key.bucket or 1, cos.device, dtype)
                    example = (*rows, *result.weights_of(stage, 0))
                    self.graphs[key] = maker.build(function, example, store)
                result.add(stage, key.bucket, self.graphs[key])
                if report is not None:
                    report(done, len(plan))
        result.ready()
        return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _store(maker: Backend, cache_dir: str | Path | None) -> GraphStore | None:
    if cache_dir is None or not maker.static:
        return None
    return GraphStore(Path(cache_dir), environment_key())


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
