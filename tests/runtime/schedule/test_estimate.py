"""Output estimates and the envelope's arithmetic."""

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.schedule import HostEnvelope, make_estimator
from dualpace.runtime.schedule.envelope import migration_reserve
from dualpace.runtime.schedule.estimate import Quantile
from dualpace.runtime.schedule.view import finish_peak
from dualpace.runtime.types import Phase, Request
from tests.runtime.schedule.drive import add, gpu, make


def test_declared_takes_max_tokens() -> None:
    estimator = make_estimator("declared")
    estimator.observe(3)
    assert estimator.estimate(0, 5000) == estimator.outgrown(10, 5000) == 5000 and estimator.exact


def test_quantile_starts_at_256_until_32_have_finished() -> None:
    estimator = make_estimator("quantile")
    for output in range(1, 32):
        estimator.observe(output)
    assert estimator.estimate(0, 5000) == 256 and estimator.estimate(0, 100) == 100
    estimator.observe(32)
    assert estimator.estimate(0, 5000) == 29, "0.9 of 1..32"
    assert estimator.estimate(0, 20) == 20


def test_whoever_outgrows_it_gets_the_quantile_of_longer_outputs_and_a_block_at_least() -> None:
    estimator = Quantile(warmup=4)
    for output in (10, 10, 10, 100, 200, 300):
        estimator.observe(output)
    assert estimator.estimate(0, 5000) == 300
    assert estimator.outgrown(150, 5000) == 300
    assert estimator.outgrown(295, 5000) == 295 + 16, "one block more than it has"
    assert estimator.outgrown(300, 5000) == 316, "nobody was longer"
    assert estimator.outgrown(300, 310) == 310
    assert estimator.estimate(295, 5000) == 300 and estimator.estimate(300, 5000) == 316


def test_only_recent_outputs_count() -> None:
    estimator = Quantile(warmup=1, window=3)
    for output in (500, 1, 2, 3):
        estimator.observe(output)
    assert estimator.estimate(0, 5000) == 3


def test_unknown_estimates_are_refused() -> None:
    with pytest.raises(ConfigError, match="declared, quantile"):
        make_estimator("oracle")


def test_a_request_past_its_estimate_grows_from_free_blocks_and_gets_all_its_tokens() -> None:
    state = make(gpu=8, host=8, estimator=Quantile(first=4))
    request = add(state, 0, 16, 80)
    peaks = set()
    while not state.idle:
        gpu(state)
        peaks.add(request.peak_blocks)
    assert request.num_output == 80 and max(peaks) == 6 and len(peaks) > 2


def test_finish_peak_is_never_below_what_is_held_or_needed_next() -> None:
    request = Request(0, prompt_len=16, max_tokens=100)
    assert finish_peak(request, 1) == 1 and finish_peak(request, 17) == 2
    request.phase, request.kv_len, request.num_output = Phase.DECODING, 48, 33
    request.blocks = [1, 2, 3]
    assert finish_peak(request, 20) == 4


def test_equation_2() -> None:
    assert HostEnvelope(10, used=4, planned=2, growth=3, migration=1).holds
    assert HostEnvelope(10, used=4, planned=2, growth=3, migration=2).slack == -1


def test_equation_4_scans_from_the_tail_until_the_rest_fits() -> None:
    queue = [Request(i, 1, 1, peak_blocks=peak) for i, peak in enumerate((5, 4, 3, 2))]
    tail_first = list(reversed(queue))
    assert migration_reserve(tail_first, 14, 14) == 0
    assert migration_reserve(tail_first, 14, 13) == 2
    assert migration_reserve(tail_first, 14, 11) == 5
    assert migration_reserve(tail_first, 14, 5) == 9
    assert migration_reserve(tail_first, 14, 1) == 14
    assert migration_reserve(tail_first[:2], 14, 1) == 5, "the others cannot be evicted"
