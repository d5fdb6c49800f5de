"""Rounds that carry host rows in every mix, for any kind of accelerator."""

from dualpace.runtime.types import RowKind
from tests.runtime.worker.edits_case import BIASED, EVERYTHING, matter
from tests.runtime.worker.reference import Reference
from tests.runtime.worker.rig import Rig
from tests.runtime.worker.talks import Talk


def run_lockstep(rig: Rig, reference: Reference, cold: list[Talk], warm: list[Talk]) -> None:
    """`cold` are six requests; `warm` two that are sampled."""
    a, b, c, d, e, f = cold
    g, h = warm
    g.id, h.id = 7, 8
    a.rules = h.rules = EVERYTHING
    c.rules = BIASED
    b.logprobs, c.logprobs, e.logprobs, h.logprobs = 1, 0, 5, 2
    rig.gpu_step([rig.prefill(a), rig.prefill(g)])
    on_host = (b, c, d, h)
    rows = [rig.prefill(t, RowKind.PREFILL_CPU, transfer_id=i) for i, t in enumerate(on_host)]
    rig.gpu_step([rig.decode(a), *rows])
    rig.transfer_done(0, 1, 2, 3)
    first, second = rig.host, lambda talk: Rig.host(talk, 1)
    for _ in range(3):  # decodes alone, both sub-batches
        rig.gpu_step([rig.decode(g), rig.decode(a), first(b, 0), first(h, 0), second(c)])
    rig.gpu_step([rig.decode(a), second(c), second(h)])  # none in the first
    rig.gpu_step([rig.decode(a), first(d, 0)])  # none in the second
    step = rig.gpu_step([rig.prefill(e), rig.decode(g), first(d, 0), second(b), second(h)])
    assert step.duration_s >= 0
    last = rig.prefill(f, RowKind.PREFILL_CPU, transfer_id=9)  # K and V by turns beside host rows
    rig.gpu_step([rig.decode(a), rig.decode(e), last, first(c, 0), second(d)])
    rig.transfer_done(9)
    for _ in range(2):
        rig.gpu_step([rig.decode(e), first(f, 0), first(b, 0), second(c), second(h), second(d)])
    for prompts in ([], [a]):  # host rows behind a round in flight, and a round behind them
        plain = [rig.decode(e), rig.decode(g)]
        others = [rig.decode_ahead(e), rig.decode_ahead(g), *map(rig.prefill, prompts)]
        paired = [*others, first(b, 0), first(f, 0), second(c), second(h)]
        steps = [rig.send_gpu(plain), rig.send_gpu(paired)]
        rig.gpu_done(steps[0], plain)
        behind = [rig.decode_ahead(g), rig.decode_ahead(e)]
        steps.append(rig.send_gpu(behind))
        rig.gpu_done(steps[1], paired)
        rig.gpu_done(steps[2], behind)
    rig.gpu_step([rig.decode(t) for t in (a, g, e)])  # no host row: as ever
    rig.gpu_step([first(b, 0), second(d)])  # nothing else
    assert reference.agrees(*cold, *warm)
    assert reference.tells(b, c, e, h)
    matter(reference, [a, c, h])
