"""An engine's hand on two workers that run as threads here, with real shared memory."""

import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dualpace.runtime import messages as m
from dualpace.runtime.assist import AssistBuffer
from dualpace.runtime.channel import Channel
from dualpace.runtime.engine.edits import encode_edits
from dualpace.runtime.lockstep import LockstepBuffer
from dualpace.runtime.logprobs import by_place
from dualpace.runtime.plan import Plan
from dualpace.runtime.routing import Route
from dualpace.runtime.shared_memory import SharedRegion
from dualpace.runtime.types import RowKind
from dualpace.runtime.wire import U8, Message
from dualpace.runtime.wiring import assist_layout, channel_size, kv_layout, lockstep_layout
from dualpace.runtime.worker import build
from dualpace.runtime.worker.copies import CopyEngine, CopyJob
from dualpace.runtime.worker.link import LifelineClosedError, Link
from dualpace.runtime.worker.progress import Progress
from tests.runtime.worker.talks import Talk
from tests.servers import PATIENCE_S

GPU_BLOCKS, HOST_BLOCKS = 40, 48
LAYERS = 5  # staging buffers are used again from the third on


class HeldCopies(CopyEngine):
    """Keeps every copy until it is let go."""

    def __init__(self, doorbell: int) -> None:
        super().__init__(doorbell)
        self.held: list[CopyJob] = []
        self.holding = True
        self._changed = threading.Condition()

    def dispatch(self, job: CopyJob) -> None:
        with self._changed:
            if self.holding:
                self.held.append(job)
            else:
                super().dispatch(job)
            self._changed.notify_all()

    def wait_held(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.held) >= count, PATIENCE_S)

    def release(self, count: int | None = None, last_first: bool = False) -> None:
        """Lets `count` held copies run, or all of them and all to come."""
        with self._changed:
            self.holding = self.holding and count is not None
            jobs = self.held[::-1] if last_first else list(self.held)
            for job in jobs[:count]:
                self.held.remove(job)
                super().dispatch(job)


class WildCopies(CopyEngine):
    """Late and out of order: each copy waits a moment on a thread of its own."""

    def __init__(self, doorbell: int) -> None:
        super().__init__(doorbell)
        self._random = random.Random(3)

    def dispatch(self, job: CopyJob) -> None:
        delay = self._random.uniform(0, 0.01)
        threading.Timer(delay, super().dispatch, [job]).start()


