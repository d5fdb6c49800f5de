"""No round waits for a compiler: every bucket edge through both workers, on compiled stages."""

from pathlib import Path

import pytest

from dualpace.runtime.types import RowKind
from tests.runtime.worker.edits_case import BIASED, EVERYTHING

BUCKETS = (1, 4)
EDGES = (1, 3, 4, 5, 16)  # 1, b - 1, b, b + 1, the most rows of a batch

pytestmark = pytest.mark.timeout(300)  # the fixture's graphs are compiled


@pytest.fixture
def rig(make_rig, tmp_path: Path):
    return make_rig(
        "compile.backend=inductor-packed",
        "compile.start=ahead",
        f"compile.buckets={list(BUCKETS)}",
        f"compile.cache_dir={tmp_path}",
    )


def test_no_round_compiles_at_any_bucket_edge(rig, talks, reference):
    """The rig asserts after every step that nothing has been compiled."""
    checked = []
    for rows in EDGES:
        here, away = talks(*[2] * rows), talks(*[3] * rows)
        for index, talk in enumerate([*here, *away]):
            talk.id = 100 * rows + index
        here[0].rules, away[0].rules = BIASED, EVERYTHING
        rig.gpu_step([rig.prefill(t) for t in here])  # 2 tokens a row: edges of the layers too
        rig.gpu_step([rig.prefill(t, RowKind.PREFILL_CPU, transfer_id=t.id) for t in away])
        rig.transfer_done(*(t.id for t in away))
        for temperature in (0.0, 1.0):
            for talk in (*here, *away):
                talk.temperature = temperature
            rig.gpu_step([rig.decode(t) for t in here])
            rig.cpu_step(away)
        for pool, made in (("gpu", here), ("host", away)):
            rig.free[pool] += [b for t in made for b in t.blocks]
        checked += [here[0], away[-1]]
    for talk in checked:
        del talk.tokens[talk.prompt_len + 2 :]  # the last was sampled at another temperature
        talk.temperature = 0.0
    assert reference.agrees(*checked)
