"""Engines in float32 with their logs, and who judges what they say."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dualpace import LLM
from tests.e2e.live import Workers, orderly_workers, slow_workers
from tests.servers import PATIENCE_S

if TYPE_CHECKING:
    from tests.e2e.judges import Judge, TinyJudge

Record = dict[str, Any]
Serve = Callable[..., AbstractContextManager[LLM]]
Rounds = Callable[[], list[Record]]


@pytest.fixture(scope="session")
def judge(hf_smollm2: Any) -> "Judge":
    from tests.e2e.judges import Judge

    return Judge(hf_smollm2)


@pytest.fixture(scope="session")
def tiny() -> "TinyJudge":
    from tests.e2e.judges import TinyJudge

    return TinyJudge()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with orderly_workers(tmp_path) as workers:
        yield workers


@contextmanager
def serving(folder: Path, model: str = "random:tiny", **overrides: Any) -> Iterator[LLM]:
    """Its round log is in the folder."""
    settings = {
        "model.dtype": "float32",
        "compile.backend": "eager",
        "kv.host_blocks": 256,  # the default is gigabytes, which take seconds to map
        "runtime.round_log": str(folder / "rounds.jsonl"),
        **slow_workers(),
        **overrides,
    }
    with LLM(model, **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def no_memory_left() -> Iterator[None]:
    """A server that asks for it is gone without a trace before the module's end."""
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + PATIENCE_S
    while left := set(os.listdir("/dev/shm")) - before:  # of others' too, who end theirs
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def read_rounds(folder: Path) -> list[Record]:
    """The round log, complete whenever the engine is idle."""
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`with serve(policy=..., **{"kv.gpu_blocks": 8}) as llm`."""
    return lambda *model, **overrides: serving(tmp_path, *model, **overrides)


@pytest.fixture
def rounds(tmp_path: Path) -> Rounds:
    return lambda: read_rounds(tmp_path)
