"""The fused forward computes what the stages do, product by product and cut by cut."""

import dataclasses
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

from dualpace.graphs import stages
from dualpace.graphs.collective import Alone, Collective
from dualpace.graphs.gpu import skinny
from dualpace.graphs.gpu.forward import Forward, Rows
from dualpace.graphs.gpu.kv import make_pool
from dualpace.graphs.gpu.linear import PRODUCTS, Choices, candidates
from dualpace.graphs.gpu.skinny import Skinny
from dualpace.graphs.logprobs import LogprobRows
from dualpace.graphs.random_weights import random_weights
from dualpace.graphs.rope import rope_table
from dualpace.graphs.sampling import SamplingRows
from dualpace.graphs.shard import Shard
from dualpace.graphs.spec import ModelSpec
from tests.graphs.asked import Asked, edits_of
from tests.graphs.ranks import in_threads
from tests.graphs.told import check

SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    hidden=64,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=96,
    max_context=64,
    qkv_bias=True,
    qk_norm=True,
)
ROWS = 3
CUTS = {
    "library": {},
    "skinny": {
        "qkv": Skinny(16, 32, 2, 4, split=2),
        "o": Skinny(32, 16, 2, 4, split=4),
        "gate_up": Skinny(32, 64, 2, 4),
        "down": Skinny(16, 32, 2, 4, split=2),
        "head": Skinny(32, 32, 2, 4),
    },
}


def forward_of(cuts: str, device: torch.device) -> Forward:
    weights = random_weights(SPEC, torch.float32, seed=1)
    for layer in weights.layers:
        layer.q_norm.uniform_(0.5, 1.5)
        layer.k_norm.uniform_(0.5, 1.5)
        layer.mlp_norm.uniform_(0.5, 1.5)
    cos, sin = (t.to(device) for t in rope_table(SPEC, SPEC.max_context))
    choices = Choices({(p, ROWS): how for p, how in CUTS[cuts].items()})
    return Forward(SPEC, weights, cos, sin, max_rows=8, choices=choices)


@pytest.fixture(params=CUTS)
def forward(request: pytest.FixtureRequest) -> Forward:
    return forward_of(request.param, torch.device("cpu"))


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu covers the device")


def test_layer_is_that_of_the_stages(forward: Forward) -> None:
    rows = Rows.empty(SPEC, ROWS, torch.float32, forward.device)
    w, eps = forward.weights.layers[0], SPEC.rms_eps
    ids, positions = torch.tensor([5, 90, 0]), torch.tensor([0, 7, 63])
    sampled = torch.tensor([11, 12, 13], dtype=torch.int32)
    source = torch.tensor([-1, 2, -1], dtype=torch.int32)

    forward.embed(rows, ids, source, sampled)
    x = stages.pre_layer(torch.tensor([5, 13, 0]), forward.weights.embed)
    torch.testing.assert_close(rows.x, x)

    forward.pre_attention(0, rows, positions)
    heads = (SPEC.num_q_heads, SPEC.num_kv_heads, SPEC.head_dim)
    q, k, v = stages.pre_attention(
        x,
        positions,
        forward._cos,
        forward._sin,
        w.attn_norm,
        w.qkv,
        w.qkv_bias,
        w.q_norm,
        w.k_norm,
        heads=heads,
        eps=eps,
    )
    for got, wanted in ((rows.q, q), (rows.k, k), (rows.v, v)):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)

    rows.attn.normal_()
    forward.post_attention(0, rows)
    wanted = stages.post_attention(
        rows.attn, x, w.o, w.mlp_norm, w.gate_up, w.down, intermediate=SPEC.intermediate, eps=eps
    )
    torch.testing.assert_close(rows.x, wanted, atol=1e-4, rtol=1e-4)
    after = stages.rms_norm(wanted, forward.weights.layers[1].attn_norm, eps)
    torch.testing.assert_close(rows.h, after, atol=1e-4, rtol=1e-4)


