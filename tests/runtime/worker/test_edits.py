"""Edited logits: wherever a row is sampled, its tokens are those of the dense model with the same
edits, done one by one."""

from collections.abc import Callable

from dualpace.runtime.routing import Route
from tests.runtime.worker.edits_case import run_edits
from tests.runtime.worker.reference import Reference
from tests.runtime.worker.rig import Rig, Talk


def test_edits_on_every_way(
    rig: Rig, reference: Reference, talks: Callable[..., list[Talk]]
) -> None:
    run_edits(rig, reference, talks, tuple(Route))
