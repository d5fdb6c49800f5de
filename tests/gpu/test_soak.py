"""A soak on a device, in bf16: decodes change the tier every few tokens, no moved block is another
afterwards, and what the model says stays as near to float32 as it was.

It tells how far it is; `-k random` or `-k smollm2` runs one of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dualpace import LLM
from dualpace.errors import ConfigError
from dualpace.graphs.source import resolve_source
from dualpace.graphs.tokenizer import load_tokenizer
from dualpace.runtime.schedule.check import check_log, read_lines
from tests.e2e import soak
from tests.gpu.test_worker import CONFIG

PROSE = Path(__file__).parents[1] / "data" / "prose.txt"
SIZES: dict[str, Any] = {
    "gpu.device": "cuda",
    "model.dtype": "bf16",
    "compile.backend": "eager",
    "gpu.max_batch_size": 64,
    "gpu.token_limit": 1024,
    "gpu.max_batched_tokens": 4096,
    "cpu.max_batch_size": 16,
    "cpu.max_waiting": 64,
    # CPU batches of up to 4, up to 8 and more rows take one route each.
    "assist.post_attention_limit": 8,
    "assist.post_layer_limit": 4,
    "kv.host_blocks": 2048,
}
ROOMY, TIGHT = 2048, 160  # blocks of HBM: for all, and for a third of a wave
WAVE = 125


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    return say


@contextmanager
def serving(source: str, say: Callable[[str], None], **overrides: Any) -> Iterator[LLM]:
    began = time.monotonic()
    with LLM(source, **SIZES, **overrides) as llm:
        say(f"\nready after {time.monotonic() - began:.1f} s")
        yield llm


@contextmanager
def all_cores() -> Iterator[None]:
    """For a plain forward, when no engine runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


def run(
    source: str,
    some: list[soak.Asked],
    others: list[soak.Asked],
    log: Path,
    say: Callable[[str], None],
) -> tuple[list[Any], list[Any]]:
    """What the undisturbed engine says to `some`, and what it says to them amid `others` while they
    move."""
    with serving(source, say, policy="gpu_only", **{"kv.gpu_blocks": ROOMY}) as llm:
        answers = llm.generate([o.prompt for o in some], [o.params for o in some], progress=False)
    tight = {**soak.RESTLESS, "kv.gpu_blocks": TIGHT, "runtime.round_log": str(log)}
    forced = [soak.following(a.prompt_token_ids, a.token_ids) for a in answers]
    everyone = soak.spread(forced, others)
    with serving(source, say, **tight) as llm:
        everyone += soak.giants(llm, CONFIG["vocab_size"])
        outputs = soak.run(llm, everyone, WAVE, say)
        stats = soak.check(llm, everyone, outputs)
    assert check_log(read_lines(log)) == []
    followed = [output for output in outputs if output.logprobs is not None]
    assert [o.token_ids for o in followed] == [a.token_ids for a in answers]
    say(f"routes {stats['routes']}, {stats['transfers']} copies, {stats['blocks_checked']} blocks")
    return answers, followed


def test_two_thousand_requests_of_a_random_model(
    tmp_path: Path, say: Callable[[str], None]
) -> None:
    """Logits are within 3 % of float32, along the undisturbed tokens, moved or not."""
    path, vocab = tmp_path / "config.json", CONFIG["vocab_size"]
    path.write_text(json.dumps({**CONFIG, "max_position_embeddings": 4096}))
    source, some = f"random:{path}", soak.followed(64, vocab, max_tokens=32)
    others = soak.crowd(2000 - len(some), vocab)
    answers, followed = run(source, some, others, tmp_path / "rounds.jsonl", say)
    with all_cores():
        truth = soak.Truth(source)
        errors = [truth.relative_error(outputs) for outputs in (answers, followed)]
    say(f"relative error: undisturbed {errors[0]:.4f}, moved {errors[1]:.4f}")
    assert max(errors) < 0.03


def test_smollm2_is_as_near_to_float32_as_a_plain_forward_in_bf16(
    tmp_path: Path, say: Callable[[str], None]
) -> None:
    """Its best tokens agree at most half a point less, and KL is at most 1.2 times as large, over
    15,360 positions that follow prose."""
    try:
        packaged = resolve_source("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    ids = load_tokenizer(packaged).encode(PROSE.read_text())
    count, length, outputs = 256, 48, 60
    step = (len(ids) - length) // count
    params = replace(soak.NO_TOKEN_TWICE, max_tokens=outputs)
    some = [soak.Asked(ids[at : at + length], params) for at in range(0, step * count, step)]
    others = soak.crowd(100, CONFIG["vocab_size"])
    answers, followed = run("smollm2", some, others, tmp_path / "rounds.jsonl", say)
    with all_cores():
        truth = soak.Truth("smollm2", torch.bfloat16)
        for name, (told, plain) in zip(
            ("undisturbed", "moved"), truth.judge(answers, followed), strict=True
        ):
            say(f"{name}: {told}; a plain forward: {plain}")
            assert told.agree >= plain.agree - 0.005 * plain.positions
            assert told.divergence <= 1.2 * plain.divergence
