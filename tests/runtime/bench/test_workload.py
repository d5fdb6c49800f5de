import json
import math
from pathlib import Path

import numpy as np
import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.bench.config import (
    AzureWorkloadConfig,
    FixedWorkloadConfig,
    LognormalWorkloadConfig,
    ShareGptWorkloadConfig,
)
from dualpace.runtime.bench.trace_files import seconds
from dualpace.runtime.bench.workload import load_workload, means, reshape

TRACES = Path(__file__).parents[4] / "shared/data/azure"
CONVERSATION = TRACES / "AzureLLMInferenceTrace_conv.csv"
CODE = TRACES / "AzureLLMInferenceTrace_code.csv"
needs_traces = pytest.mark.skipif(
    not CONVERSATION.is_file(), reason="the Azure traces are not beside the checkout"
)


def write_trace(path: Path, rows: list[str]) -> str:
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    return str(path)


@needs_traces
@pytest.mark.parametrize(
    ("path", "prompt", "output"), [(CONVERSATION, 1104.8, 264.9), (CODE, 1986.6, 29.5)]
)
def test_first_rows_of_the_traces_have_the_known_means(
    path: Path, prompt: float, output: float
) -> None:
    requests = load_workload(AzureWorkloadConfig(path=str(path), num_requests=2000))
    assert means(requests) == pytest.approx((prompt, output), abs=0.05)


@needs_traces
@pytest.mark.parametrize(
    ("path", "prompt", "output"), [(CONVERSATION, 1599, 114), (CODE, 2348, 22)]
)
def test_reshaped_traces_meet_the_asked_means_and_keep_the_shape(
    path: Path, prompt: float, output: float
) -> None:
    plain = load_workload(AzureWorkloadConfig(path=str(path), num_requests=2000))
    config = AzureWorkloadConfig(
        path=str(path), num_requests=2000, prompt_mean=prompt, output_mean=output
    )
    shaped = load_workload(config)
    assert means(shaped) == pytest.approx((prompt, output), abs=0.01)
    assert shaped == load_workload(config)
    before = np.array([r.prompt_len for r in plain])
    after = np.array([r.prompt_len for r in shaped])
    assert np.abs(after - before * prompt / before.mean()).max() <= 2


def test_both_spellings_of_the_azure_time_are_read(tmp_path: Path) -> None:
    assert seconds("2023-11-16 18:15:46.6805900") % 60 == pytest.approx(46.68059)
    assert seconds("2024-05-10 00:00:01+00:00") - seconds(
        "2024-05-10 00:00:00.009930+00:00"
    ) == pytest.approx(0.99007)
    path = write_trace(
        tmp_path / "t.csv",
        ["2024-05-10 00:00:00.500000+00:00,10,3", "2024-05-10 00:00:02.5+00:00,20,4"],
    )
    config = AzureWorkloadConfig(path=path, num_requests=2, arrival="trace")
    requests = load_workload(config)
    assert [r.arrival_s for r in requests] == pytest.approx([0.0, 2.0])
    config.rate = 4.0
    assert load_workload(config)[-1].arrival_s == pytest.approx(0.5)


def test_exponential_arrivals_are_normalised_to_the_rate_and_fixed_by_the_seed() -> None:
    config = FixedWorkloadConfig(num_requests=500, rate=2.5, seed=7)
    arrivals = [r.arrival_s for r in load_workload(config)]
    assert arrivals[-1] == pytest.approx(200.0)
    gaps = np.diff([0.0, *arrivals])
    drawn = np.random.default_rng(7).exponential(size=500)
    assert gaps == pytest.approx(drawn * 200.0 / drawn.sum())
    config.seed = 8
    assert arrivals != [r.arrival_s for r in load_workload(config)]


def test_infinite_rate_sends_all_at_once_and_constant_spaces_evenly() -> None:
    config = FixedWorkloadConfig(num_requests=4, rate=math.inf)
    assert [r.arrival_s for r in load_workload(config)] == [0.0] * 4
    config.rate, config.arrival = 2.0, "constant"
    assert [r.arrival_s for r in load_workload(config)] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_max_tokens_may_be_left_out() -> None:
    config = FixedWorkloadConfig(num_requests=2, output_len=9)
    assert [r.max_tokens for r in load_workload(config)] == [9, 9]
    config.max_tokens = "unset"
    assert [(r.max_tokens, r.output_len) for r in load_workload(config)] == [(None, 9)] * 2


def test_sharegpt_reads_lengths_and_conversations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = [
        {"prompt_len": 5, "output_len": 6},
        {"conversations": [{"value": "only one turn"}]},
        {"conversations": [{"value": "a question"}, {"value": ""}]},
        {"conversations": [{"value": "x" * 40}, {"value": "y" * 8}, {"value": "z"}]},
    ]
    (tmp_path / "s.json").write_text(json.dumps(items))
    config = ShareGptWorkloadConfig(path=str(tmp_path / "s.json"), num_requests=2)
    assert [(r.prompt_len, r.output_len) for r in load_workload(config)] == [(5, 6), (10, 2)]
    assert "conversations without two turns passed over: 2" in caplog.text


def test_lognormal_lengths_keep_their_median_and_ignore_the_arrival_rate() -> None:
    config = LognormalWorkloadConfig(num_requests=4000, prompt_median=500, prompt_sigma=0.5)
    requests = load_workload(config)
    assert np.median([r.prompt_len for r in requests]) == pytest.approx(500, rel=0.05)
    config.rate = 3.0
    assert [r.prompt_len for r in load_workload(config)] == [r.prompt_len for r in requests]


