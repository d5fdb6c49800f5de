"""When requests leave: open loop at scheduled times, or closed loop by concurrency.

In the open loop nothing that the server does delays a request, and every latency counts from the
scheduled time, also when this process was late itself (Tene's "coordinated omission"). Knows
nothing about configuration files, results or how servers start.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dualpace.errors import ConfigError
from dualpace.runtime.bench.client import Answer, Client, request_body
from dualpace.runtime.bench.metrics import RequestRecord
from dualpace.runtime.bench.workload import RequestSpec

SHAPES = ("linear", "exponential")


@dataclass(slots=True)
class Outcome:
    """What a run saw: one record a request in the order of `requests`, times from its start (s).

    `lag_s` is how much later than scheduled each request left this process. `wrong_lens` lists ids
    whose prompt or answer had another length than asked for.
    """

    records: list[RequestRecord]
    sent_s: list[float]
    start_s: float  # time.monotonic() of 0
    cpu_s: float  # of this process, while it ran
    wrong_lens: list[int] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        """When the last token came."""
        return max((r.token_times_s[-1] for r in self.records if r.token_times_s), default=0.0)

    @property
    def lag_s(self) -> list[float]:
        pairs = zip(self.sent_s, self.records, strict=True)
        return [sent - record.arrival_s for sent, record in pairs]


def ramped(
    requests: Sequence[RequestSpec], start: float, end: float, shape: str
) -> list[RequestSpec]:
    """The same requests under a rate that moves from `start` to `end` (1/s) over the whole run.

    Arrivals are warped so that the expected count up to each time is the integral of the rate, so
    exponential gaps stay exponential; n requests take n over the mean rate.
    """
    if shape not in SHAPES:
        raise ConfigError(f"bench.ramp_shape={shape} is unknown: use {' or '.join(SHAPES)}.")
    if not (0 < start < math.inf and 0 < end < math.inf):
        raise ConfigError(
            f"bench.ramp_from={start} and workload.rate={end} must both be finite rates above 0."
        )
    n, times = len(requests), np.array([r.arrival_s for r in requests])
    if n == 0 or times[-1] == 0:
        return list(requests)
    part = times / times[-1]  # of all requests, that have arrived
    if start == end:
        return [replace(r, arrival_s=p * n / end) for r, p in zip(requests, part, strict=True)]
    if shape == "linear":
        whole = 2 * n / (start + end)
        warped = (np.sqrt(start**2 + (end**2 - start**2) * part) - start) * whole / (end - start)
    else:
        growth = math.log(end / start)
        whole = n * growth / (end - start)
        warped = np.log1p(part * (end / start - 1)) * whole / growth
    return [replace(r, arrival_s=t) for r, t in zip(requests, warped.tolist(), strict=True)]


class Generator:
    """Puts requests to a server. Prompts are random token ids, the same for the same seed.

    `room` is the server's context in tokens, for requests that leave max_tokens out: they ask for
    all there is and hang up after `output_len` tokens, since a random model has no end of its own.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        vocab: int = 256,
        seed: int = 0,
        room: int = 32768,
        on_answer: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._client = client
        self._model = model
        self._vocab = vocab
        self._seed = seed
        self._room = room
        self._on_answer = on_answer

    async def warm_up(self, request: RequestSpec, count: int) -> None:
        """`count` times the like of `request`, a few at a time. ConfigError if none is answered."""
        bodies = [self._body(replace(request, id=-1 - i)) for i in range(count)]
        answers: list[Answer] = []
        for at in range(0, count, 4):
            part = bodies[at : at + 4]
            answers += await asyncio.gather(*(self._client.complete(body) for body in part))
        if answers and all(answer.error for answer in answers):
            raise ConfigError(
                f"The server at {self._client.url} answered no request before the run: "
                f"{answers[0].error}."
            )

    async def run(self, requests: Sequence[RequestSpec], concurrency: int | None = None) -> Outcome:
        """All requests, in order of arrival: at their times, or `concurrency` at once (closed loop,
        where a request's time is when it is sent)."""
        bodies = [self._body(request) for request in requests]  # no such work on the clock
        seen: dict[int, tuple[RequestRecord, Answer]] = {}
        cpu_s, start_s = time.process_time(), time.monotonic()

        async def send(request: RequestSpec, body: bytes) -> None:
            leave = request.output_len if request.max_tokens is None else None
            answer = await self._client.complete(body, leave)
            arrival_s = request.arrival_s if concurrency is None else answer.sent_s - start_s
            record = _record(request, arrival_s, answer, start_s)
            seen[request.id] = record, answer
            self._on_answer(record)

        work = zip(requests, bodies, strict=True)
        async with asyncio.TaskGroup() as tasks:
            if concurrency is None:
                for request, body in work:
                    await asyncio.sleep(start_s + request.arrival_s - time.monotonic())
                    tasks.create_task(send(request, body))
            else:
                for _ in range(min(concurrency, len(requests))):
                    tasks.create_task(_one_after_another(work, send))
        answers = [seen[request.id] for request in requests]
        return Outcome(
            records=[record for record, _ in answers],
            sent_s=[answer.sent_s - start_s for _, answer in answers],
            start_s=start_s,
            cpu_s=time.process_time() - cpu_s,
            wrong_lens=[r.id for r in requests if not _is_exact(r, seen[r.id][1])],
        )

    def _body(self, request: RequestSpec) -> bytes:
        rng = np.random.default_rng([self._seed, 2, request.id + 2**32])
        # The first few ids are often special.
        prompt = rng.integers(min(16, self._vocab // 2), self._vocab, request.prompt_len).tolist()
        limit = request.max_tokens or self._room - request.prompt_len
        return request_body(self._model, prompt, limit)


async def _one_after_another(
    work: Iterator[tuple[RequestSpec, bytes]],
    send: Callable[[RequestSpec, bytes], Coroutine[object, object, None]],
) -> None:
    """One client of a closed loop; all share `work`."""
    for request, body in work:
        await send(request, body)


def _record(
    request: RequestSpec, arrival_s: float, answer: Answer, start_s: float
) -> RequestRecord:
    return RequestRecord(
        request.id,
        arrival_s,
        request.prompt_len,
        [t - start_s for t in answer.token_times_s],
        answer.cpu_tokens,
        answer.error,
        answer.completion_tokens,
    )


def _is_exact(request: RequestSpec, answer: Answer) -> bool:
    """Both lengths are what was asked for, as far as the server says (a failure is no matter)."""
    if answer.error is not None or answer.completion_tokens is None:
        return True
    asked = request.prompt_len, request.output_len
    return (answer.prompt_tokens, answer.completion_tokens) == asked
