"""What has to be built: every stage for every bucket by every candidate, and how to go about it.

A job is plain data, so that a child process can be given one. Its graphs need shapes alone: the
model's weights are not read.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dualpace.graphs import stages
from dualpace.graphs.backends import Arguments, Backend, Stage, backend_of
from dualpace.graphs.forms import HEAD_STAGES, Packer, layer_arguments
from dualpace.graphs.rope import rope_table
from dualpace.graphs.spec import ModelSpec
from dualpace.graphs.store import GraphStore, digest
from dualpace.graphs.weights import DTYPES, layer_shapes, make_layer

COMPILED_STAGES = ("pre_attention", "post_attention", "logits", "post_layer_greedy")
# Of one rank of several: post-attention between its two sums, and greedy sampling before ranks
# compare.
SHARDED_STAGES = ("pre_attention", "output", "mlp", "logits", "best")
_TIMED = "pre-attention with K and V stored"  # what the tuner's times mean, where that has changed


@dataclass(frozen=True, slots=True)
class Job:
    """Candidates are names of backends; sizes are ascending buckets by stage."""

    spec: ModelSpec  # a rank's sizes, equal on all ranks, which share the graphs
    dtype: str  # bf16 | float32
    max_context: int  # rows of the RoPE table
    threads: int
    candidates: tuple[str, ...]
    sizes: dict[str, tuple[int, ...]]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(
            spec=ModelSpec.from_dict(fields.pop("spec")),
            candidates=tuple(fields.pop("candidates")),
            sizes={stage: tuple(sizes) for stage, sizes in fields.pop("sizes").items()},
            **fields,
        )

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that are compiled, as the sizes name them."""
        return tuple(self.sizes)

    def backends(self) -> dict[str, Backend]:
        """The candidates; ConfigError for one that cannot run here."""
        found = {name: backend_of(name) for name in self.candidates}
        for backend in found.values():
            backend.check(self.dtype)
        return found

    def pairs(self) -> list[tuple[str, int]]:
        """(stage, bucket) in the order of building: what most rounds run comes first."""
        return [(stage, size) for stage, sizes in self.sizes.items() for size in sizes]

    def note_name(self, stage: str, bucket: int) -> str:
        """Where the store keeps the candidates' times for this stage and bucket."""
        facts = (self.spec.to_json(), self.dtype, self.threads, self.candidates, _TIMED)
        return f"{stage}-{bucket}-{digest(repr(facts))}"

    def label(self) -> str:
        """The model and how it runs, for people."""
        size = f"{self.spec.num_layers}x{self.spec.hidden}"
        return f"{self.spec.architecture} {size} {self.dtype}, threads: {self.threads}"

    def done_name(self) -> str:
        """Where the store says that all of this job is there."""
        return f"done-{digest(self.to_json())}"


def stage_functions(spec: ModelSpec) -> dict[str, Stage]:
    """Each stage as a function of tensors alone."""
    eps, heads = spec.rms_eps, (spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
    return {
        "pre_layer": stages.pre_layer,
        "pre_attention": partial(stages.pre_attention, heads=heads, eps=eps),
        "post_attention": partial(stages.post_attention, intermediate=spec.intermediate, eps=eps),
        "output": partial(stages.output, hidden=spec.hidden),
        "mlp": partial(stages.mlp, intermediate=spec.intermediate, eps=eps),
        "logits": partial(stages.logits, vocab=spec.vocab, eps=eps),
        "post_layer_greedy": partial(stages.post_layer_greedy, vocab=spec.vocab, eps=eps),
        "best": partial(stages.best, vocab=spec.vocab, eps=eps),
    }


def example_rows(
    stage: str, spec: ModelSpec, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The arguments of a stage that have one row a token, zeros of the right shapes."""
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    x = torch.zeros(rows, spec.hidden, dtype=dtype, device=device)
    attn = torch.zeros(rows, spec.q_size, dtype=dtype, device=device)
    return {
        "pre_layer": (ids,),
        "pre_attention": (x, ids),
        "post_attention": (attn, x),
        "output": (attn,),
        "mlp": (x, torch.zeros_like(x)),
    }.get(stage, (x,))


class Examples:
    """Arguments of a job's stages, with made-up weights of the model's shapes."""

    def __init__(self, job: Job, fill: float | None = None) -> None:
        """fill: a value that makes the memory real, for runs; None: shapes are all that counts."""
        self._job = job
        self._dtype = DTYPES[job.dtype]
        self._fill = fill
        self._cos, self._sin = rope_table(job.spec, job.max_context)
        self._head: Arguments | None = None

    def rows(self, stage: str, bucket: int) -> Arguments:
        return example_rows(stage, self._job.spec, bucket, torch.device("cpu"), self._dtype)

    def weights(self, stage: str) -> Arguments:
        """Weights of one layer, new ones with every call; the head is made once."""
        spec = self._job.spec
        if stage in HEAD_STAGES:
            if self._head is None:
                self._head = (self._make((spec.hidden,)), self._make((spec.vocab, spec.hidden)))
            return self._head
        layer = make_layer({n: self._make(shape) for n, shape in layer_shapes(spec).items()})
        return layer_arguments(stage, layer, self._cos, self._sin)

    def _make(self, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype)
        return tensor if self._fill is None else tensor.fill_(self._fill)


def compile_all(job: Job, store: GraphStore, wait: bool = True) -> Iterator[tuple[str, int]]:
    """Have every graph of the job in the store, and yield each (stage, bucket) that is complete.

    Any number of processes may do so at once: each makes the graphs that no other is making, and
    then, without `wait`, is content with those that others are at.
    """
    backends = [b for b in job.backends().values() if b.compiled]
    functions, examples = stage_functions(job.spec), Examples(job)
    weights = {
        (stage, b.form): Packer(b, example=True)(stage, functions[stage], examples.weights(stage))
        for stage in job.stages
        for b in backends
    }
    pending: list[tuple[str, int]] = job.pairs()
    while pending:
        later = []
        for stage, bucket in pending:
            rows, function = examples.rows(stage, bucket), functions[stage]
            try:
                # Candidates of a pair, all heads of a bucket, and buckets that share their code
                # have kernels in common: whoever makes one of them has the others.
                part = "head" if stage in HEAD_STAGES else stage
                written_for = {b.code_rows(bucket, job.threads) for b in backends}
                with store.alone(f"{part}-{max(written_for, default=bucket)}", wait=False):
                    done = [
                        b.ensure(function, (*rows, *weights[stage, b.form]), store)
                        for b in backends
                    ]
            except BlockingIOError:
                done = [False]
            if all(done):
                yield stage, bucket
            else:
                later.append((stage, bucket))
        if later == pending:  # all that is left is being made by others
            if not wait:
                yield from later
                return
            time.sleep(0.05)
        pending = later
