"""The CPU worker: decode iterations over host-resident rows, at its own pace.

Pre-layer, pre-attention and attention always run here; the route says where the rest does. An
iteration that loses its assist is given up and runs again later: writing the same K/V twice changes
nothing.
"""

import time
from collections.abc import Mapping

import torch

from dualpace.cpu.append import kv_append
from dualpace.graphs.backends.whole import ChainedLayers
from dualpace.graphs.executor import Stages
from dualpace.graphs.sampling import Drawn
from dualpace.runtime.assist import AssistLostError
from dualpace.runtime.messages import CpuBatch, StepDone, StepDropped
from dualpace.runtime.routing import ROUTES, Route
from dualpace.runtime.worker.attention import DecodeAttention
from dualpace.runtime.worker.drawn import on_host
from dualpace.runtime.worker.kv_pools import HostPool
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.routes import RouteRun
from dualpace.runtime.worker.rows import CpuWork, cpu_work


class CpuWorker:
    """`turn` waits for batches and runs them."""

    def __init__(
        self,
        link: Link,
        stages: Stages,
        pool: HostPool,
        attention: DecodeAttention,
        routes: Mapping[Route, RouteRun],
        max_rows: int,
    ) -> None:
        self._link = link
        self._stages = stages
        self._layers = pool.layers
        self._attention = attention
        self._routes = routes
        self._max_rows = max_rows
        self._chained = ChainedLayers(pool.layers, attention.decoder, attention.scale)

    def ready(self) -> None:
        """Makes what batches share, where their layers are chains."""
        self._chained.prepare(self._stages.tables(), self._max_rows)
        self._stages.ready()

    @torch.inference_mode()
    def turn(self) -> None:
        """Raises LifelineClosedError."""
        self._link.wait(block=True)
        for message in self._link.receive():
            assert isinstance(message, CpuBatch)
            try:
                self._iterate(cpu_work(message))
            except AssistLostError:
                self._link.send(StepDropped(message.step))

    def _iterate(self, work: CpuWork) -> None:
        started = time.monotonic()
        self._stages.begin_round()
        route = self._routes[ROUTES[work.route]]
        drawn = on_host(self._decode(work, route), work.sampling)
        duration = time.monotonic() - started
        compiles = self._stages.compiles_after_ready
        told = drawn.asking, drawn.logprobs
        self._link.send(StepDone(work.step, started, duration, drawn.tokens, compiles, *told))

    def _decode(self, work: CpuWork, route: RouteRun) -> Drawn:
        self._attention.begin(work.decodes)  # one plan for all layers
        slots = torch.from_numpy(work.decodes.slots)
        positions = torch.from_numpy(work.positions)
        x = self._stages.pre_layer(torch.from_numpy(work.token_ids))
        chained = self._chained.begin(self._stages.tables(), positions, slots)
        if chained is not None and chained.post is not None and route.runs_layers:
            return route.draw(chained.run(x), work.sampling)
        for layer, cache in enumerate(self._layers):
            attention = route.attention_out(x)
            if chained is not None:
                chained.attend(layer, x, attention)
            else:
                q, k, v = self._stages.pre_attention(layer, x, positions)
                kv_append(k, v, cache, slots)
                self._attention.run(layer, q, attention.view(q.shape))
            x = route.finish_layer(layer, attention, x)
        return route.draw(x, work.sampling)
