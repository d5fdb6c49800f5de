"""Figures 8 and 12: what their panels show of the records."""

from typing import Any

from dualpace.runtime.bench.breakdown import figure_8, figure_12


def texts(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_lengths_are_those_of_each_workloads_largest_run() -> None:
    few = {"workload": "code", "input_lens": [10, 20], "output_lens": [1, 1]}
    many = {"workload": "code", "input_lens": [10, 30, 50], "output_lens": [1, 2, 3]}
    other = {"workload": "conversation", "input_lens": [7], "output_lens": [9]}
    figure = figure_8([few, many, other, {"workload": "old"}])
    assert figure is not None
    code, conversation = figure.axes
    assert texts(code) == ["prompt, mean 30", "output, mean 2"]
    assert texts(conversation) == ["prompt, mean 7", "output, mean 9"]
    assert sum(bar.get_height() for bar in code.patches) == 200  # each length's shares are 100 %
    assert figure_8([{"workload": "old"}]) is None


def test_an_assists_time_is_shared_out_without_its_wait() -> None:
    spent = {"wait": 9.0, "launch": 1.0, "finalize": 1.0}
    spent |= {"h2d": 0.5, "compute": 1.0, "sampling": 0.3, "d2h": 0.2}
    run = {"profile": "box", "workload": "conversation", "assists": 100, "assist_seconds": spent}
    figure = figure_12([run, run, {**run, "assists": 0}])
    assert figure is not None
    left, right = figure.axes
    assert [round(bar.get_height(), 6) for bar in left.patches] == [50.0, 50.0]
    assert [round(bar.get_height(), 6) for bar in right.patches] == [25.0, 50.0, 15.0, 10.0]
    assert "40000 us each" in [text.get_text() for text in left.texts]
    assert figure_12([{"profile": "box", "workload": "code"}]) is None