class Peer:
    """One worker: its channel, and the thread that runs it."""

    def __init__(self, plan: Plan, role: str) -> None:
        self.channel = Channel.create(role, channel_size(plan, role))
        self.ours, self.theirs = socket.socketpair()
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._seen: deque[Message] = deque()

    def start(self, worker: build.Worker) -> None:
        def work() -> None:
            torch.set_num_threads(1)
            try:
                while True:
                    worker.turn()
            except LifelineClosedError:
                pass
            except BaseException as error:  # shown by the next look at this worker
                self.error = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def expect(self, kind: type[Message]) -> Message:
        """The next message of this kind; others are kept."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if (message := self._look(kind)) is not None:
                return message
            time.sleep(0.001)
        raise AssertionError(f"no {kind.__name__}")

    def silent(self, kind: type[Message], seconds: float = 0.15) -> bool:
        """Whether no message of this kind comes for a while."""
        time.sleep(seconds)
        return self._look(kind) is None

    def _look(self, kind: type[Message]) -> Message | None:
        self._seen.extend(self.channel.up.take())
        if self.error is not None:
            raise self.error
        for message in self._seen:
            if isinstance(message, kind):
                self._seen.remove(message)
                return message
        return None

    def close(self) -> None:
        self.ours.close()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()
        self.theirs.close()
        self.channel.close()


@dataclass
class Row:
    talk: Talk
    kind: int
    start: int
    tokens: list[int]
    sample: bool = True
    transfer_id: int = -1


class Rig:
    """Both workers and the blocks of both pools."""

    def __init__(self, plan: Plan, copies: Callable[[int], CopyEngine], start_gpu: bool) -> None:
        self.plan = plan
        self.host_region = SharedRegion.create(
            "host pool", kv_layout(plan).host_bytes(plan.kv.host_pool_blocks)
        )
        layout = assist_layout(plan)
        self.assist_region = SharedRegion.create("assist", layout.nbytes)
        self.assist = AssistBuffer(self.assist_region, layout)
        self.lockstep_region: SharedRegion | None = None
        if plan.policy.lockstep:
            nbytes = lockstep_layout(plan).nbytes
            self.lockstep_region = SharedRegion.create("lockstep", nbytes)
        self.gpu, self.cpu = Peer(plan, "gpu"), Peer(plan, "cpu")
        self._steps = 0
        mix = random.Random(1)
        self.free = {"gpu": list(range(1, GPU_BLOCKS)), "host": list(range(1, HOST_BLOCKS))}
        for blocks in self.free.values():
            mix.shuffle(blocks)
        self.progress = {role: Progress(lambda text: None) for role in ("gpu", "cpu")}
        links = {
            "gpu": self._link(self.gpu, self.cpu),
            "cpu": self._link(self.cpu, self.gpu),
        }

        self.copies: CopyEngine | None = None  # a GPU has streams instead

        def make_copies(doorbell: int) -> CopyEngine:
            self.copies = copies(doorbell)
            return self.copies

        self.gpu_worker = build.build_accelerator(
            plan, links["gpu"], self.progress["gpu"], make_copies
        )
        self.cpu_worker = build.build_cpu(plan, links["cpu"], self.progress["cpu"])
        self.gpu_worker.ready()
        self.cpu_worker.ready()
        if start_gpu:
            self.gpu.start(self.gpu_worker)
        self.cpu.start(self.cpu_worker)

    def _link(self, peer: Peer, other: Peer) -> Link:
        assist = AssistBuffer(self.assist_region, self.assist.layout)
        host, bells = self.host_region.view, [other.channel.bell_down]
        lockstep = None
        if self.lockstep_region is not None:
            lockstep = LockstepBuffer(self.lockstep_region, lockstep_layout(self.plan))
        return Link(peer.channel, peer.theirs, assist, host, bells, lockstep)

    def close(self) -> None:
        if isinstance(self.copies, HeldCopies):
            self.copies.release()
        self.gpu.close()
        self.cpu.close()
        if self.copies is not None:
            self.copies.close()

    # ---- blocks

    def grow(self, talk: Talk, pool: str, num_tokens: int) -> None:
        while len(talk.blocks) * 16 < num_tokens:
            talk.blocks.append(self.free[pool].pop())

    def take(self, pool: str, count: int) -> list[int]:
        return [self.free[pool].pop() for _ in range(count)]

    # ---- rows

    @staticmethod
    def prefill(talk: Talk, kind: int = RowKind.PREFILL_GPU, transfer_id: int = -1) -> Row:
        """The whole text so far: a prompt, or a recompute."""
        return Row(talk, kind, 0, list(talk.tokens), True, transfer_id)

    @staticmethod
    def piece(talk: Talk, start: int, end: int) -> Row:
        return Row(talk, RowKind.PREFILL_GPU, start, talk.tokens[start:end], end == talk.prompt_len)

    @staticmethod
    def decode(talk: Talk) -> Row:
        return Row(talk, RowKind.DECODE, len(talk.tokens) - 1, talk.tokens[-1:])

    @staticmethod
    def decode_ahead(talk: Talk) -> Row:
        """Its input is what the step in flight samples."""
        return Row(talk, RowKind.DECODE, len(talk.tokens), [m.TOKEN_IN_FLIGHT])

    @staticmethod
    def host(talk: Talk, place: int) -> Row:
        """A decode of a host-resident request in lockstep, in sub-batch `place`."""
        return Row(talk, RowKind.HOST_FIRST + place, len(talk.tokens) - 1, talk.tokens[-1:])

    # ---- steps

    def send_gpu(
        self, rows: Sequence[Row] = (), migrations: Sequence[tuple[int, int, list, list]] = ()
    ) -> int:
        """Migrations are (id, kind, source blocks, target blocks). Grows the rows' blocks. Host
        rows come last, by place.
        """
        self._steps += 1
        for row in rows:
            pool = "host" if row.kind >= RowKind.PREFILL_CPU else "gpu"
            self.grow(row.talk, pool, row.start + len(row.tokens))
        talks = [row.talk for row in rows]
        batch = m.GpuBatch(
            step=self._steps,
            epoch=0,
            request_ids=np.array([t.id for t in talks], np.int64),
            kinds=np.array([row.kind for row in rows], np.uint8),
            starts=np.array([row.start for row in rows], np.int32),
            num_tokens=np.array([len(row.tokens) for row in rows], np.int32),
            sample=np.array([row.sample for row in rows], np.uint8),
            transfer_ids=np.array([row.transfer_id for row in rows], np.int64),
            token_ids=np.array([t for row in rows for t in row.tokens], np.int32),
            block_offsets=_offsets([t.blocks for t in talks]),
            blocks=np.array([b for t in talks for b in t.blocks], np.int32),
            temperature=np.array([t.temperature for t in talks], np.float32),
            top_k=np.zeros(len(rows), np.int32),
            top_p=np.ones(len(rows), np.float32),
            uniform=np.array(
                [t.uniform_at(r.start + len(r.tokens)) for t, r in zip(talks, rows, strict=True)],
                np.float32,
            ),
            migration_ids=np.array([x[0] for x in migrations], np.int64),
            migration_kinds=np.array([x[1] for x in migrations], np.uint8),
            migration_offsets=_offsets([x[2] for x in migrations]),
            source_blocks=np.array([b for x in migrations for b in x[2]], np.int32),
            target_blocks=np.array([b for x in migrations for b in x[3]], np.int32),
            edits=_edits([(r.talk, r.start + len(r.tokens), r.sample) for r in rows]),
            logprobs=_asked(talks),
        )
        if any(row.kind >= RowKind.HOST_FIRST for row in rows):
            self.cpu.channel.send_down(batch)
        self.gpu.channel.send_down(batch)
        return self._steps

    def gpu_done(self, step: int, rows: Sequence[Row] = ()) -> m.StepDone:
        """Waits for the step and appends its tokens to the rows' requests."""
        return self._done(self.gpu, step, [row.talk for row in rows])

    def gpu_step(self, rows: Sequence[Row] = (), migrations: Sequence[tuple] = ()) -> m.StepDone:
        return self.gpu_done(self.send_gpu(rows, migrations), rows)

    def send_cpu(self, talks: Sequence[Talk], route: Route = Route.FULL_CPU) -> int:
        self._steps += 1
        for talk in talks:
            self.grow(talk, "host", len(talk.tokens))
        self.cpu.channel.send_down(
            m.CpuBatch(
                step=self._steps,
                route=tuple(Route).index(route),
                request_ids=np.array([t.id for t in talks], np.int64),
                token_ids=np.array([t.tokens[-1] for t in talks], np.int32),
                starts=np.array([len(t.tokens) - 1 for t in talks], np.int32),
                block_offsets=_offsets([t.blocks for t in talks]),
                blocks=np.array([b for t in talks for b in t.blocks], np.int32),
                temperature=np.array([t.temperature for t in talks], np.float32),
                top_k=np.zeros(len(talks), np.int32),
                top_p=np.ones(len(talks), np.float32),
                uniform=np.array([t.uniform for t in talks], np.float32),
                edits=_edits([(t, len(t.tokens), True) for t in talks]),
                logprobs=_asked(talks),
            )
        )
        return self._steps

    def cpu_step(self, talks: Sequence[Talk], route: Route = Route.FULL_CPU) -> m.StepDone:
        return self._done(self.cpu, self.send_cpu(talks, route), talks)

    def _done(self, peer: Peer, step: int, talks: Sequence[Talk]) -> m.StepDone:
        done = peer.expect(m.StepDone)
        assert isinstance(done, m.StepDone) and done.step == step
        assert done.compiles_after_ready == 0
        told = by_place(done)
        for place, (talk, token) in enumerate(zip(talks, done.tokens.tolist(), strict=bool(talks))):
            if token >= 0:
                talk.tokens.append(token)
                if talk.logprobs is not None:
                    talk.told.append(told.pop(place))
        assert not told, "somebody is told who has not asked"
        return done

    def transfer_done(self, *ids: int) -> None:
        """Waits until all of these have been reported."""
        waiting = set(ids)
        while waiting:
            done = self.gpu.expect(m.TransfersDone)
            assert isinstance(done, m.TransfersDone)
            assert waiting.issuperset(done.transfer_ids.tolist())
            waiting -= set(done.transfer_ids.tolist())


def _edits(rows: Sequence[tuple[Talk, int, bool]]) -> U8:
    """Of rows by talk, position to be sampled, and whether it is."""
    for talk, _, _ in rows:
        talk.catch_up()
    due = [
        (place, position, talk.editor, talk.tokens)
        for place, (talk, position, sample) in enumerate(rows)
        if sample and talk.editor.is_due(position)
    ]
    return encode_edits(due)


def _asked(talks: Sequence[Talk]) -> U8:
    """Also of rows that are a piece of a prompt, which are told nothing."""
    asked = [m.asks_for(talk.logprobs) for talk in talks]
    return np.array(asked, np.uint8) if any(asked) else m.no_bytes()


def _offsets(lists: Sequence[Sequence[int]]) -> np.ndarray:
    return np.cumsum([0, *map(len, lists)]).astype(np.int32)
