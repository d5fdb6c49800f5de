"""What workers time of a layer when they start, where the policy judges by it."""

from collections.abc import Callable

import pytest

from dualpace.runtime.engine.start_times import StartTimes
from tests.runtime.worker.device_fake import device_rig
from tests.runtime.worker.rig import Rig

PARTS = {
    "gpu": {"linear", "post_layer", "decode", "prefill"},
    "cpu": {"host", "host_pre", "host_post", "host_post_layer"},
}


@pytest.mark.parametrize("device", ["the stand-in", "a GPU"])
def test_steps_are_known_once_both_workers_have_started(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    if device == "a GPU":
        device_rig(monkeypatch)
    rig = make_rig("gpu.max_batch_size=20", "cpu.max_batch_size=20")
    learner = StartTimes(rig.plan)
    for role, parts in PARTS.items():
        told = rig.progress[role].layer_times
        assert told.keys() == parts
        for part, points in told.items():
            sizes = [size for size, _ in points]
            assert sizes == sorted(set(sizes)), part
            assert all(seconds > 0 for _, seconds in points), part
        learner.learn(told)
    times = learner.admission.times
    assert times is not None
    assert 0 < times.gpu_decode_s(1, 64) <= times.gpu_decode_s(20, 10_000)
    assert 0 < times.prefill(16) <= times.prefill(300)
    assert 0 < times.cpu_decode_s(1, 64, 0.0) <= times.cpu_decode_s(20, 10_000, 0.0)
    assert 0 < times.assist(1) <= times.assist(20), "every batch of this rig is assisted"


def test_sizes_go_from_one_row_to_all_that_a_round_may_have(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("gpu.max_batch_size=20", "cpu.max_batch_size=30")
    for role, part, most in (("gpu", "linear", 20), ("cpu", "host_pre", 30)):
        rows = [size for size, _ in rig.progress[role].layer_times[part]]
        assert (rows[0], rows[-1]) == (1, most)


@pytest.mark.parametrize("overrides", [("policy.host_admission=always",), ("kv.host_blocks=0",)])
def test_nothing_is_timed_where_nobody_judges_by_it(
    make_rig: Callable[..., Rig], overrides: tuple[str, ...]
) -> None:
    rig = make_rig(*overrides)
    assert not any(progress.layer_times for progress in rig.progress.values())