def test_reshaping_keeps_every_length_at_least_one() -> None:
    shaped = reshape(np.array([1, 1, 1, 1000]), 4.0)
    assert shaped.min() == 1 and shaped.mean() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rate": 0.0}, "workload.rate"),
        ({"num_requests": 0}, "num_requests"),
        ({"seed": -1}, "workload.seed=-1 must be at least 0"),
        ({"arrival": "sometimes"}, "arrival"),
        ({"max_tokens": "42"}, "max_tokens"),
        ({"output_mean": 0.5}, "output_mean"),
        ({"prompt_len": 0}, "workload.prompt_len=0 must be at least 1 token"),
        ({"output_len": -5}, "workload.output_len=-5"),
        ({"name": "nothing"}, "azure, fixed"),
        ({"arrival": "trace"}, "times"),
    ],
)
def test_impossible_values_are_refused_by_key(change: dict[str, object], words: str) -> None:
    config = FixedWorkloadConfig()
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(ConfigError, match=words):
        load_workload(config)


def test_a_trace_too_short_or_absent_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.csv", ["2023-11-16 18:15:46.6805900,10,3"])
    with pytest.raises(ConfigError, match="num_requests=2 is more than the 1"):
        load_workload(AzureWorkloadConfig(path=path, num_requests=2))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="not a file"):
        load_workload(AzureWorkloadConfig(path=str(tmp_path / "none.csv")))


HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = HEADER + b"2023-11-16 18:15:46.68,10,3\n"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            b"a,b\n1,2\n",
            " is no Azure trace: its first line has no column TIMESTAMP and no Context",
        ),
        (b"", " is no Azure trace: its first line has no column TIMESTAMP"),
        (b"\xff\x00", " is no Azure trace: it is no UTF-8 text."),
        (FIRST + b"2023-11-16 18:15:47,0,3", ', line 3: ContextTokens is "0": it must be a whole'),
        (FIRST + b"\n2023-11-16 18:15:47,1,-4", ', line 4: GeneratedTokens is "-4": it must be'),
        (FIRST + b"2023-11-16 18:15:47,abc,4", ', line 3: ContextTokens is "abc": it must be a'),
        (FIRST + b"2023-11-16 18:15:47,2.5,4", ', line 3: ContextTokens is "2.5": it must be a'),
        (FIRST + b"2023-11-16 18:15:47,1,nan", ', line 3: GeneratedTokens is "nan": it must be'),
        (FIRST + b"2023-11-16 18:15:47,1,1e99", ', line 3: GeneratedTokens is "1e99": it must'),
        (FIRST + b"2023-11-16 18:15:47,1", ", line 3: GeneratedTokens is missing: it must be a"),
        (FIRST + b"2023-11-16 18:15:47,1,2,3", ", line 3 has more values than the first line has"),
        (FIRST + b"yesterday,1,2", ', line 3: TIMESTAMP is "yesterday": it must be a time like 2'),
        (FIRST + b"2023-11-16 18:15:47nan,1,2", ', line 3: TIMESTAMP is "2023-11-16 18:15:47nan"'),
        (FIRST + b",1,2", ", line 3: TIMESTAMP is missing: it must be a time like"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(data: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as refusal:
        load_workload(AzureWorkloadConfig(path=str(path), num_requests=2))
    assert str(refusal.value).startswith(f"workload.path={path}{sentence}")


def test_whole_numbers_may_have_a_point_and_a_file_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + HEADER + b"2023-11-16 18:15:47,10.0,3")
    config = AzureWorkloadConfig(path=str(tmp_path / "t.csv"), num_requests=1)
    assert [(r.prompt_len, r.output_len) for r in load_workload(config)] == [(10, 3)]


def test_arrivals_as_in_a_trace_need_times_in_order(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:{second},10,3" for second in (46, 48, 47)]
    config = AzureWorkloadConfig(path=write_trace(tmp_path / "t.csv", rows), num_requests=3)
    assert len(load_workload(config)) == 3
    config.arrival = "trace"
    with pytest.raises(ConfigError, match="request 3 comes before the one before it"):
        load_workload(config)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", " is no JSON list of conversations or lengths: line 1, column 2: "),
        ('{"a": 1}', " is no JSON list of conversations or lengths: it holds something else."),
        ("[1]", ": [0] is 1: it must be an object with prompt_len"),
        ("[{}]", ": [0].conversations is missing: it must be a list of turns."),
        ('[{"prompt_len": 1}]', ": [0].output_len is missing: it must be a whole number of tokens"),
        ('[{"prompt_len": 0, "output_len": 1}]', ": [0].prompt_len is 0: it must be a whole"),
        ('[{"prompt_len": true, "output_len": 1}]', ": [0].prompt_len is true: it must be a"),
        ('[{"prompt_len": 1, "output_len": [2]}]', ": [0].output_len is [2]: it must be a"),
        ('[{"conversations": 3}]', ": [0].conversations is 3: it must be a list of turns."),
        ('[{"conversations": [1, 2]}]', ": [0].conversations[0].value is missing: it must be a t"),
        (
            '[{"conversations": [{"value": "x"}, {"value": 2}]}]',
            ": [0].conversations[1].value is 2",
        ),
    ],
)
def test_conversations_that_cannot_be_read_say_where(
    text: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_workload(ShareGptWorkloadConfig(path=str(path), num_requests=1))
    assert str(refusal.value).startswith(f"workload.path={path}{sentence}")
