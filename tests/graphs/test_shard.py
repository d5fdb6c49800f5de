"""Which part of a model a rank holds, and which models cannot be cut."""

from __future__ import annotations

import re

import pytest

from dualpace.errors import ConfigError
from dualpace.graphs.bench_ranks import main
from dualpace.graphs.shapes import SHAPES
from dualpace.graphs.shard import Shard
from dualpace.graphs.source import resolve_source


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-8b", "llama-3.2-1b"])
def test_parts_cover_the_model_once(shape: str, size: int) -> None:
    spec = SHAPES[shape]
    shards = [Shard(rank, size) for rank in range(size)]
    for part, count in (
        (Shard.q_heads, spec.num_q_heads),
        (Shard.kv_heads, spec.num_kv_heads),
        (Shard.intermediate, spec.intermediate),
        (Shard.vocab, spec.vocab),
    ):
        assert [i for shard in shards for i in part(shard, spec)] == list(range(count))
    local = {shard.local(spec) for shard in shards}
    assert len(local) == 1, "graphs serve every rank"
    sizes = local.pop()
    assert sizes.num_q_heads * size == spec.num_q_heads
    assert len(shards[0].vocab(spec)) <= sizes.vocab < spec.vocab / size + 32
    shards[0].check(spec, "gpu.tp")


def test_models_that_cannot_be_cut_are_refused_in_one_sentence() -> None:
    sentence = (
        "cpu.tp=2 and the model has 3 KV heads, which that does not divide: set cpu.tp to one of "
        "1, 3."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        Shard(0, 2).check(resolve_source("smollm2").spec, "cpu.tp")
    with pytest.raises(ConfigError, match=r"gpu\.tp=16 and the model has 8 KV heads"):
        Shard(0, 16).check(SHAPES["llama-3.1-8b"], "gpu.tp")


def test_a_benchmark_of_more_gpus_than_there_are_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["device=cuda", "ranks=99"]) == 0
    assert capsys.readouterr().out.startswith("99 GPUs are needed and")
