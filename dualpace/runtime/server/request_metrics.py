"""What /metrics says of requests, in vLLM's names and with its meaning: counters and histograms.

Time to the first token and of the whole are this front's; all between are the engine's own times,
which come with its tokens: of one monotonic clock, for a machine's processes share it.
"""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from dualpace.runtime.engine_client import RequestRefused, ShuttingDown
from dualpace.runtime.generation import Piece
from dualpace.runtime.token_stream import Admission

# Upper bounds of histograms: vLLM's, and some below its first.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_S = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_ROUND_TOKENS = tuple(2**n for n in (0, *range(3, 15)))
_ANSWERS = (1, 2, 5, 10, 20, 50, 128)
_REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class Asked:
    """One prompt, how many answers it asks for, and what has come of them."""

    prompt_len: int
    max_tokens: int  # of an answer, as clipped
    num_answers: int
    arrival_s: float  # of `time.monotonic()`
    num_ended: int = 0  # by themselves
    longest: int = 0  # tokens


class RequestMetrics:
    """Registers itself in `registry`; `labels` are those of every sample."""

    def __init__(
        self, registry: CollectorRegistry, labels: Mapping[str, str], max_context: int
    ) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, tuple(labels), registry=registry).labels(**labels)

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            made = Histogram(name, text, tuple(labels), registry=registry, buckets=bounds)
            return made.labels(**labels)

        lengths = _one_two_five(max_context)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Of prompts with a first token")
        self._generated = counter("vllm:generation_tokens", "Tokens sent to clients")
        names = (*labels, "finished_reason")
        ended = Counter(
            "vllm:request_success", "Answers by how they ended", names, registry=registry
        )
        self._ended = {
            reason: ended.labels(**labels, finished_reason=reason) for reason in _REASONS
        }
        self._first_s = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_S
        )
        self._between_s = histogram(
            "vllm:inter_token_latency_seconds", "From token to token", _BETWEEN_S
        )
        self._per_token_s = histogram(
            "vllm:request_time_per_output_token_seconds",
            "An answer's mean time a token after its first",
            _BETWEEN_S,
        )
        self._request_s = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token", _REQUEST_S
        )
        self._queue_s = histogram(
            "vllm:request_queue_time_seconds", "In the engine before its first round", _REQUEST_S
        )
        self._prefill_s = histogram(
            "vllm:request_prefill_time_seconds", "First round decided to first token", _REQUEST_S
        )
        self._decode_s = histogram(
            "vllm:request_decode_time_seconds", "First to last token", _REQUEST_S
        )
        self._inference_s = histogram(
            "vllm:request_inference_time_seconds", "First round decided to last token", _REQUEST_S
        )
        self._prompt_len = histogram("vllm:request_prompt_tokens", "Of its prompt", lengths)
        self._output_len = histogram("vllm:request_generation_tokens", "Of an answer", lengths)
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens", "That an answer may have", lengths
        )
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Of a prompt's longest answer", lengths
        )
        self._num_answers = histogram(
            "vllm:request_params_n", "Answers asked for to a prompt", _ANSWERS
        )
        self._round_tokens = histogram(
            "vllm:iteration_tokens_total",
            "Tokens of a round: output, and prompts with their first",
            _ROUND_TOKENS,
        )

    def count_round(self, num_tokens: int) -> None:
        self._round_tokens.observe(num_tokens)

    async def observe(
        self, pieces: AsyncGenerator[Piece, None], asked: Asked
    ) -> AsyncGenerator[Piece, None]:
        """Passes the pieces of one of its answers on, and counts them. An answer that is refused
        before it begins is none, as in vLLM: its client gets a 400 or 503."""
        answer: _Answer | None = None
        reason: str | None = "abort"
        try:
            async for piece in pieces:
                if answer is None:
                    answer = self._first_token(piece, asked)
                self._count_tokens(piece, answer)
                if piece.finish_reason is not None:
                    reason = piece.finish_reason
                    self._count_answer(answer, asked)
                yield piece
        except ShuttingDown:
            raise
        except RequestRefused:
            reason = None if answer is None else "error"
            raise
        except Exception:
            reason = "error"
            raise
        finally:
            await pieces.aclose()
            if reason is not None:
                self._ended[reason].inc()

    def _first_token(self, piece: Piece, asked: Asked) -> "_Answer":
        self._first_s.observe(time.monotonic() - asked.arrival_s)
        self._prompt_tokens.inc(asked.prompt_len)
        assert piece.admission is not None, "a token before any round was decided"
        return _Answer(piece.admission, piece.made_s[0], piece.made_s[0])

    def _count_tokens(self, piece: Piece, answer: "_Answer") -> None:
        new = piece.made_s if answer.num_tokens else piece.made_s[1:]
        for made_s in new:
            self._between_s.observe(made_s - answer.last_s)
            answer.last_s = made_s
        answer.num_tokens += len(piece.token_ids)
        self._generated.inc(len(piece.token_ids))

    def _count_answer(self, answer: "_Answer", asked: Asked) -> None:
        """It has ended by itself."""
        queued_s, scheduled_s = answer.admission.queued_s, answer.admission.scheduled_s
        first_s, last_s, num_tokens = answer.first_s, answer.last_s, answer.num_tokens
        self._request_s.observe(time.monotonic() - asked.arrival_s)
        self._queue_s.observe(scheduled_s - queued_s)
        self._prefill_s.observe(first_s - scheduled_s)
        self._decode_s.observe(last_s - first_s)
        self._inference_s.observe(last_s - scheduled_s)
        self._per_token_s.observe((last_s - first_s) / max(num_tokens - 1, 1))
        self._prompt_len.observe(asked.prompt_len)
        self._output_len.observe(num_tokens)
        self._max_tokens.observe(asked.max_tokens)
        asked.num_ended += 1
        asked.longest = max(asked.longest, num_tokens)
        if asked.num_ended == asked.num_answers:
            self._longest.observe(asked.longest)
            self._num_answers.observe(asked.num_answers)


@dataclass(slots=True)
class _Answer:
    """One that has its first token; times of the engine."""

    admission: Admission
    first_s: float
    last_s: float
    num_tokens: int = 0


def _one_two_five(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to `largest`."""
    steps = (step * 10**power for power in range(len(str(largest))) for step in (1, 2, 5))
    return [step for step in steps if step <= largest]
