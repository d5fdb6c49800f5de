"""Dense stages that are one operation each, in both engines: KV written by the product itself, all
layers as one chain, and the same tokens wherever a request is decoded.
"""

import json
from collections import Counter
from functools import partial, partialmethod
from pathlib import Path

import pytest

from dualpace.cpu import layers
from dualpace.cpu.layers import Layers
from dualpace.graphs import backends
from dualpace.runtime.routing import Route
from dualpace.runtime.types import RowKind, TransferKind
from tests.graphs import here
from tests.runtime.worker.rig import LAYERS


@pytest.fixture
def rig(make_rig, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """bf16 on tiles. Heads of 32: those of the common model are no whole tiles. A large head, which
    takes more of the memory that products share than layers do."""
    for name, place in here.BACKENDS.items():
        monkeypatch.setitem(backends.BACKENDS, name, place)
    config = json.loads(model_file.read_text())
    sizes = {"head_dim": 32, "vocab_size": 8192, "architectures": ["Qwen3ForCausalLM"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | sizes))
    return make_rig(
        f"model.source=random:{path}",
        "model.dtype=bf16",
        "compile.backend=amx",
        "assist.post_attention_limit=4",
        "assist.post_layer_limit=2",
    )


def swap(number, kind, talk, rig):
    pool = "host" if kind == TransferKind.SWAP_OUT else "gpu"
    source, talk.blocks = talk.blocks, rig.take(pool, len(talk.blocks))
    return (number, kind, source, list(talk.blocks))


def test_tokens_do_not_depend_on_where_and_how_a_request_is_decoded(
    rig, talks, monkeypatch: pytest.MonkeyPatch
):
    """Contexts so short that no plan cuts them: then sums have one order everywhere. Chains are
    made before requests come."""
    made = []
    program = layers._Program
    monkeypatch.setattr(layers, "_Program", lambda *args: made.append(args) or program(*args))
    chains: Counter[str] = Counter()
    for name in ("run", "attend"):

        def watched(method, name: str, *args):
            chains[name] += 1
            return method(*args)

        method = partialmethod(partial(watched, getattr(Layers, name), name))
        monkeypatch.setattr(Layers, name, method)
    (stays,) = talks(21)
    rig.gpu_step([rig.prefill(stays)])
    for _ in range(24):
        rig.gpu_step([rig.decode(stays)])

    (moves,) = talks(21)
    moves.id = 2
    rig.gpu_step([rig.prefill(moves, RowKind.PREFILL_CPU, transfer_id=1)])
    rig.transfer_done(1)
    for number, route in enumerate((Route.FULL_CPU, Route.SPLIT_FINAL, Route.FUSED_ASSIST)):
        for _ in range(4):
            rig.cpu_step([moves], route)
        number = 10 * (number + 1)
        rig.gpu_step([], [swap(number, TransferKind.SWAP_IN, moves, rig)])
        rig.transfer_done(number)
        for _ in range(4):
            rig.gpu_step([rig.decode(moves)])
        rig.gpu_step([], [swap(number + 1, TransferKind.SWAP_OUT, moves, rig)])
        rig.transfer_done(number + 1)
    assert moves.output == stays.output
    assert chains == {"run": 4 + 4, "attend": 4 * LAYERS} and not made
