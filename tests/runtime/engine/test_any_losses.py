"""Whatever policy, sizes and ranks there are, whoever is lost when and who leaves meanwhile: only
deadly requests are given up, all others have their very tokens, and every block comes back.
"""

import asyncio
import random
from dataclasses import dataclass

import numpy as np
import pytest

from dualpace.runtime import messages
from tests.runtime.engine.fake_workers import Batch, Engine, FakeHandle, answer, play

BY_OTHERS = (-9, 3)  # statuses: killed, and a rank that follows another
HOST_ROWS = (3, 4)  # kinds


@dataclass
class Trouble:
    """Rows that a worker does not survive, some only as decodes; and now and then a worker that is
    lost for no reason."""

    rng: random.Random
    deadly: dict[int, tuple[str, bool]]  # request -> (role, whether its prompt is survived)
    others_left: int = 4
    own_left: int = 0  # by its own fault; one that meets a suspect alone would accuse it

    def __call__(self, handle: FakeHandle, batch: Batch) -> str | int | None:
        if any(self._is_met(handle.role, batch, *each) for each in self.deadly.items()):
            return self.rng.choice(["no such row", -11])
        if self.rng.random() > 0.05:
            return None
        if self.own_left:
            self.own_left -= 1
            return "for no reason"
        self.others_left -= 1
        return self.rng.choice(BY_OTHERS) if self.others_left >= 0 else None

    def _is_met(self, role: str, batch: Batch, one: int, how: tuple[str, bool]) -> bool:
        (rows,) = np.nonzero(batch.request_ids == one)
        if role != how[0] or not len(rows):
            return False
        if isinstance(batch, messages.CpuBatch):
            return True
        row = int(rows[0])
        if role == "cpu":  # in lockstep it computes these alone
            return int(batch.kinds[row]) in HOST_ROWS
        return not how[1] or bool(batch.starts[row] and batch.num_tokens[row] == 1)


def settings(rng: random.Random) -> list[str]:
    policy = rng.choice(["dualpace", "gpu_only", "neo"])
    found = [f"policy={policy}", f"runtime.look_ahead={rng.choice(['true', 'false'])}"]
    for key, values in {
        "kv.gpu_blocks": (6, 9, 12, 30),
        "kv.host_blocks": (20, 64, 120),
        "gpu.max_batch_size": (3, 8),
        "cpu.max_batch_size": (1, 3, 8),
        "gpu.tp": (1, 1, 2),
        "cpu.tp": (1, 1, 2),
    }.items():
        found.append(f"{key}={rng.choice(values)}")
    return found


@pytest.mark.parametrize("seed", range(24))
def test_only_the_deadly_are_given_up(seed: int) -> None:
    rng = random.Random(seed)
    asked = [(i, rng.randint(3, 70), rng.randint(1, 40)) for i in range(rng.randint(1, 9))]
    chosen = [i for i, _, _ in asked if rng.random() < 0.2]
    deadly = {i: (rng.choice(["gpu", "cpu"]), rng.random() < 0.3) for i in chosen}
    left: set[int] = set()

    async def story(engine: Engine) -> None:
        await engine.until(lambda: engine._stats.is_ready)
        to_ask = asked.copy()
        while to_ask or engine.left:
            if to_ask and rng.random() < 0.2:
                engine.ask(to_ask[0][:1], *to_ask.pop(0)[1:])
            if engine.left and rng.random() < 0.01:
                left.add(one := rng.choice(sorted(engine.left)))
                engine.cancel(one)
            engine._state.check()
            await asyncio.sleep(0)
        await engine.until_idle()

    trouble = Trouble(random.Random(seed + 1), deadly, own_left=int(not deadly))
    engine = play(story, *settings(rng), fault=trouble)
    assert not engine.failure and set(engine.given_up) <= deadly.keys()
    for request_id, prompt_len, max_tokens in asked:
        whole, tokens = answer(request_id, prompt_len, max_tokens), engine.answers[request_id]
        ended_early = {*left, *engine.given_up, *engine.refused}
        assert tokens == (whole[: len(tokens)] if request_id in ended_early else whole)
