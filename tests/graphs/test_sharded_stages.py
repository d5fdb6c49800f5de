"""Two and four ranks compute what one does: every family, every backend, every kind of sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dualpace.graphs import backends
from dualpace.graphs.cache import GraphCache
from dualpace.graphs.collective import Collective
from dualpace.graphs.executor import Stages
from dualpace.graphs.load import load_weights
from dualpace.graphs.logprobs import LogprobRows
from dualpace.graphs.sampling import SamplingRows
from dualpace.graphs.shard import Shard
from dualpace.graphs.sharded import best_of_ranks
from dualpace.graphs.shared_memory_collective import SharedMemoryCollective
from dualpace.graphs.source import Source, resolve_source
from tests.graphs import here
from tests.graphs.asked import Asked, edits_of
from tests.graphs.ranks import in_threads
from tests.graphs.reference import SIZES, assert_close, load_stages, run_logits, save_tiny
from tests.graphs.told import check

IDS = [5, 300, 17, 0, 319, 160, 159, 42, 8, 9, 250]
WIDE = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 330}
FAMILIES = {
    "llama": transformers.LlamaConfig(**WIDE, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**WIDE, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**WIDE, head_dim=16, tie_word_embeddings=False),
}


class Group:
    """The ranks' stages of one model."""

    def __init__(
        self, source: Source, size: int, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        max_bytes = 4096  # so that some batches go in pieces
        buffer = bytearray(SharedMemoryCollective.num_bytes(size, max_bytes))
        self.stages = []
        for rank in range(size):
            shard = Shard(rank, size)
            stages = GraphCache().build(
                source.spec,
                load_weights(source, dtype, shard=shard),
                shard=shard,
                collective=SharedMemoryCollective(buffer, rank, size, max_bytes),
                **options,
            )
            self.stages.append(stages)

    def run(self, work: Callable[[Stages], Tensor]) -> Tensor:
        """What every rank returns, which has the same bits on all of them."""
        with ThreadPoolExecutor(len(self.stages)) as pool:
            results = list(pool.map(work, self.stages))
        assert all(torch.equal(results[0], other) for other in results[1:])
        return results[0]


def logits_of(ids: Sequence[int], num_layers: int = 3) -> Callable[[Stages], Tensor]:
    return lambda stages: run_logits(stages, num_layers, list(ids))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, size: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, FAMILIES[family])
    group = Group(resolve_source(str(tmp_path)), size)
    assert_close(group.run(logits_of(IDS)), run_logits(load_stages(str(tmp_path)), 3, IDS), 1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.mark.parametrize("backend", ["packed", "inductor-packed"])
def test_backends_at_the_edges_of_buckets(backend: str, folder: Path) -> None:
    compiled = backend.startswith("inductor")
    before = len(list(folder.rglob("*.graph")))
    group = Group(resolve_source("random:tiny"), 2, backend=backend, buckets=[4], cache_dir=folder)
    assert len(list(folder.rglob("*.graph"))) == before + 5 * compiled, "ranks share their graphs"
    plain = load_stages("random:tiny")
    for count in (1, 3, 4, 9):
        ids = IDS[:count]
        assert_close(group.run(logits_of(ids, 2)), run_logits(plain, 2, ids), 1e-5)
    x = torch.randn(3, plain.pre_layer(torch.tensor([0])).shape[1])
    rows = SamplingRows.greedy(3)
    tokens = group.run(lambda stages: stages.post_layer(x.clone(), rows))
    assert torch.equal(tokens, plain.post_layer(x, rows))


def test_ranks_of_unlike_buckets_and_backends_work_together(folder: Path) -> None:
    """As when one rank's compiled stages are ready before another's."""
    source = resolve_source("random:tiny")
    group = Group(source, 2)
    other = Group(source, 2, backend="inductor-packed", buckets=[4], cache_dir=folder)
    for stage, table in other.stages[1].tables().items():
        group.stages[1].offer(stage, table)
    group.stages[1].begin_round()
    plain = run_logits(load_stages("random:tiny"), 2, IDS)
    assert_close(group.run(logits_of(IDS, 2)), plain, 1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_sampled_tokens_are_those_of_one_rank(size: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, FAMILIES["llama"])
    source = resolve_source(str(tmp_path))
    group, plain = Group(source, size), load_stages(str(tmp_path))
    x = 3 * torch.randn(40, source.spec.hidden, generator=torch.Generator().manual_seed(3))
    rows = SamplingRows.of(
        torch.arange(40) % 3 / 2,
        torch.arange(40).int() % 4 * 5,
        1 - torch.arange(40) % 5 / 10,
        torch.linspace(0, 0.99, 40),
    )
    everything = Asked([5, 300], [7, 7], 0.1, 0.5, 0.25, 1.4, {9: 2.0, 11: -torch.inf})
    edits = edits_of(dict.fromkeys(range(0, 40, 3), everything))
    edited = (replace(how, edits=edits) for how in (rows, SamplingRows.greedy(40)))
    for how in (rows, SamplingRows.greedy(40), *edited):
        wanted = plain.post_layer(x, how)
        tokens = group.run(lambda stages, how=how: stages.post_layer(x.clone(), how))
        assert torch.equal(tokens, wanted) and tokens.dtype == torch.int32
    asking = LogprobRows(torch.arange(0, 40, 2), best=5)
    for how in (rows, replace(rows, edits=edits)):
        how = replace(how, logprobs=asking)
        told = group.run(lambda stages, how=how: stages.draw(x.clone(), how).logprobs)
        drawn = plain.draw(x, how)
        check(told, plain.logits(x)[asking.rows], drawn.tokens[asking.rows], asking.best)


def test_ties_go_to_the_lower_token_and_padding_is_never_one() -> None:
    values = torch.tensor([[1.0, 2.0, -5.0], [1.0, 3.0, -5.0]])
    tokens = torch.tensor([[4, 7, 0], [100, 101, 131]], dtype=torch.int32)

    def work(collective: Collective) -> Tensor:
        rank = collective.rank
        return best_of_ranks(values[rank], tokens[rank], collective, vocab=130)

    for found in in_threads(2, work):
        assert found.tolist() == [4, 101, 0]
    values[0, 2] = -6.0
    assert in_threads(2, work)[0].tolist() == [4, 101, 129]


def test_bf16_ranks_are_as_near_to_float32_as_one(folder: Path) -> None:
    source = resolve_source("random:tiny")
    wanted = run_logits(load_stages("random:tiny"), 2, IDS)

    def distance(logits: Tensor) -> float:
        return float((logits - wanted).norm() / wanted.norm())

    alone = distance(run_logits(load_stages("random:tiny", torch.bfloat16), 2, IDS))
    for size in (2, source.spec.num_kv_heads):
        group = Group(source, size, torch.bfloat16)
        assert distance(group.run(logits_of(IDS, 2))) < 1.5 * alone


def test_products_on_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "amx", here.BACKENDS["amx"])
    source = resolve_source("random:tiny")
    on_tiles, eager = (Group(source, 2, torch.bfloat16, backend=name) for name in ("amx", "eager"))
    work = logits_of(IDS[:5], 2)
    assert_close(on_tiles.run(work), eager.run(work), 3e-2)


def test_a_heads_part_is_what_one_rank_has_of_it() -> None:
    """Local shapes: the KV of a rank is its heads' of the whole, so tiers may be cut unlike."""
    source = resolve_source("random:tiny")
    x = torch.randn(5, source.spec.hidden)
    whole = load_stages("random:tiny").pre_attention(0, x, torch.arange(5))
    for rank, stages in enumerate(Group(source, 2).stages):
        parts = stages.pre_attention(0, x, torch.arange(5))
        for full, part in zip(whole, parts, strict=True):
            count = full.shape[1] // 2
            torch.testing.assert_close(part, full[:, rank * count :][:, :count])
