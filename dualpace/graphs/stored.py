"""Pre-attention whose K and V go into a paged cache on the host: by the executable itself where it
can, else by a copy behind it. Knows nothing about who owns the blocks.
"""

from __future__ import annotations

from torch import Tensor

from dualpace.cpu.append import kv_append
from dualpace.graphs.backends import Arguments, Stage
from dualpace.graphs.backends.whole import WholePreAttention
from dualpace.graphs.executor import Stages


def store_by(
    graph: Stage, x: Tensor, positions: Tensor, weights: Arguments, cache: Tensor, slots: Tensor
) -> Tensor:
    """q [T, N, D] by an executable of `stages.pre_attention` for T rows; k and v go to `slots`
    (int64 [T], block * 16 + offset) of `cache` [blocks, 2, K, 16, D].
    """
    if isinstance(graph, WholePreAttention):
        (handle,) = weights
        assert handle is not None
        return graph.store(x, positions, cache, slots, handle)
    q, k, v = graph(x, positions, *weights)
    kv_append(k, v, cache, slots)
    return q


def pre_attention_stored(
    stages: Stages, layer: int, x: Tensor, positions: Tensor, cache: Tensor, slots: Tensor
) -> Tensor:
    """`store_by` whatever serves so many rows."""
    pieces = stages.tables()["pre_attention"].pieces(x.shape[0])
    if len(pieces) == 1 and isinstance(pieces[0][2].graph, WholePreAttention):
        entry = pieces[0][2]
        return store_by(entry.graph, x, positions, entry.weights[layer], cache, slots)
    q, k, v = stages.pre_attention(layer, x, positions)
    kv_append(k, v, cache, slots)
    return q
