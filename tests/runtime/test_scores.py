"""Appendix B's arithmetic by hand, and calibration by equal groups."""

import pytest

from dualpace.runtime.assist import AssistKind
from dualpace.runtime.routing import Route
from dualpace.runtime.scores import AssistCall, Calibration, Primitives, calibrate
from dualpace.runtime.scores import route_scores as scores_of

P, LA, LS = AssistKind.POST_ATTENTION, AssistKind.POST_ATTENTION_FINAL, AssistKind.POST_LAYER
ROW = Primitives(2.0, 7.0, 0.1, 0.2, 0.3, {P: 1.0, LA: 3.0, LS: 2.5})
CALIBRATION = Calibration(wait={P: 0.5, LA: 0.6, LS: 0.7}, overhead={P: 0.05, LA: 0.06, LS: 0.07})


def test_scores_by_hand() -> None:
    scores = scores_of([ROW], CALIBRATION, num_layers=4, gpu_weight=2.0)
    assert scores[Route.FULL_CPU] == pytest.approx([4 * 2.0 + 7.0])
    split = 4 * 2.0 + 0.3 + (0.7 + 2.5) + 2 * (0.07 + 2.5)
    assert scores[Route.SPLIT_FINAL] == pytest.approx([split])
    seen = 3 * (0.1 + 0.5 + 1.0 + 0.2) + 0.1 + 0.6 + 3.0
    displaced = 3 * (0.05 + 1.0) + 0.06 + 3.0
    assert scores[Route.FUSED_ASSIST] == pytest.approx([seen + 2 * displaced])


def test_one_layer_has_no_middle_assist() -> None:
    scores = scores_of([ROW], CALIBRATION, num_layers=1, gpu_weight=0.0)
    assert scores[Route.FUSED_ASSIST] == pytest.approx([0.1 + 0.6 + 3.0])


def test_groups_weigh_the_same_however_often_they_were_called() -> None:
    rare = [AssistCall(kind, 1, 5.0, 1.0, 0.2, 0.1) for kind in AssistKind]
    often = [AssistCall(kind, 64, 2.0, 1.0, 0.4, 0.1) for kind in AssistKind] * 9
    found = calibrate([*rare, *often])
    assert found.wait[P] == pytest.approx((4.0 + 1.0) / 2)
    assert found.overhead[LS] == pytest.approx((0.3 + 0.5) / 2)


def test_a_wait_shorter_than_the_device_interval_counts_as_none() -> None:
    calls = [AssistCall(kind, 1, wait, 1.0, 0.0, 0.0) for kind in AssistKind for wait in (0.5, 2.0)]
    assert calibrate(calls).wait[LA] == pytest.approx(0.5)


def test_a_kind_without_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="POST_LAYER"):
        calibrate([AssistCall(P, 1, 1.0, 1.0, 0.0, 0.0), AssistCall(LA, 1, 1.0, 1.0, 0.0, 0.0)])
