"""The offline API: prompts in, texts out, through the same engine process that the server uses.

    with LLM("smollm2", kv={"gpu_blocks": 64}) as llm:
        for output in llm.generate(["Once", "Twice"], SamplingParams(max_tokens=32)):
            print(output.text)

A background thread runs the event loop that the engine's client needs; callers block.
"""

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dualpace.errors import ConfigError
from dualpace.runtime.engine_client import (
    ENGINE_MODULE,
    EngineClient,
    RequestGivenUp,
    StartFailed,
)
from dualpace.runtime.generation import (
    Tokenizer,
    check_prompt,
    encode_chat,
    encode_text,
    generate,
    load_tokenizer,
)
from dualpace.runtime.logprobs import TokenLogprobs
from dualpace.runtime.plan import Plan
from dualpace.runtime.prompts import as_conversations, as_prompts
from dualpace.runtime.sampling_params import InvalidParameter, SamplingParams
from dualpace.runtime.types import ENGINES

T = TypeVar("T")
Message = Mapping[str, Any]
Prompt = str | Sequence[int]  # text, or token ids

_EXIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was, by the model's own logits."""

    logprob: float  # natural logarithm of its probability
    rank: int  # 1: no token was likelier
    decoded_token: str  # U+FFFD where it is not whole characters


