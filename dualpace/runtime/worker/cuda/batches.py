"""A batch's arrays as the device's library takes them. numpy alone does the work: at 256 rows a
Python loop would cost as much as the rest of a round.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dualpace.graphs.gpu.attention import PagedRows
from dualpace.graphs.gpu.capture import DecodeBatch
from dualpace.runtime.plan import BLOCK_TOKENS
from dualpace.runtime.worker.rows import DecodeArrays, GpuWork, Int32, Int64, PromptRow


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
    sampling = work.sampling
    return {
        "token_ids": np.maximum(work.token_ids, 0),
        "positions": work.positions,
        "slots": work.slots,  # of tokens whose KV goes to the host: none
        "source": source,
        "last_tokens": work.last_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "u": sampling.uniform,
        "host_blocks": host_blocks(work.host_prompts),
    }


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
