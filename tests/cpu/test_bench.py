"""The benchmark's own arithmetic: what an iteration must cost at least, and that it runs whole."""

import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dualpace.cpu import bench as whole
from dualpace.cpu import bench_iteration as bench
from dualpace.cpu import ceilings
from dualpace.cpu.attention_case import AttentionCase, Heads
from dualpace.cpu.bench_peers import sdpa, vllm, why_no_vllm
from dualpace.cpu.ceilings import in_turns
from dualpace.cpu.gemm import Unit
from dualpace.cpu.isa import Level, detected


def test_roofline_counts_each_weight_and_token_once() -> None:
    model = bench.Model(layers=2)
    ideal = bench._roofline(model, rows=4, context=100, bandwidth=1e9, rate=None)
    weights = 4096 * (4096 + 3 * 14336) * 2
    assert math.isclose(ideal["post"], 2 * weights / 1e9)
    assert math.isclose(ideal["attention"], 2 * 4 * 100 * 2 * 8 * 128 * 2 / 1e9)
    assert math.isclose(ideal["final"], 2 * 4096 * 128256 / 1e9)
    # Many rows are limited by arithmetic: two operations a weight and row.
    many = bench._roofline(model, rows=4096, context=1, bandwidth=1e15, rate=1e12)
    assert math.isclose(many["post"], 2 * 4096 * weights / 1e12)


@pytest.mark.parametrize("unit", [None, Unit(False, detected().has(Level.AVX512_BF16))])
def test_iteration_is_split_by_stage(unit: Unit | None) -> None:
    model = bench.Model(96, 160, 6, 2, 64, 320, layers=3, sets=2)
    (record,) = bench.iteration_table(model, (5,), 40, 1e10, None, unit)
    assert set(record["stages_ms"]) == set(bench.STAGES)
    assert all(t > 0 for t in record["stages_ms"].values())
    assert sum(record["stages_ms"].values()) <= record["ms"] + 0.1
    assert record["fixed_ms"] > 0


def test_runs_take_turns() -> None:
    order: list[str] = []
    times = in_turns({name: partial(order.append, name) for name in "ab"}, 2)
    assert order == ["a", "b"] * 3
    assert {name: len(t) for name, t in times.items()} == {"a": 2, "b": 2}


def test_a_ceiling_is_taken_right_before_and_after_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(ceilings, "time", clock)
    rates = iter([1.0, 3.0, 5.0, 4.0])
    run = partial(clock.advance, 2.0)
    pairs = ceilings.beside(run, lambda: clock.advance(next(rates)), 3)
    assert pairs == [(2.0, 2.0), (2.0, 4.0), (2.0, 4.5)]


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_every_part_runs_and_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = bench.Model(96, 160, 6, 2, 64, 320, layers=2, sets=2)
    sizes = whole.Sizes(small, ((2, 96),), (3,), (2,), (2, 40, 3), 1 << 22, 1)
    monkeypatch.setattr(whole, "QUICK", sizes)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    figure = tmp_path / "scaling.png"
    try:
        assert whole.main(["--quick", "--threads", "2", "--figure", str(figure)]) == 0
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figure.stat().st_size > 0
    assert [r["layout"] for r in report["attention"]] == ["per-layer", "block-major"]
    assert [r["threads"] for r in report["scaling"]] == [1, 2]
    assert all(r["ms"] > 0 and r["called_ms"] > 0 for r in report["attention"])
    assert report["dense"] and report["iteration"] and report["wrong"] == 0
    in_bf16 = report["attention"][0]["mb"]
    try:
        assert whole.main(["--quick", "--only", "attention", "--float32", "--threads", "2"]) == 0
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["attention"][0]["mb"] == 2 * in_bf16 > 0 and report["wrong"] == 0


def test_peers_attend_to_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "vllm._custom_ops", raising=False)
    assert "not installed" in str(why_no_vllm(torch.bfloat16))

    class Operations(ModuleType):
        """Its operations, as plainly as can be, on a cache of its layout."""

        def cpu_attn_reshape_and_cache(
            self, key: Any, value: Any, keys: Any, values: Any, slots: Any, isa: str
        ) -> None:
            keys[slots // 32, :, slots % 32] = key
            values[slots // 32, :, slots % 32] = value

        def cpu_attn_get_scheduler_metadata(self, **facts: Any) -> torch.Tensor:
            return torch.empty(0)

        def cpu_attention_with_kv_cache(self, **given: Any) -> None:
            for row, length in enumerate(given["seq_lens"].tolist()):
                used = given["block_table"][row].long()
                k, v = (
                    given[name][used].transpose(0, 1).flatten(1, 2)[:, :length]
                    for name in ("key_cache", "value_cache")
                )
                q = given["query"][row].view(k.shape[0], -1, k.shape[2])
                weights = (q.float() @ k.float().mT * given["scale"]).softmax(-1)
                given["output"][row] = (weights @ v.float()).flatten(0, 1)

    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", Operations("vllm._custom_ops"))
    assert why_no_vllm(torch.bfloat16) is None
    assert "in bf16 alone" in str(why_no_vllm(torch.float32))
    memory = torch.randn(1 << 21).bfloat16().view(torch.uint8)
    case = AttentionCase(Heads(6, 2, 64), memory, 3, 45, True, detected().level)
    case.plan(1)
    case.run()
    for peer in (sdpa(case), vllm(case, Level.AVX512_BF16)):
        torch.testing.assert_close(peer(), case.out, rtol=2**-7, atol=2**-7)