def test_greedy_takes_the_best_logit(forward: Forward) -> None:
    h = torch.randn(ROWS, SPEC.hidden)
    tokens = torch.empty(ROWS, dtype=torch.int32)
    forward.greedy(h, tokens)
    assert tokens.tolist() == (h @ forward.weights.head.T).argmax(-1).tolist()


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    forward = forward_of("skinny", torch.device("cpu"))
    pool = make_pool(SPEC.num_layers, 4, 2, 16, torch.float32, "cpu")
    rows = Rows.empty(SPEC, ROWS, torch.float32, forward.device)
    rows.h.normal_()
    slots = torch.tensor([16 * 2 + 5, -1, 16 * 3 + 15])
    forward.pre_attention(0, rows, torch.tensor([1, 2, 3]), pool[0], slots)
    expected = torch.zeros_like(pool)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // 16, 0, :, slot % 16] = rows.k[row]
            expected[0, slot // 16, 1, :, slot % 16] = rows.v[row]
    assert torch.equal(pool, expected)


def test_norm_alone_is_the_stages_norm() -> None:
    forward = forward_of("library", torch.device("cpu"))
    rows = Rows.empty(SPEC, ROWS, torch.float32, forward.device)
    rows.x.normal_()
    x = rows.x.clone()
    forward.normed(rows, forward.weights.final_norm)
    torch.testing.assert_close(rows.h, stages.rms_norm(x, forward.weights.final_norm, SPEC.rms_eps))
    assert torch.equal(rows.x, x)


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_candidates_divide_and_fit(rows: int) -> None:
    for product, (columns, depth) in {
        "qkv": (6144, 4096),
        "down": (4096, 14336),
        "gate_up": (14336, 4096),
        "head": (128256, 4096),
    }.items():
        found = list(candidates(product, columns, depth, rows, sms=132))
        assert found[0] is None and len(found) > 3
        assert all(how.fits(columns, depth) for how in found[1:])
    assert list(candidates("qkv", 6144, 4096, 128, sms=132)) == [None]


def test_a_cut_that_leaves_a_rest_is_refused() -> None:
    x, w = torch.zeros(1, 64), torch.zeros(40, 64)
    with pytest.raises(AssertionError):
        skinny.partials(x, w, torch.zeros(1, 1, 40), Skinny(32, 32, 2, 4))


def test_choices_survive_the_disk_and_a_damaged_file_does_not_count(tmp_path) -> None:
    choices = Choices({(p, 8): None for p in PRODUCTS} | {("qkv", 1): Skinny(64, 64, 4, 4, 2)})
    path = tmp_path / "folder" / "table.json"
    choices.save(path, "this machine")
    assert Choices.load(path, "this machine").table == choices.table
    assert Choices.load(path, "another machine") is None
    path.write_text(path.read_text()[:40])
    assert Choices.load(path, "this machine") is None
    assert Choices.load(tmp_path / "none.json", "this machine") is None


def test_stages_of_the_reference_are_unchanged() -> None:
    """The fused rounding may differ in bf16, by no more than bf16's own steps."""
    logits = partial(stages.logits, vocab=SPEC.vocab, eps=SPEC.rms_eps)
    forward = forward_of("library", torch.device("cpu"))
    x = torch.randn(ROWS, SPEC.hidden)
    h = stages.rms_norm(x, forward.weights.final_norm, SPEC.rms_eps)
    wanted = logits(x, forward.weights.final_norm, forward.weights.head)
    torch.testing.assert_close(forward.logits(h), wanted)


class InTurns:
    """A collective whose ranks compute one at a time: the interpreter is for one thread."""

    def __init__(self, collective: Collective, lock: threading.Lock) -> None:
        self.rank, self.size = collective.rank, collective.size
        self._collective, self._lock = collective, lock

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._apart(self._collective.all_reduce, x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._apart(self._collective.all_gather, x)

    def barrier(self) -> None:
        self._collective.barrier()

    def _apart(self, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        self._lock.release()
        try:
            return call(x)
        finally:
            self._lock.acquire()


@pytest.mark.parametrize("cuts", ["library", "skinny"])
def test_two_ranks_compute_what_one_does(cuts: str) -> None:
    spec = dataclasses.replace(SPEC, vocab=90)  # a part of it is padding
    cos, sin = rope_table(spec, spec.max_context)
    ids, positions = torch.tensor([5, 89, 0]), torch.tensor([0, 7, 63])
    source, sampled = torch.tensor([-1, -1, 0]).int(), torch.tensor([60]).int()
    how = SamplingRows.of(*torch.tensor([[1.0] * 3, [0, 5, 0], [1, 1, 0.8], [0.2, 0.5, 0.9]]))
    how = dataclasses.replace(how, top_k=how.top_k.int())
    edits = edits_of({1: Asked([5], [60, 89], 0.1, 0.5, 0.2, 1.3, {7: -torch.inf, 88: 3.0})})
    asking = LogprobRows(torch.tensor([1, 2]), best=4)
    lock = threading.Lock()

    def run(collective: Collective) -> dict[str, torch.Tensor]:
        shard = Shard(collective.rank, collective.size)
        with lock:
            weights = random_weights(spec, torch.float32, 1, shard)
            chosen = CUTS[cuts] | {"o": Skinny(32, 16, 2, 4, split=2)}
            if shard.size == 1:
                chosen["head"] = None  # 90 tokens are no whole number of tiles
            choices = Choices({(product, ROWS): cut for product, cut in chosen.items()})
            turns = InTurns(collective, lock)
            forward = Forward(spec, weights, cos, sin, 8, choices, shard=shard, collective=turns)
            rows = Rows.empty(forward.spec, ROWS, torch.float32, forward.device)
            forward.embed(rows, ids, source, sampled)
            found = {"embedding": rows.x.clone(), "norm": rows.h.clone()}
            for layer in range(spec.num_layers):
                forward.pre_attention(layer, rows, positions)
                # In place of attention, which is each head's own: any function of the head.
                rows.attn.copy_((rows.q + rows.k.repeat_interleave(2, 1)).flatten(1))
                forward.post_attention(layer, rows)
            found |= {"x": rows.x, "logits": forward.logits(rows.h)}
            for name in ("greedy", "sample", "edited"):
                found[name] = torch.empty(ROWS, dtype=torch.int32)
            forward.greedy(rows.h, found["greedy"])
            assert forward.sample(rows.h, how, found["sample"]) is None
            edited = dataclasses.replace(how, edits=edits, logprobs=asking)
            told = forward.sample(rows.h, edited, found["edited"])
            assert told is not None
            asked = asking.rows
            check(told, found["logits"][asked], found["edited"][asked], asking.best)
        return found

    (alone,), (first, second) = in_threads(1, run), in_threads(2, run)
    for name, wanted in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], wanted, atol=1e-4, rtol=1e-4)


def test_a_part_can_be_timed_while_the_other_ranks_are_elsewhere() -> None:
    class Absent(Alone):
        size = 2

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("nobody comes")

        all_gather = all_reduce

    shard = Shard(0, 2)
    weights = random_weights(SPEC, torch.float32, 1, shard)
    cos, sin = rope_table(SPEC, SPEC.max_context)
    forward = Forward(SPEC, weights, cos, sin, 8, shard=shard, collective=Absent())
    rows = Rows.empty(forward.spec, ROWS, torch.float32, forward.device)
    with pytest.raises(AssertionError, match="nobody comes"):
        forward.post_attention(0, rows)
    forward.apart().post_attention(0, rows)
    forward.apart().greedy(rows.h, rows.tokens)
