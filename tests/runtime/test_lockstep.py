"""Lockstep rounds: the shared buffer's hand-over, and predictions from measured times."""

import os

import pytest

from dualpace.runtime.engine.predict import MeasuredPredictor
from dualpace.runtime.lockstep import LockstepBuffer, LockstepLayout, tag
from dualpace.runtime.shared_memory import SharedRegion


def test_each_sub_batch_has_a_place_of_its_own_that_both_sides_see() -> None:
    layout = LockstepLayout(max_rows=3, q_width=8, kv_width=4, itemsize=4)
    region = SharedRegion.create("test", layout.nbytes)
    gpu, cpu = (LockstepBuffer(SharedRegion.attach(os.dup(region.fd)), layout) for _ in range(2))
    marks = {}
    for place in (0, 1):
        for name in ("q", "k", "v", "out"):
            part = gpu.bytes_of(place, name)
            assert len(part) >= 3 * 4 * (8 if name in ("q", "out") else 4)
            marks[place, name] = bytes([len(marks) + 1]) * len(part)
            part[:] = marks[place, name]
    bell = os.eventfd(0)
    gpu.ask(1, 7, [bell])
    assert os.eventfd_read(bell) == 1
    assert cpu.is_asked(1, 7) and not cpu.is_asked(0, 7) and not cpu.is_asked(1, 8)
    assert not gpu.is_answered(1, 7)
    cpu.answer(1, 7, [bell])
    assert gpu.is_answered(1, 7) and not gpu.is_answered(0, 7)
    for (place, name), mark in marks.items():
        assert bytes(cpu.bytes_of(place, name)) == mark
    os.close(bell)


def test_tags_name_one_layer_of_one_step_and_grow() -> None:
    tags = [tag(step, layer, 5) for step in range(1, 4) for layer in range(5)]
    assert tags == sorted(set(tags)) and tags[0] > 0


def test_predictions_follow_the_measured_line_and_go_on_beyond_it() -> None:
    predictor = MeasuredPredictor(num_layers=2, extra_s=0.5)
    assert predictor.linear_s(4) == 0.0  # nobody has measured yet
    predictor.learn({"linear": [[8, 3.0], [1, 1.0]], "host": [[16, 1.0], [32, 2.0]]})
    predictor.learn({"decode": [[10, 0.1]], "prefill": [[100, 1.0], [400, 4.0]]})
    assert predictor.linear_s(0) == 0.0 and predictor.linear_s(1) == 1.0
    assert predictor.linear_s(4.5) == pytest.approx(2.0)
    assert predictor.linear_s(15) == pytest.approx(5.0)
    assert predictor.cpu_attention_s(3, 24) == pytest.approx(0.5 + 1.5)
    assert predictor.cpu_attention_s(0, 0) == 0.0
    predictor.learn({"exchange": [[1, 0.25], [9, 0.25]]})
    assert predictor.cpu_attention_s(3, 24) == pytest.approx(0.5 + 1.5 + 0.25)
    assert predictor.gpu_attention_s([(10, 20)], 99) == pytest.approx(2.0 + 0.1)
