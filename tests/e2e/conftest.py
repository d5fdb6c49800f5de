"""A served model in float32 with its logs, and what the reference generates."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.servers import PATIENCE_S

Serve = Callable[..., AbstractContextManager[Any]]
Mortal = Callable[[dict[str, int]], dict[str, str]]


@dataclass(frozen=True)
class Judgement:
    """How far an answer is the reference's greedy one."""

    decided: int  # tokens that the reference decides; a tie of its best logits ends the comparison
    wrong: int | None  # place of the first token that is not the reference's
    logprobs: Any = field(repr=False, compare=False)  # [T, V], in the places of its tokens


class Judge:
    """Greedy decoding by transformers in float32, token by token.

    One forward over prompt and answer says what the reference would have generated: if each token
    is its choice after all those before, by induction the whole answer is.
    """

    def __init__(self, model: Any, tie: float = 1e-4) -> None:
        import torch

        torch.set_num_threads(1)  # as each worker has
        self._model = model
        self._tie = tie  # design.md, Graphs
        self._known: dict[tuple[int, ...], Judgement] = {}

    def __call__(self, prompt: list[int], tokens: list[int]) -> Judgement:
        key = (*prompt, -1, *tokens)
        if key not in self._known:
            self._known[key] = self._judge(prompt, tokens)
        return self._known[key]

    def _judge(self, prompt: list[int], tokens: list[int]) -> Judgement:
        import torch

        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.inference_mode():
            logits = self._model(ids).logits[0, len(prompt) - 1 :]
        best, logprobs = logits.topk(2), logits.log_softmax(-1)
        for place, token in enumerate(tokens):
            if best.values[place, 0] - best.values[place, 1] < self._tie:
                return Judgement(place, None, logprobs)
            if int(best.indices[place, 0]) != token:
                return Judgement(place, place, logprobs)
        return Judgement(len(tokens), None, logprobs)


def settled(llm: Any) -> dict[str, Any]:
    """The statistics once every block has come back: a copy may end after the last token."""
    deadline = time.monotonic() + PATIENCE_S
    while (stats := llm.stats())["gpu_blocks"]["used"] or stats["host_blocks"]["used"]:
        assert time.monotonic() < deadline, f"blocks are still held: {stats}"
        time.sleep(0.01)
    return dict(stats)


@pytest.fixture(scope="session")
def judge(hf_smollm2: Any) -> Judge:
    return Judge(hf_smollm2)


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`with serve(policy=..., **{"kv.gpu_blocks": 8}) as llm`; its logs are in `tmp_path` after."""
    from dualpace import LLM

    @contextmanager
    def run(model: str = "random:tiny", **overrides: Any) -> Iterator[Any]:
        settings = {
            "model.dtype": "float32",
            "compile.backend": "eager",
            "kv.host_blocks": 256,  # the default is gigabytes, which take seconds to map
            "runtime.round_log": str(tmp_path / "rounds.jsonl"),
            "runtime.request_log": str(tmp_path / "requests.json"),
            **overrides,
        }
        with LLM(model, **settings) as llm:
            yield llm

    return run


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mortal:
    """`mortal({"gpu-0": 40})`: settings under which that rank dies with its 40th batch, once."""

    def order(last_batches: dict[str, int]) -> dict[str, str]:
        monkeypatch.setenv("MORTAL_WORKERS", str(tmp_path))
        for worker, last_batch in last_batches.items():
            (tmp_path / worker).write_text(str(last_batch))
        return {"runtime.worker_module": "tests.e2e.mortal_worker"}

    return order


@pytest.fixture(scope="session")
def undisturbed() -> list[list[int]]:
    """The crowd's answers by an engine with room for everything, one clock and no faults."""
    from dualpace import LLM
    from tests.e2e.crowd import PARAMS, PROMPTS

    settings = {
        "model.dtype": "float32",
        "compile.backend": "eager",
        "kv.gpu_blocks": 512,
        "kv.host_blocks": 64,
    }
    with LLM("random:tiny", **settings) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture
def rounds(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """The round log, complete once the model has been closed."""

    def read() -> list[dict[str, Any]]:
        lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return read
