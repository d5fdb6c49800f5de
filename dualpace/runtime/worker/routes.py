"""Where a CPU batch's post-attention and post-layer run: here, or on the GPU worker by Dense Assist
(Equation 5).

One class a route, all with the same two methods; the residual stays wherever the route wants it
between layers.
"""

from typing import Protocol

import torch
from torch import Tensor

from dualpace.graphs.collective import Collective
from dualpace.graphs.executor import Stages
from dualpace.graphs.sampling import Drawn
from dualpace.runtime.assist import AssistKind, AssistLostError
from dualpace.runtime.worker.activations import Activations, sampling_rows
from dualpace.runtime.worker.link import Link
from dualpace.runtime.worker.rows import SamplingArrays


class RouteRun(Protocol):
    """`attention_out` is where layer's attention goes ([B, N * D]); `finish_layer` does the rest of
    a layer, and `draw` what follows the last one. `runs_layers`: whether all of every layer runs
    here.
    """

    runs_layers: bool

    def attention_out(self, x: Tensor) -> Tensor: ...

    def finish_layer(self, layer: int, attention: Tensor, x: Tensor) -> Tensor: ...

    def draw(self, x: Tensor, sampling: SamplingArrays) -> Drawn: ...


class AssistClient:
    """Publishes a batch's tensors and waits. Raises AssistLostError when the GPU worker was lost
    meanwhile, LifelineClosedError when this one shall end.
    """

    def __init__(self, link: Link, dtype: torch.dtype) -> None:
        self._link = link
        self._buffer = link.assist
        self.shared = Activations(link.assist, dtype, link.rank)

    def write(self, x: Tensor, sampling: SamplingArrays | None = None) -> None:
        """The residual [B, H], if it is not there already, and how to sample where that follows."""
        if x.data_ptr() != self.shared.residual.data_ptr():
            self.shared.residual[: len(x)] = x
        if sampling is not None:
            self.shared.write_sampling(sampling)

    def ask(self, kind: AssistKind, layer: int, num_rows: int) -> None:
        """Returns when the result is in the buffer; `release` after reading it."""
        self._buffer.publish(kind, layer, num_rows, self._link.other_doorbell)
        while not self._buffer.is_done():
            self._link.wait(block=True)

    def release(self) -> None:
        self._buffer.release()

    def drawn(self, sampling: SamplingArrays) -> Drawn:
        """What the finished assist has drawn by `sampling`, copied out."""
        return self.shared.drawn(sampling)


class GroupAssistClient(AssistClient):
    """Of one rank of several: the first one asks for all. Each has written its heads' attention."""

    def __init__(self, link: Link, dtype: torch.dtype, collective: Collective) -> None:
        super().__init__(link, dtype)
        self._collective = collective
        self._is_first = collective.rank == 0

    def write(self, x: Tensor, sampling: SamplingArrays | None = None) -> None:
        if self._is_first:  # x is the same on every rank
            super().write(x, sampling)

    def ask(self, kind: AssistKind, layer: int, num_rows: int) -> None:
        """All ranks go on or all give up: one that saw the result might see the loss of its sender
        before another has seen the result.
        """
        self._collective.barrier()
        was_lost = torch.zeros(1)
        if self._is_first:
            try:
                super().ask(kind, layer, num_rows)
            except AssistLostError:
                was_lost[0] = 1
        if self._collective.all_reduce(was_lost).item():
            raise AssistLostError

    def release(self) -> None:
        if self._is_first:
            super().release()


def assist_client(link: Link, dtype: torch.dtype, collective: Collective | None) -> AssistClient:
    """For a group of one (no collective) or of several ranks."""
    if collective is None:
        return AssistClient(link, dtype)
    return GroupAssistClient(link, dtype, collective)


class FullCpu:
    """Everything here."""

    runs_layers = True

    def __init__(self, stages: Stages, attention_width: int) -> None:
        self._stages = stages
        self._attention_width = attention_width

    def attention_out(self, x: Tensor) -> Tensor:
        """Cut from as many rows as the next stage computes, which then need not copy it."""
        rows = self._stages.bucket(len(x))
        return x.new_empty(rows, self._attention_width)[: len(x)]

    def finish_layer(self, layer: int, attention: Tensor, x: Tensor) -> Tensor:
        return self._stages.post_attention(layer, attention, x)

    def draw(self, x: Tensor, sampling: SamplingArrays) -> Drawn:
        return self._stages.draw(x, sampling_rows(sampling))


class SplitFinal(FullCpu):
    """Layers here, one assist for the post-layer."""

    def __init__(self, stages: Stages, attention_width: int, client: AssistClient) -> None:
        super().__init__(stages, attention_width)
        self._client = client

    def draw(self, x: Tensor, sampling: SamplingArrays) -> Drawn:
        self._client.write(x, sampling)
        self._client.ask(AssistKind.POST_LAYER, 0, len(x))
        drawn = self._client.drawn(sampling)
        self._client.release()
        return drawn


class FusedAssist:
    """An assist a layer; the last one runs the post-layer too. Attention is written straight into
    the buffer, and from the first assist on the residual stays there.
    """

    runs_layers = False

    def __init__(self, client: AssistClient, num_layers: int) -> None:
        self._client = client
        self._last_layer = num_layers - 1

    def attention_out(self, x: Tensor) -> Tensor:
        return self._client.shared.attention[: len(x)]

    def finish_layer(self, layer: int, attention: Tensor, x: Tensor) -> Tensor:
        """The last layer's rest waits for `draw`."""
        if layer == self._last_layer:
            return x
        self._client.write(x)
        self._client.ask(AssistKind.POST_ATTENTION, layer, len(x))
        self._client.release()
        return self._client.shared.residual[: len(x)]

    def draw(self, x: Tensor, sampling: SamplingArrays) -> Drawn:
        self._client.write(x, sampling)
        self._client.ask(AssistKind.POST_ATTENTION_FINAL, self._last_layer, len(x))
        drawn = self._client.drawn(sampling)
        self._client.release()
        return drawn
