"""A batch's arrays as the device's library takes them. numpy alone does the work: at 256 rows a
Python loop would cost as much as the rest of a round.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dualpace.block import BLOCK_TOKENS
from dualpace.graphs.gpu.attention import PagedRows
from dualpace.graphs.gpu.capture import DecodeBatch
from dualpace.runtime.worker.rows import (
    CpuWork,
    DecodeArrays,
    GpuWork,
    Int32,
    Int64,
    PromptRow,
)

IDLE = {"source": -1, "slots": -1, "top_p": 1.0}  # what padding rows feed; 0 elsewhere
SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "u": "uniform"}
"""Buffers by the fields of `SamplingArrays` that fill them."""


def paged_decodes(decodes: DecodeArrays, bucket: int) -> PagedRows:
    """The blocks of each decode row; rows up to `bucket` have length 1 and lie in block 0."""
    lens = np.ones(max(bucket, len(decodes.context_lens)), np.int64)
    lens[: len(decodes.context_lens)] = decodes.context_lens
    counts = -(-lens // BLOCK_TOKENS)
    indptr = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    indices = np.zeros(indptr[-1], np.int32)
    tables = decodes.block_tables
    owned = np.arange(tables.shape[1]) < counts[: len(tables), None]
    filled = tables[owned]
    indices[: len(filled)] = filled
    last = (lens - (counts - 1) * BLOCK_TOKENS).astype(np.int32)
    return PagedRows(torch.from_numpy(indptr), torch.from_numpy(indices), torch.from_numpy(last))


def paged_prompts(prompts: Sequence[PromptRow]) -> PagedRows:
    """The blocks that hold each prompt up to the end of this piece."""
    return PagedRows.of(
        [prompt.blocks.tolist() for prompt in prompts],
        [prompt.start + prompt.num_tokens for prompt in prompts],
    )


def sources(work: GpuWork, index: Mapping[int, int]) -> Int32:
    """Where in the tokens sampled last each token lies that is in flight, else -1."""
    found = np.full(len(work.token_ids), -1, np.int32)
    for token, request in work.in_flight:
        found[token] = index[request]
    return found


def decode_batch(work: GpuWork, source: Int32, bucket: int) -> DecodeBatch:
    """A round of decodes alone."""
    sampling = work.sampling
    return DecodeBatch(
        token_ids=np.maximum(work.token_ids, 0),
        source=source,
        positions=work.positions,
        slots=work.slots,
        paged=paged_decodes(work.decodes, bucket),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        u=sampling.uniform,
    )


def mixed_arrays(work: GpuWork, source: Int32) -> dict[str, np.ndarray]:
    """A round with prompts, by the names of the device's buffers."""
    return {
        "token_ids": np.maximum(work.token_ids, 0),
        "positions": work.positions,
        "slots": work.slots,  # of tokens whose KV goes to the host: none
        "source": source,
        "last_tokens": work.last_tokens,
        "host_blocks": host_blocks(work.host_prompts),
        **{name: getattr(work.sampling, field) for name, field in SAMPLING.items()},
    }


def paired_arrays(
    work: GpuWork, source: Int32, first: CpuWork, second: CpuWork
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A round with host rows: those of the first sub-batch come last among the main rows; the
    second has buffers of its own, and is sampled with the rest, last.
    """
    own, host = len(work.token_ids), len(first)
    arrays = mixed_arrays(work, source)
    arrays["token_ids"] = np.concatenate([arrays["token_ids"], first.token_ids])
    arrays["positions"] = np.concatenate([work.positions, first.positions])
    arrays["last_tokens"] = np.concatenate([work.last_tokens, np.arange(own, own + host)])
    for name, field in SAMPLING.items():
        parts = [getattr(part.sampling, field) for part in (work, first, second)]
        arrays[name] = np.concatenate(parts)
    nowhere = np.empty(0, np.int32)  # idle: known tokens, whose K and V are not kept here
    others = {"token_ids": second.token_ids, "positions": second.positions}
    return arrays, others | {"source": nowhere, "slots": nowhere}


def host_blocks(prompts: Sequence[PromptRow]) -> Int32:
    """The prompts' host blocks; each list begins on a word that kernels load four of at once."""
    blocks = np.zeros(sum(aligned(len(prompt.blocks)) for prompt in prompts), np.int32)
    start = 0
    for prompt in prompts:
        blocks[start : start + len(prompt.blocks)] = prompt.blocks
        start += aligned(len(prompt.blocks))
    return blocks


def aligned(count: int) -> int:
    """The next multiple of 4."""
    return -(-count // 4) * 4


def same_kind(prompts: Sequence[PromptRow]) -> list[tuple[bool, list[PromptRow]]]:
    """Stretches of prompts that all begin here (False) or all have earlier KV (True)."""
    stretches: list[tuple[bool, list[PromptRow]]] = []
    for prompt in prompts:
        later = prompt.start > 0
        if not stretches or stretches[-1][0] != later:
            stretches.append((later, []))
        stretches[-1][1].append(prompt)
    return stretches


def index_of(ids: Int64) -> dict[int, int]:
    """Request id -> its place."""
    return {request: i for i, request in enumerate(ids.tolist())}
