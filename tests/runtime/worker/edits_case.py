"""Rows whose logits are edited, beside others, on every way of being sampled, for any kind of
accelerator."""

from collections.abc import Callable, Sequence

from dualpace.runtime.logit_rules import LogitRules
from dualpace.runtime.routing import Route
from dualpace.runtime.structured import Structure
from dualpace.runtime.types import RowKind
from tests.runtime.worker.reference import Reference
from tests.runtime.worker.rig import Rig
from tests.runtime.worker.talks import Talk

EVERYTHING = LogitRules(
    min_p=0.05,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias={3: 2.0, 11: -100.0},
    min_tokens=4,
    stop_token_ids=(5, 6, 7),
    structure=Structure("regex", "of a test", "here"),
)
BIASED = LogitRules(
    logit_bias={20: 1.5, 21: 1.5}, allowed_token_ids=tuple(range(1, 300, 3)), min_p=0.1
)
Talks = Callable[..., list[Talk]]


def run_edits(rig: Rig, reference: Reference, talks: Talks, routes: Sequence[Route]) -> None:
    """The requests that are left in HBM and on the host."""
    plain, penalised = talks(12, 19)
    warm, biased = talks(9, 33, temperature=1.4)
    penalised.rules = warm.rules = EVERYTHING
    biased.rules = BIASED
    penalised.id, warm.id, biased.id = 4, 5, 6
    plain.logprobs, biased.logprobs, penalised.logprobs = 0, 3, 20
    everyone = [plain, penalised, warm, biased]
    rig.gpu_step([rig.prefill(plain), rig.prefill(warm)])
    rig.gpu_step([rig.decode(warm), rig.prefill(penalised), rig.decode(plain)])
    rig.gpu_step([rig.prefill(biased), rig.decode(penalised)])
    for _ in range(4):  # decodes alone
        rig.gpu_step([rig.decode(t) for t in (penalised, plain, biased, warm)])
    first = [rig.decode(biased), rig.decode(plain)]
    ahead = [rig.decode_ahead(biased)]  # its edits need no token
    step, next_step = rig.send_gpu(first), rig.send_gpu(ahead)
    rig.gpu_done(step, first)
    rig.gpu_done(next_step, ahead)
    assert reference.agrees(*everyone)
    moved = [penalised, warm, biased]
    for talk in moved:  # recomputed, and on to the host
        rig.free["gpu"] += talk.blocks
        talk.blocks = []
    rows = [rig.prefill(t, RowKind.PREFILL_CPU, transfer_id=i) for i, t in enumerate(moved)]
    rig.gpu_step([*rows, rig.decode(plain)])
    rig.transfer_done(0, 1, 2)
    for route in routes:
        for _ in range(2):
            rig.cpu_step(moved, route)
        rig.cpu_step([penalised], route)  # greedy rows alone
    assert reference.agrees(*everyone)
    assert reference.tells(plain, biased, penalised)
    matter(reference, moved)
    rig.free["gpu"] += plain.blocks
    rig.free["host"] += [block for talk in moved for block in talk.blocks]


def matter(reference: Reference, edited: list[Talk]) -> None:
    """Without their rules these requests would have said something else."""
    for talk in edited:
        rules, talk.rules = talk.rules, LogitRules()
        assert talk.output != reference.output(talk)
        talk.rules = rules
