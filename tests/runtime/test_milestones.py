"""A prompt's first round and first token are told once, whatever becomes of it in between."""

from dualpace.runtime.engine.conversations import Conversation, open_conversation
from dualpace.runtime.engine.milestones import first_scheduled, prompt_tokens
from dualpace.runtime.logit_rules import LogitRules
from dualpace.runtime.schedule import GpuStep, State
from dualpace.runtime.submissions import Submitted
from tests.runtime.schedule.drive import make


class Engine:
    """A state with its conversations; says of each GPU round what the owner would be told."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.conversations: dict[int, Conversation] = {}
        self.preempted: list[int] = []

    def submit(self, request_id: int, prompt_len: int, max_tokens: int) -> Conversation:
        asked = Submitted(
            request_id, 0.0, [1] * prompt_len, max_tokens, False, 0.0, 0, 1.0, 0, LogitRules(), 0
        )
        made = open_conversation(asked, frozenset(), 0.0)
        self.conversations[request_id] = made
        self.state.add(made.request)
        return made

    def round(self) -> tuple[list[int], int]:
        """(whose first round was decided, tokens of prompts whose first token came)."""
        step = self.state.schedule_gpu()
        assert isinstance(step, GpuStep)
        self.preempted += step.preempted
        told = first_scheduled(step, self.conversations)
        counted = prompt_tokens(step, self.conversations)
        self.state.apply_gpu(step, [])
        return told.request_ids.tolist() if told else [], counted


def test_a_prompt_in_chunks_is_scheduled_with_its_first_and_counted_with_its_last() -> None:
    engine = Engine(make(policy="gpu_only", soft=20, hard=1024))
    engine.submit(0, 8, 9)
    engine.submit(1, 30, 9)
    assert engine.round() == ([0, 1], 8)
    assert engine.round() == ([], 30)
    assert engine.round() == ([], 0)


def test_one_that_is_computed_again_is_neither_scheduled_nor_counted_again() -> None:
    engine = Engine(make(gpu=4, policy="gpu_only"))
    engine.submit(0, 30, 20)
    engine.submit(1, 30, 20)
    assert engine.round() == ([0, 1], 60)
    while not engine.state.idle:
        assert engine.round() == ([], 0)
    assert engine.preempted == [1], "4 blocks do not hold both to their ends"


def test_the_owner_is_told_when_each_came_in_and_when_its_round_was_decided() -> None:
    engine = Engine(make())
    first, second = engine.submit(0, 8, 2), engine.submit(1, 8, 2)
    step = engine.state.schedule_gpu()
    assert step is not None
    told = first_scheduled(step, engine.conversations)
    assert told is not None and told.queued_s.tolist() == [first.queued_s, second.queued_s]
    assert first.queued_s <= second.queued_s <= told.scheduled_s


def test_a_prompt_whose_client_has_left_is_not_counted() -> None:
    engine = Engine(make())
    engine.submit(0, 8, 2)
    step = engine.state.schedule_gpu()
    assert step is not None
    del engine.conversations[0]
    assert prompt_tokens(step, engine.conversations) == 0
