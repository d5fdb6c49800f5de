"""What a request says: its tokens, and how the next one is sampled. Knows no queues or workers."""

import time
from array import array
from dataclasses import dataclass, field

from dualpace.block import blocks_for
from dualpace.runtime.engine.edits import Editor
from dualpace.runtime.engine.forms import FormRefused
from dualpace.runtime.engine.guides import Guide
from dualpace.runtime.messages import LENGTH, NOT_FINISHED, STOP, TOKEN_IN_FLIGHT
from dualpace.runtime.schedule.rounds import Row
from dualpace.runtime.submissions import Submitted
from dualpace.runtime.types import Request

STUCK = 3  # beside what `messages.Tokens` can say: the answer neither ends nor can go on


@dataclass(slots=True)
class Conversation:
    """A request's content: prompt and output tokens so far, and how to sample the next one."""

    request: Request
    tokens: list[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ends: frozenset[int]  # tokens that end the answer
    editor: Editor | None = None  # of its logits, where it asks for that
    logprobs: int = 0  # that it asks for: `messages.asks_for`
    queued_s: float = 0.0  # when the engine took it in; of `time.monotonic()`
    is_scheduled: bool = False  # a round with some of it has been decided

    table: "array[int]" = field(default_factory=lambda: array("i"))  # copy of `listed`
    listed: list[int] | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    def append(self, token: int) -> int:
        """Its next token; returns whether the answer ends with it, as `messages.Tokens` says it, or
        STUCK."""
        self.tokens.append(token)
        if token in self.ends:
            return STOP
        request = self.request
        is_full = len(self.tokens) - request.prompt_len >= request.max_tokens
        if is_full:
            return LENGTH
        if self.editor is None or self.editor.guide is None:
            return NOT_FINISHED
        return self._follow(self.editor, self.editor.guide, token)

    def _follow(self, editor: Editor, guide: Guide, token: int) -> int:
        follows = guide.follow(token)
        if not follows or guide.is_too_slow:  # drawn all the same if no logit was a number
            return STUCK
        if editor.can_go_on(len(self.tokens)):
            return NOT_FINISHED
        return STOP if guide.is_complete else STUCK

    @property
    def dead_end(self) -> tuple[str, str]:
        """Why it is STUCK, and which of its parameters is to blame."""
        assert self.editor is not None and self.editor.guide is not None
        assert self.editor.rules.structure is not None
        blamed = self.editor.rules.structure.asked_as
        why = (
            "it takes too long to follow, as it can be read in too many ways: make it simpler"
            if self.editor.guide.is_too_slow
            else "no other may come by it and the request's other parameters"
        )
        return f"{blamed}: after {self.num_output} tokens {why}.", blamed

    def keep_to(self, guide: Guide) -> None:
        """The form of its answer, before the first token. Raises FormRefused if there is none."""
        assert self.editor is not None and not self.num_output
        self.editor.guide = guide
        if not self.editor.can_go_on(len(self.tokens)):
            raise FormRefused("no token may begin the answer by it and the other parameters")

    def input_tokens(self, row: Row) -> list[int]:
        """Tokens at positions `row.start ...`; the one still being sampled is TOKEN_IN_FLIGHT."""
        known = self.tokens[row.start : row.start + row.num_tokens]
        if len(known) == row.num_tokens:
            return known
        return known + [TOKEN_IN_FLIGHT] * (row.num_tokens - len(known))

    def block_table(self, row: Row) -> "array[int]":
        """Ids of the row's blocks. Their list only grows, also for later steps, while the request
        stays in a pool; so only what is new is converted.
        """
        blocks, table = row.blocks, self.table
        if blocks is not self.listed:
            self.listed, self.table = blocks, array("i", blocks)
            table = self.table
        elif len(blocks) > len(table):
            table.extend(blocks[len(table) :])
        count = blocks_for(row.start + row.num_tokens)
        return table if count == len(table) else table[:count]


def open_conversation(asked: Submitted, eos: frozenset[int], start_s: float) -> Conversation:
    """With the scheduler's part of it. `start_s` is when the engine's own time begins."""
    rules = asked.rules
    # An answer that keeps to a form ends where that ends: nothing could follow.
    ends = frozenset[int]() if asked.ignore_eos and rules.structure is None else eos
    request = Request(
        id=asked.request_id,
        prompt_len=len(asked.prompt),
        max_tokens=asked.max_tokens,
        arrival_s=asked.arrival_s - start_s,
        needs_last_token=rules.needs_last_token,
    )
    return Conversation(
        request=request,
        tokens=asked.prompt,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=asked.seed,
        ends=ends.union(rules.stop_token_ids) if rules.stop_token_ids else ends,
        editor=Editor(rules, request.prompt_len, eos) if rules.edits_logits else None,
        logprobs=asked.logprobs,
        queued_s=time.monotonic(),
    )
