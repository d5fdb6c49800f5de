"""A short soak: whoever decodes changes the tier every few tokens, and nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualpace.runtime.schedule.check import check_log
from tests.e2e import soak
from tests.e2e.conftest import Rounds, Serve
from tests.runtime.worker.talks import Talk

if TYPE_CHECKING:
    from tests.e2e.judges import TinyJudge

VOCAB = 512
SIZES = {
    "kv.gpu_blocks": 28,
    "gpu.max_batch_size": 16,
    "gpu.token_limit": 256,
    "cpu.max_batch_size": 2,  # so few that marks leave HBM room for others
}


def undisturbed(model: TinyJudge, one: soak.Asked) -> list[int]:
    """By the model itself."""
    tokens, talk = list(one.prompt), Talk(0, one.prompt, rules=one.params.rules)
    for _ in range(one.params.max_tokens or 0):
        tokens.append(model.next_token(talk, tokens))
    return tokens[len(one.prompt) :]


def test_moves_every_few_tokens_change_no_token(
    serve: Serve, rounds: Rounds, tiny: TinyJudge
) -> None:
    some = soak.followed(4, VOCAB, max_tokens=20)
    answers = [undisturbed(tiny, one) for one in some]
    forced = [soak.following(one.prompt, a) for one, a in zip(some, answers, strict=True)]
    everyone = soak.spread(forced, soak.crowd(34, VOCAB))
    with serve(**soak.RESTLESS, **SIZES) as llm:
        everyone += soak.giants(llm, VOCAB)
        outputs = soak.run(llm, everyone, 20, print)
        soak.check(llm, everyone, outputs)
    assert check_log(rounds()) == []
    followed = [output for output in outputs if output.logprobs is not None]
    assert [output.token_ids for output in followed] == answers
    assert soak.Truth("random:tiny").relative_error(followed) < 1e-5
    tiny.check(outputs[1::3], [one.params for one in everyone[1::3]])
