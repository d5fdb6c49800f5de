"""A round's arrays as a device takes them, against the plain way to build them."""

import random
from types import SimpleNamespace

import numpy as np
import torch

from dualpace.graphs.gpu.attention import PagedRows
from dualpace.graphs.gpu.peer_sums import MAX_ROWS
from dualpace.runtime.worker.cuda.batches import (
    aligned,
    host_blocks,
    paged_decodes,
    same_kind,
    sources,
)
from dualpace.runtime.worker.cuda.warm_up import batches
from dualpace.runtime.worker.rows import DecodeArrays, PromptRow
from tests.runtime.worker.checksums import checksums


def prompt(num_blocks: int, start: int = 0) -> PromptRow:
    return PromptRow(0, 5, start, np.arange(1, num_blocks + 1, dtype=np.int32), -1)


def test_paged_decodes_are_those_of_a_loop_over_rows() -> None:
    mix = random.Random(4)
    lens = [1, 16, 17, 32, 100, 257]
    tables = [[mix.randrange(1, 999) for _ in range(-(-n // 16))] for n in lens]
    padded = np.zeros((len(lens), 40), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    arrays = DecodeArrays(padded, np.array(lens, np.int32), np.zeros(len(lens), np.int64))
    for bucket in (6, 8):
        got, wanted = paged_decodes(arrays, bucket), PagedRows.of(tables, lens, bucket)
        assert torch.equal(got.indptr, wanted.indptr)
        assert torch.equal(got.indices, wanted.indices)
        assert torch.equal(got.last_lens, wanted.last_lens)


def test_each_prompts_host_blocks_begin_at_a_multiple_of_four() -> None:
    blocks = host_blocks([prompt(3), prompt(4), prompt(1)]).tolist()
    assert blocks == [1, 2, 3, 0, 1, 2, 3, 4, 1, 0, 0, 0]
    assert [aligned(n) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_prompts_are_planned_in_stretches_of_one_kind() -> None:
    prompts = [prompt(1, 16), prompt(1), prompt(2), prompt(3, 32)]
    assert [(later, len(group)) for later, group in same_kind(prompts)] == [
        (True, 1),
        (False, 2),
        (True, 1),
    ]


def test_sources_are_places_in_the_tokens_sampled_last() -> None:
    work = SimpleNamespace(token_ids=np.array([5, -1, 7, -1]), in_flight=[(1, 40), (3, 41)])
    assert sources(work, {41: 0, 40: 2}).tolist() == [-1, 2, -1, 0]  # type: ignore[arg-type]


def test_a_checksum_sees_any_bit_and_the_order() -> None:
    blocks = torch.randn(2, 3, 4).bfloat16()
    same, changed = blocks.clone(), blocks.clone()
    changed[1, 0, 0] = -changed[1, 0, 0]
    swapped = blocks.clone()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    one, two = checksums(blocks)
    assert checksums(same) == [one, two]
    assert checksums(changed)[0] == one and checksums(changed)[1] != two
    assert checksums(swapped)[0] != one


def test_the_warm_up_of_ranks_goes_beyond_what_peers_add_up() -> None:
    """To sizes of both kinds that kernels are specialised for; prompts stay within the context."""

    def sizes(tp: int, limit: int, context: int = 4096) -> set[int]:
        model = SimpleNamespace(max_context=context, vocab=300)
        plan = SimpleNamespace(model=model, gpu=SimpleNamespace(tp=tp, max_batched_tokens=limit))
        rounds = list(batches([1, 8, 256], True, plan))  # type: ignore[arg-type]
        assert max((n for r in rounds for n in r.num_tokens), default=0) <= context
        return {int(r.num_tokens.sum()) for r in rounds}

    assert max(sizes(1, 2048)) == 256
    beyond = {n for n in sizes(2, 2048, 100) if n > MAX_ROWS}
    assert {n % 16 == 0 for n in beyond} == {True, False}
    assert max(sizes(2, 256)) == 256
