"""The accelerator worker on a real device, beside a real CPU worker: float32 tokens are those of
the dense model; in bf16 every place that computes is near it; blocks move bit by bit."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dualpace.graphs.load import load_weights
from dualpace.graphs.source import resolve_source
from dualpace.runtime.engine.start_times import StartTimes
from dualpace.runtime.plan import Plan
from dualpace.runtime.routing import Route
from dualpace.runtime.types import RowKind, TransferKind
from dualpace.runtime.worker.copies import CopyEngine
from dualpace.settings.resolve import resolve
from tests.runtime.worker.checksums import checksums
from tests.runtime.worker.edits_case import run_edits
from tests.runtime.worker.lockstep_case import run_lockstep
from tests.runtime.worker.reference import Reference
from tests.runtime.worker.rig import GPU_BLOCKS, HOST_BLOCKS, Rig
from tests.runtime.worker.swapped_case import run_swapped
from tests.runtime.worker.talks import Talk
from tests.tiny_settings import settings

LAYERS = 5
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1024,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return f"random:{path}"


@pytest.fixture(scope="module")
def reference(source: str) -> Reference:
    return Reference(source)


@pytest.fixture(scope="module")
def make_plan(source: str) -> Callable[..., Plan]:
    def make(*overrides: str) -> Plan:
        return resolve(
            settings(
                f"model.source={source}",
                "gpu.device=cuda",
                "compile.backend=eager",
                f"kv.gpu_blocks={GPU_BLOCKS - 1}",
                f"kv.host_blocks={HOST_BLOCKS - 1}",
                "gpu.max_batched_tokens=256",
                "gpu.token_limit=256",
                "gpu.max_batch_size=16",
                "cpu.max_batch_size=16",
                "assist.post_attention_limit=0",
                "assist.post_layer_limit=0",
                *overrides,
            )
        )

    return make


@pytest.fixture(scope="module", params=["boundary", "stream", "whole"])
def rig(make_plan: Callable[..., Plan], request: pytest.FixtureRequest) -> Iterator[Rig]:
    """float32, in each way to run beside assists, and without any."""
    mode = ["assist.post_attention_limit=17", "assist.post_layer_limit=16"]
    if request.param != "whole":
        mode = [f"assist.mode={request.param}"]
    made = Rig(make_plan("model.dtype=float32", *mode), CopyEngine, True)
    made.assists = request.param != "whole"
    yield made
    made.close()


@pytest.fixture(scope="module")
def bf16(make_plan: Callable[..., Plan]) -> Iterator[Rig]:
    made = Rig(make_plan("model.dtype=bf16"), CopyEngine, True)
    yield made
    made.close()


def talks(*lengths: int, temperature: float = 0.0) -> list[Talk]:
    mix = random.Random(sum(lengths))
    return [
        Talk(i + 1, [mix.randrange(300) for _ in range(n)], temperature, vocab=CONFIG["vocab_size"])
        for i, n in enumerate(lengths)
    ]


def free(rig: Rig, **pools: list[Talk]) -> None:
    for pool, owners in pools.items():
        for talk in owners:
            rig.free[pool] += talk.blocks
            talk.blocks = []


def swap(number: int, kind: int, talk: Talk, rig: Rig) -> tuple[int, int, list[int], list[int]]:
    pool = "host" if kind == TransferKind.SWAP_OUT else "gpu"
    source, talk.blocks = talk.blocks, rig.take(pool, len(talk.blocks))
    return (number, kind, source, list(talk.blocks))


def test_both_sides_have_timed_a_layer(rig: Rig) -> None:
    learner = StartTimes(rig.plan)
    for progress in rig.progress.values():
        learner.learn(progress.layer_times)
    times = learner.admission.times
    assert times is not None
    assert 0 < times.gpu_decode_s(1, 16) < times.prefill(4096)
    assert times.cpu_decode_s(1, 16, 0.0) > 0


def test_mixed_rounds_equal_the_dense_model(rig: Rig, reference: Reference) -> None:
    a, b, c = talks(5, 16, 37)
    rig.gpu_step([rig.prefill(a)])
    rig.gpu_step([rig.decode(a), rig.prefill(b)])
    rig.gpu_step([rig.prefill(c), rig.decode(b), rig.decode(a)])
    for _ in range(12):
        rig.gpu_step([rig.decode(t) for t in (c, a, b)])
    assert reference.agrees(a, b, c)
    free(rig, gpu=[a, b, c])


def test_rounds_ahead_take_tokens_in_flight(rig: Rig, reference: Reference) -> None:
    a, b, c = talks(16, 30, 8)
    rig.gpu_step([rig.prefill(a), rig.prefill(b), rig.prefill(c)])
    for _ in range(3):
        first = [rig.decode(t) for t in (a, b, c)]
        step = rig.send_gpu(first)
        ahead = [rig.decode_ahead(t) for t in (c, a)]
        next_step = rig.send_gpu(ahead)
        one = rig.gpu_done(step, first)
        two = rig.gpu_done(next_step, ahead)
        assert one.started_s + one.duration_s <= two.started_s + 1e-4
        rig.gpu_step([rig.decode(b)])
    assert reference.agrees(a, b, c)
    free(rig, gpu=[a, b, c])


def test_pieces_of_a_prompt_beside_others(rig: Rig, reference: Reference) -> None:
    a, b, c = talks(45, 6, 9)
    rig.gpu_step([rig.prefill(b)])
    rig.gpu_step([rig.piece(a, 0, 21), rig.decode(b)])
    rig.gpu_step([rig.decode(b), rig.prefill(c), rig.piece(a, 21, 32)])
    rig.gpu_step([rig.piece(a, 32, 45), rig.decode(b), rig.decode(c)])
    for _ in range(3):
        rig.gpu_step([rig.decode(a), rig.decode(b)])
    assert reference.agrees(a, b, c)
    free(rig, gpu=[a, b, c])


def test_sampling_by_each_rows_uniform_number(rig: Rig, reference: Reference) -> None:
    warm = talks(11, 18, temperature=1.5)
    rig.gpu_step([rig.prefill(t) for t in warm])
    for _ in range(6):
        rig.gpu_step([rig.decode(t) for t in warm[::-1]])
    assert reference.agrees(*warm)
    free(rig, gpu=warm)


def test_prompts_to_the_host_and_every_route(rig: Rig, reference: Reference) -> None:
    a, b, c, d = made = talks(5, 16, 37, 48)
    rows = [rig.prefill(t, RowKind.PREFILL_CPU, transfer_id=i) for i, t in enumerate(made)]
    other = Talk(9, [7, 8, 9])
    rig.gpu_step([rig.prefill(other)])
    rig.gpu_step([*rows, rig.decode(other)])
    rig.transfer_done(0, 1, 2, 3)
    for route in Route if rig.assists else (Route.FULL_CPU,):
        for _ in range(3):
            step = rig.send_gpu(main := [rig.decode(other)])
            rig.cpu_step(made, route)
            rig.gpu_done(step, main)
    assert reference.agrees(a, b, c, d, other)
    free(rig, host=made, gpu=[other])


def test_edited_logits_on_every_way(rig: Rig, reference: Reference) -> None:
    """Launched beside graphs, by either worker; nothing is compiled for it."""
    run_edits(rig, reference, talks, tuple(Route) if rig.assists else (Route.FULL_CPU,))


def test_migrations_every_few_tokens_change_no_bit(rig: Rig, reference: Reference) -> None:
    """A soak: each block's checksum is the same before and after it moved."""
    everyone = talks(15, 31, 40, 22)
    rig.gpu_step([rig.prefill(t) for t in everyone])
    model = rig.gpu_worker._rounds.model
    host = rig.cpu_worker._layers
    mix = random.Random(5)
    for turn in range(12):
        moved = everyone[turn % 4]
        for _ in range(mix.randrange(1, 3)):
            rig.gpu_step([rig.decode(t) for t in everyone])
        here = [checksums(cache[moved.blocks]) for cache in model.caches]
        others = [t for t in everyone if t is not moved]
        out = swap(2 * turn, TransferKind.SWAP_OUT, moved, rig)
        rig.gpu_step([rig.decode(t) for t in others], [out])
        rig.transfer_done(2 * turn)
        rig.free["gpu"] += out[2]
        assert [checksums(layer[moved.blocks]) for layer in host] == here
        rig.cpu_step([moved])
        there = [checksums(layer[moved.blocks]) for layer in host]
        back = swap(2 * turn + 1, TransferKind.SWAP_IN, moved, rig)
        rig.gpu_step([], [back])
        rig.transfer_done(2 * turn + 1)
        count = len(back[3])
        assert [checksums(cache[moved.blocks[:count]]) for cache in model.caches] == there
        rig.free["host"] += back[2]
    assert reference.agrees(*everyone)
    free(rig, gpu=everyone)


