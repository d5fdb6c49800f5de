"""Speaks the engine's messages and computes nothing: every prompt is echoed, then its end token.

The prompt's first word may ask for more: `params ...` answers with the sampling parameters that
arrived, `slow ...` takes about 50 ms a token, `hang ...` never answers, `refuse ...` is refused,
`die ...` ends the process, `stall ...` gives three tokens and then none, `poison ...` is given up
after three, `until FILE` three tokens and the others once there is that file. `plan.model.source`
scripts the start: `fake`, `fake:FILE` (until there is that file), `fake:user-error`, `fake:crash`.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from byte_tokenizer import EOS
from likely import told

from dualpace.runtime import messages
from dualpace.runtime.connection import Connection
from dualpace.runtime.plan import Plan
from dualpace.runtime.process import become_child, receive
from dualpace.runtime.submissions import decode
from dualpace.runtime.wire import Message

GOES_ON, STOP, LENGTH = 0, 1, 2
ROUND_S = 0.0005
ROUNDS_OF_SLOW = 80


@dataclass
class Running:
    answer: list[int]
    max_tokens: int
    ignore_eos: bool
    kind: str
    stop_token_ids: list[int]
    prompt_len: int
    logprobs: int  # `messages.asks_for`
    num_output: int = 0

    def next_token(self) -> tuple[int, int]:
        if self.ignore_eos:
            token = self.answer[self.num_output % len(self.answer)]
        else:
            token = [*self.answer, EOS][self.num_output]
        self.num_output += 1
        if (token == EOS and not self.ignore_eos) or token in self.stop_token_ids:
            return token, STOP
        return token, LENGTH if self.num_output >= self.max_tokens else GOES_ON

    def is_due(self, round_number: int) -> bool:
        if self.kind == "slow":
            return round_number % ROUNDS_OF_SLOW == 0
        if self.num_output == 3 and self.kind == "until":
            return os.path.exists(bytes(self.answer[len("until ") :]))
        return self.kind != "hang" and (self.kind != "stall" or self.num_output < 3)


class FakeEngine:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.running: dict[int, Running] = {}
        self.cancelled = 0
        self.tokens = {"gpu": 0, "cpu": 0}
        self.cpu_worker = {"ready": True, "phase": "ready", "restarts": 0, "pids": []}
        self.wake = asyncio.Event()
        self.ended = asyncio.Event()
        self.link: Connection

    def on_message(self, message: Message) -> None:
        match message:
            case messages.Submit():
                for i, one in enumerate(decode(message)):
                    self.submit(message, i, one.rules.asked())
                self.wake.set()
            case messages.Cancel():
                for request_id in message.request_ids.tolist():
                    self.cancelled += self.running.pop(request_id, None) is not None
            case messages.AskStats():
                self.link.send(messages.Stats(json.dumps(self.stats())))
            case messages.Shutdown():
                self.ended.set()

    def submit(self, message: messages.Submit, i: int, rules: dict[str, Any]) -> None:
        prompt = message.tokens[message.offsets[i] : message.offsets[i + 1]].tolist()
        request_id = int(message.request_ids[i])
        kind = bytes(t for t in prompt if t < EOS).decode(errors="replace").split(" ")[0]
        if kind in ("refuse", "busy"):
            *_, blamed = rules.get("structure", ["prompt"])
            text = f"the {blamed} needs more memory than there is"
            self.link.send(messages.Refused(request_id, text, blamed, kind == "busy"))
            return
        if kind == "die":
            os._exit(3)
        if kind == "params":
            fields = ("max_tokens", "ignore_eos", "temperature", "top_k", "top_p", "seeds")
            seen = {name: round(float(getattr(message, name)[i]), 4) for name in fields}
            seen |= {"seeds": int(message.seeds[i]), "rules": rules}
            prompt = list(json.dumps(seen).encode())
        self.running[request_id] = Running(
            prompt,
            int(message.max_tokens[i]),
            bool(message.ignore_eos[i]),
            kind,
            rules.get("stop_token_ids", []),
            int(message.offsets[i + 1] - message.offsets[i]),
            int(message.logprobs[i]),
        )
        now_s = time.monotonic()
        ids, queued_s = np.array([request_id], np.int64), np.array([now_s])
        self.link.send(messages.Scheduled(ids, queued_s, now_s))

    async def rounds(self) -> None:
        number = 0
        while True:
            if not self.running:
                self.wake.clear()
                await self.wake.wait()
            await asyncio.sleep(ROUND_S)
            number += 1
            self.round(number)

    def round(self, number: int) -> None:
        for i, r in [*self.running.items()]:
            if r.kind == "poison" and r.num_output == 3:
                self.link.send(
                    messages.GivenUp(i, "the gpu worker is lost whenever it computes it")
                )
                del self.running[i]
        due = [(i, r) for i, r in self.running.items() if r.is_due(number)]
        if not due:
            return
        num_prompt_tokens = sum(r.prompt_len for _, r in due if not r.num_output)
        made = [(i, r.num_output % 2, *r.next_token()) for i, r in due]
        for request_id, engine, _, finished in made:
            self.tokens["cpu" if engine else "gpu"] += 1
            if finished:
                del self.running[request_id]
        ids, engines, tokens, finished = zip(*made, strict=True)
        asked = [r.logprobs for _, r in due]
        self.link.send(
            messages.Tokens(
                np.array(ids, np.int64),
                np.array(tokens, np.int32),
                np.array(engines, np.uint8),
                np.array(finished, np.uint8),
                time.monotonic(),
                num_prompt_tokens,
                *told(list(tokens), asked),
            )
        )

    def stats(self) -> dict[str, object]:
        count = len(self.running)
        return {
            "waiting": 0,
            "gpu_running": count,
            "cpu_waiting": 0,
            "cpu_running": 0,
            "copying": 0,
            "forming": 0,
            "gpu_blocks": {"capacity": 100, "used": count},
            "host_blocks": {"capacity": 200, "used": 0},
            "tokens": self.tokens,
            "rounds": {"gpu": 1, "cpu": 1},
            "rounds_lost": {"gpu": 2},
            "given_up": 1,
            "busy_s": {"gpu": 0.5, "cpu": 0.5},
            "routes": {"FULL_CPU": 1},
            "events": {"preempted": 2, "cancelled": self.cancelled},
            "transfers": 3,
            "blocks_checked": 5,
            "assist_calls": 0,
            "assist_s": {},
            "compiles_after_ready": 0,
            "workers": {
                "gpu": {"ready": True, "phase": "ready", "restarts": 0, "pids": [os.getpid()]},
                "cpu": self.cpu_worker,
            },
        }


async def until_there(file: str, ended: asyncio.Event) -> None:
    while not os.path.exists(file) and not ended.is_set():
        await asyncio.sleep(0.01)


async def serve(plan: Plan, sock: socket.socket) -> int:
    engine = FakeEngine(plan)
    engine.link = await Connection.open(sock, engine.on_message, engine.ended.set)
    script = plan.model.source.partition(":")[2]
    engine.link.send(messages.Phase("loading nothing"))
    if script.startswith("/"):
        await until_there(script, engine.ended)
    if script == "crash":
        os._exit(5)
    if script == "user-error":
        engine.link.send(messages.Failed("kv.host_blocks=9 is too much: lower it.", 1))
        await asyncio.sleep(0.05)
        return 1
    engine.link.send(messages.Ready("{}"))
    rounds = asyncio.create_task(engine.rounds())
    await engine.ended.wait()
    rounds.cancel()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    become_child(arguments.parent, ignore_signals=True)
    sock = socket.socket(fileno=arguments.lifeline)
    hello = receive(sock)
    assert isinstance(hello, messages.Hello)
    return asyncio.run(serve(Plan.from_json(hello.plan), sock))


if __name__ == "__main__":
    sys.exit(main())
