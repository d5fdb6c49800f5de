"""Edited logits and log-probabilities: wherever a row is sampled, its tokens are those of the dense
model with the same edits, done one by one, and what is told of them is what that model says."""

from collections.abc import Callable

import pytest

from dualpace.runtime.routing import Route
from tests.runtime.worker.device_fake import device_rig
from tests.runtime.worker.edits_case import run_edits
from tests.runtime.worker.reference import Reference
from tests.runtime.worker.rig import Rig
from tests.runtime.worker.talks import Talk


@pytest.fixture(params=["stand-in", "device"])
def rig(
    request: pytest.FixtureRequest, make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> Rig:
    """The stand-in, and a device whose streams do at once what they are given."""
    if request.param == "device":
        device_rig(monkeypatch)
    return make_rig()


def test_edits_on_every_way(
    rig: Rig, reference: Reference, talks: Callable[..., list[Talk]]
) -> None:
    run_edits(rig, reference, talks, tuple(Route))
