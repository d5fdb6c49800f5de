"""Requests come to the engine as they were asked for."""

from dualpace.runtime.logit_rules import LogitRules
from dualpace.runtime.messages import Submit
from dualpace.runtime.sampling_params import SamplingParams
from dualpace.runtime.structured import StructuredOutputsParams
from dualpace.runtime.submissions import Submission, decode, encode
from dualpace.runtime.wire import decode as read


def test_each_request_of_a_message_arrives_with_its_own_prompt_and_parameters() -> None:
    plain = SamplingParams(temperature=0, top_k=-1, max_tokens=None, seed=-5)
    other = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, seed=2**63 - 1, max_tokens=3, ignore_eos=True,
        logit_bias={4: -100.0}, presence_penalty=1.5, stop_token_ids=[9],
    )  # fmt: skip
    batch = [Submission(1, 1.5, [5], plain), Submission(2, 2.5, [6, 7], other)]
    message = read(bytes(encode(batch).encode()))
    assert isinstance(message, Submit)
    first, second = decode(message)
    assert (first.request_id, first.arrival_s, first.prompt) == (1, 1.5, [5])
    assert (first.temperature, first.top_k, first.top_p, first.seed) == (0, 0, 1, -5)
    assert first.max_tokens == 2**31 - 1 and not first.ignore_eos
    assert first.rules == LogitRules()
    assert (second.request_id, second.arrival_s, second.prompt) == (2, 2.5, [6, 7])
    assert (second.temperature, second.top_k, second.top_p) == (0.5, 7, 0.25)
    assert (second.seed, second.max_tokens, second.ignore_eos) == (2**63 - 1, 3, True)
    assert second.rules == other.rules and second.rules.logit_bias == {4: -100.0}


def test_answers_that_ask_the_same_say_it_once() -> None:
    form = StructuredOutputsParams(regex="a" * 1000)
    same = SamplingParams(structured_outputs=form, logit_bias={4: 1.0})
    bare, other = SamplingParams(), SamplingParams(min_p=0.5)
    asked = [bare, *[same] * 3, other, bare, same]
    batch = [Submission(i, 0.0, [5], one.seeded(i)) for i, one in enumerate(asked)]
    message = read(bytes(encode(batch).encode()))
    assert isinstance(message, Submit) and len(message.rules) < 2500
    assert [one.rules for one in decode(message)] == [one.rules for one in asked]


def test_a_temperature_too_little_to_divide_by_takes_the_best_token() -> None:
    params = [SamplingParams(temperature=t, seed=0) for t in (1e-45, 1e-5, 1e-3)]
    batch = [Submission(i, 0.0, [5], one) for i, one in enumerate(params)]
    message = read(bytes(encode(batch).encode()))
    assert isinstance(message, Submit)
    assert message.temperature.tolist()[:2] == [0, 0] and message.temperature[2] > 0
