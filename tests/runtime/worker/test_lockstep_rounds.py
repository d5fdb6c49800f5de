"""Rounds that carry host rows (neo): tokens are those of the dense model, whichever sub-batch the
rows are in and whatever runs beside them."""

from collections.abc import Callable

import pytest

from tests.runtime.worker.device_fake import device_rig
from tests.runtime.worker.lockstep_case import run_lockstep
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
    return make_rig("policy=neo")


def test_host_rows_beside_everything_else(
    rig: Rig, reference: Reference, talks: Callable[..., list[Talk]]
) -> None:
    run_lockstep(rig, reference, talks(5, 16, 37, 20, 9, 30), talks(11, 21, temperature=1.2))