def test_a_batch_is_told_the_same_bits_after_one_of_it_has_been_away(rig: Rig) -> None:
    run_swapped(rig, talks)


def test_in_bf16_too(bf16: Rig) -> None:
    run_swapped(bf16, talks)


@torch.inference_mode()
def logits_of(x: torch.Tensor, source: str) -> torch.Tensor:
    """The post-layer in float32."""
    weights = load_weights(resolve_source(source), torch.float32)
    x = x.float().cpu()
    h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weights.final_norm
    return h @ weights.head.t()


@torch.inference_mode()
def wanted_logits(reference: Reference, source: str, made: list[Talk]) -> torch.Tensor:
    """After the last token that has been fed, in float32."""
    from dualpace.graphs.attention import causal_prefill

    stages, rows = reference._stages, []
    for talk in made:
        fed = talk.tokens[:-1]
        x = stages.pre_layer(torch.tensor(fed))
        for layer in range(LAYERS):
            q, k, v = stages.pre_attention(layer, x, torch.arange(len(fed)))
            x = stages.post_attention(layer, causal_prefill(q, k, v, [len(fed)]).flatten(1), x)
        rows.append(x[-1])
    return logits_of(torch.stack(rows), source)


def near(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error = float((got - wanted).norm() / wanted.norm())
    print(f"{what}: {error:.4f}")
    assert error < 0.03, what


def test_bf16_on_either_side_is_near_float32(
    bf16: Rig, reference: Reference, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bf16.gpu_worker._rounds.model
    made = talks(20, 33, 47)
    bf16.gpu_step([bf16.prefill(t) for t in made])
    last = torch.tensor([19, 52, 99])
    with capsys.disabled():
        near(
            logits_of(model.rows.x[last.cuda()], source),
            wanted_logits(reference, source, made),
            "GPU prefill",
        )
        for _ in range(4):
            bf16.gpu_step([bf16.decode(t) for t in made])
        near(
            logits_of(model.rows.x[:3], source),
            wanted_logits(reference, source, made),
            "GPU decode",
        )
        moves = [swap(i, TransferKind.SWAP_OUT, t, bf16) for i, t in enumerate(made)]
        bf16.gpu_step([], moves)
        bf16.transfer_done(0, 1, 2)
        seen: list[torch.Tensor] = []
        for route in (Route.FULL_CPU, Route.SPLIT_FINAL):
            run = bf16.cpu_worker._routes[route]
            inner = run.draw

            def draw(x, sampling, inner=inner):  # what the last layer left
                seen.append(x.clone())
                return inner(x, sampling)

            run.draw = draw
        for route in Route:
            bf16.cpu_step(made, route)
            x = seen[-1]
            if route is Route.FUSED_ASSIST:
                x = bf16.gpu_worker._assists._graphs.rows.x[:3]
            near(logits_of(x, source), wanted_logits(reference, source, made), route.name)


@pytest.fixture(scope="module", params=["float32", "bf16"])
def paired(make_plan: Callable[..., Plan], request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Rounds may carry host rows in lockstep (neo). The CPU worker looks for them without a pause,
    here in a thread that must let the other one run.
    """
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    made = Rig(make_plan("policy=neo", f"model.dtype={request.param}"), CopyEngine, True)
    yield made
    made.close()
    sys.setswitchinterval(usual_s)


def test_host_rows_in_lockstep(paired: Rig, reference: Reference, source: str) -> None:
    """float32: the tokens are the dense model's. bf16: both sub-batches are near it."""
    if paired.plan.model.dtype == "float32":
        cold = talks(5, 16, 37, 20, 9, 30)
        run_lockstep(paired, reference, cold, talks(11, 21, temperature=1.2))
        return
    made = talks(20, 33, 47, 9)
    rows = [paired.prefill(t, RowKind.PREFILL_CPU, transfer_id=i) for i, t in enumerate(made[:3])]
    paired.gpu_step([paired.prefill(made[3]), *rows])
    paired.transfer_done(0, 1, 2)
    a, b, c, own = made
    for _ in range(4):
        paired.gpu_step(
            [paired.decode(own), paired.host(a, 0), paired.host(b, 0), paired.host(c, 1)]
        )
    served = paired.gpu_worker._rounds
    near(
        logits_of(served.model.rows.x[:3], source),
        wanted_logits(reference, source, [own, a, b]),
        "sub-batch 0",
    )
    near(
        logits_of(served._second.rows.x[:1], source),
        wanted_logits(reference, source, [c]),
        "sub-batch 1",
    )


def test_one_layer_polls_in_under_5_us(bf16: Rig) -> None:
    import time

    serve = bf16.gpu_worker._assists.serve
    began = time.perf_counter()
    for _ in range(2000):
        assert not serve()
    assert (time.perf_counter() - began) / 2000 < 5e-6