@dataclass(frozen=True, slots=True)
class Output:
    """One answer. `text` ends before a stop string; `token_ids` are all that were generated."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | error: a worker is lost whenever it computes this one
    tokens_by_engine: dict[str, int]  # who made them: gpu, cpu
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    # If asked for, of each token by id: of the one that was generated, and of the likeliest.
    logprobs: list[dict[int, Logprob]] | None = None


class LLM:
    """A model with both engines, in processes of its own. Close it, or leave it to the exit.

    `overrides` are settings as on the command line, with dotted names or a dict for a group:
    `policy="gpu_only"`, `kv={"gpu_blocks": 64}`, `**{"+hw": "rtx4090"}`. Construct it in the main
    thread: the engine ends with the thread that started it. Raises ConfigError for what cannot be
    served.
    """

    def __init__(self, model: str | None = None, **overrides: Any) -> None:
        from dualpace.settings.compose import load as load_config
        from dualpace.settings.overrides import as_overrides
        from dualpace.settings.resolve import resolve

        for key in overrides:
            if key.partition(".")[0] == "server":
                raise ConfigError(f"{key} has no effect on LLM, which serves nobody: leave it out.")
        if model is not None:
            overrides = {"model.source": model, **overrides}
        plan = resolve(load_config(*as_overrides(overrides)))
        self._start(plan, ENGINE_MODULE, load_tokenizer)

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        engine_module: str = ENGINE_MODULE,
        load: Callable[[str], Tokenizer] = load_tokenizer,
    ) -> Self:
        """An LLM for a plan that is resolved already."""
        llm = cls.__new__(cls)
        llm._start(plan, engine_module, load)
        return llm

    def _start(self, plan: Plan, engine_module: str, load: Callable[[str], Tokenizer]) -> None:
        self.plan = plan
        self._client = EngineClient.launch(plan, engine_module)
        self._loop = _LoopThread()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._client, self._loop, self._owner)
        try:
            self._loop.run(self._client.connect())
            self._tokenizer = load(plan.model.source)
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> None:
        with Console(stderr=True).status("starting") as status:
            self._client.on_phase = lambda text: status.update(text)
            try:
                self._loop.run(self._client.wait_ready())
            except StartFailed as error:
                raise (ConfigError(str(error)) if error.user_error else error) from None
            finally:
                self._client.on_phase = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """An output a prompt, in order; one string or one list of token ids is one prompt.

        `params` are for all prompts or one each. `progress` shows a bar; None: if stderr is a
        terminal. Raises ValueError for what can never run and EngineGone if the engine ends.
        """
        limit = self.plan.model.max_context
        encoded = [
            encode_text(self._tokenizer, prompt, limit) if isinstance(prompt, str) else prompt
            for prompt in as_prompts(prompts)
        ]
        return self._generate(encoded, params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """Like `generate`, for one conversation or several: lists of {"role", "content"}.
        `chat_template_kwargs` are variables of the model's template.
        """
        limit = self.plan.model.max_context
        encoded = [
            encode_chat(self._tokenizer, conversation, limit, chat_template_kwargs)
            for conversation in as_conversations(messages)
        ]
        return self._generate(encoded, params, progress)

    def stats(self) -> dict[str, Any]:
        """The engine's queues, pools and counters now."""
        self._check_open()
        return self._loop.run(self._client.stats(timeout_s=10))

    def close(self) -> None:
        """Ends the engine; what still runs is dropped. Closing again does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM is closed")
        if os.getpid() != self._owner:  # whose thread hears the engine
            raise RuntimeError(
                f"this LLM belongs to process {self._owner}, of which this one is a fork: ask "
                f"there, or make one here"
            )

    def _generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
    ) -> list[Output]:
        self._check_open()
        model = self.plan.model
        for number, prompt in enumerate(prompts):
            place = f"prompts[{number}]" if len(prompts) > 1 else "prompt"
            check_prompt(prompt, model.max_context, model.vocab, place)
        params = SamplingParams() if params is None else params
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        for one in each:
            if not isinstance(one, SamplingParams):
                raise InvalidParameter("params", f"params are SamplingParams, not {one!r}.")
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} sampling parameters.")
        for one in each:
            one.check_tokens(model.vocab, model.eos_token_ids)
        visible = sys.stderr.isatty() if progress is None else progress
        with _Bar(len(prompts), visible) as bar:
            return self._loop.run(self._answer_all(prompts, each, bar))

    async def _answer_all(
        self, prompts: list[list[int]], params: list[SamplingParams], bar: "_Bar"
    ) -> list[Output]:
        tasks = [
            asyncio.create_task(self._answer(prompt, each.seeded(), bar))
            for prompt, each in zip(prompts, params, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:  # one failed, or the caller pressed Ctrl-C
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, prompt: list[int], params: SamplingParams, bar: "_Bar") -> Output:
        texts: list[str] = []
        token_ids: list[int] = []
        told: list[TokenLogprobs] = []
        by_engine = dict.fromkeys(ENGINES, 0)
        reason = stop_reason = None
        pieces = generate(
            self._client, self._tokenizer, prompt, params, self.plan.model.max_context
        )
        try:
            async for piece in pieces:
                texts.append(piece.text)
                token_ids += piece.token_ids
                told += piece.logprobs
                for engine in piece.engines:
                    by_engine[ENGINES[engine]] += 1
                reason, stop_reason = piece.finish_reason, piece.stop_reason
                bar.tokens(len(piece.token_ids))
        except RequestGivenUp:
            reason = "error"  # of this answer alone
        assert reason is not None
        bar.prompt_done()
        best = params.logprobs
        logprobs = None if best is None else [self._logprobs(each, best) for each in told]
        text = "".join(texts)
        return Output(prompt, text, token_ids, reason, by_engine, stop_reason, logprobs)

    def _logprobs(self, told: TokenLogprobs, best: int) -> dict[int, Logprob]:
        """The generated token first, then the `best` likeliest."""

        def of(token_id: int, logprob: float, rank: int) -> Logprob:
            name = self._tokenizer.token_bytes(token_id).decode(errors="replace")
            return Logprob(logprob, rank, name)

        by_id = {told.token_id: of(told.token_id, told.logprob, told.rank)}
        for rank, (token_id, logprob) in enumerate(told.best[:best], start=1):
            by_id.setdefault(token_id, of(token_id, logprob, rank))
        return by_id


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Blocks for the result; Ctrl-C cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Bar:
    """Prompts done and tokens a second; drawn by rich, or not at all."""

    def __init__(self, total: int, visible: bool) -> None:
        self._progress = Progress(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not visible,
        )
        self._task = self._progress.add_task("prompts", total=total, rate=0.0)
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def tokens(self, count: int) -> None:
        self._num_tokens += count
        if not self._progress.disable:
            elapsed_s = self._progress.tasks[0].elapsed or 1.0
            self._progress.update(self._task, rate=self._num_tokens / elapsed_s)

    def prompt_done(self) -> None:
        self._progress.advance(self._task)


def _end(client: EngineClient, loop: _LoopThread, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork ends: the engine is not its own
    try:
        loop.run(client.close(), _EXIT_S)
    finally:
        client.kill()
        loop.stop()
