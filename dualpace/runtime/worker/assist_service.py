"""The GPU worker's side of Dense Assist: one stage of a CPU-owned batch, run at a stage boundary
(paper 4.2).

It takes no KV, no queue and no ownership: tensors in, tensors or tokens out.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dualpace.graphs.executor import Stages
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.kv.overlaps import ALL, Overlap
from dualpace.runtime.messages import AssistDone
from dualpace.runtime.order import Decision, OrderLeader
from dualpace.runtime.worker.activations import Activations, sampling_like, sampling_rows
from dualpace.runtime.worker.link import Link


class AssistService:
    must_poll = False  # an assist has ended when `serve` returns
    are_expected = True  # a boundary costs nothing here

    def __init__(
        self,
        link: Link,
        stages: Stages,
        dtype: torch.dtype,
        device: torch.device,
        columns: Sequence[Overlap] = (ALL,),
        order: OrderLeader | None = None,
    ) -> None:
        """`columns`: where this rank's attention lies among what CPU ranks write. `order`: of the
        other ranks, which have to serve the same assist."""
        self._link = link
        self._stages = stages
        self._buffer = link.assist
        self._shared = Activations(link.assist, dtype)
        self._device = device
        self._columns = columns
        self._order = order

    def serve(self) -> bool:
        """Runs a ready assist, and says whether there was one."""
        taken = self._buffer.take()
        if taken is None:
            return False
        kind, layer, rows, epoch = taken
        started = time.monotonic()
        published = float(self._buffer.times[0])
        sampling = None
        if kind != AssistKind.POST_ATTENTION:
            sampling = sampling_rows(self._shared.sampling(rows), self._device)
        if self._order is not None:
            greedy = sampling is None or sampling.all_greedy
            needs_logits = sampling is not None and sampling.needs_logits
            self._order.say(Decision(kind, layer, rows, greedy, needs_logits))
        launched = time.monotonic()
        x = self._shared.residual[:rows].to(self._device)
        attention = self._attention(rows)
        moved_in = time.monotonic()
        if kind != AssistKind.POST_LAYER:
            x = self._stages.post_attention(layer, attention, x)
        computed = time.monotonic()
        drawn = self._stages.draw(x, sampling) if sampling is not None else None
        sampled = time.monotonic()
        if drawn is None:
            self._shared.residual[:rows].copy_(x)
        else:
            self._shared.write_drawn(drawn)
        moved_out = time.monotonic()
        self._buffer.finish(epoch, self._link.other_doorbell)
        self._link.send(
            AssistDone(
                kind_of_assist=kind,
                layer=layer,
                rows=rows,
                wait_s=started - published,
                launch_s=launched - started,
                h2d_s=moved_in - launched,
                compute_s=computed - moved_in,
                sampling_s=sampled - computed,
                d2h_s=moved_out - sampled,
                finalize_s=time.monotonic() - moved_out,
            )
        )
        return True

    def follow(self, decision: Decision) -> None:
        """This rank's part of what the first one serves, which answers."""
        rows, kind = decision.rows, AssistKind(decision.kind)
        x = self._shared.residual[:rows].to(self._device)
        if kind != AssistKind.POST_LAYER:
            x = self._stages.post_attention(decision.layer, self._attention(rows), x)
        if kind != AssistKind.POST_ATTENTION:
            self._stages.post_layer(x, sampling_rows(sampling_like(decision), self._device))

    def _attention(self, rows: int) -> Tensor:
        """[rows, columns of this rank's heads]."""
        parts = [
            self._shared.attention_parts[part.other][:rows, part.theirs].to(self._device)
            for part in self._columns
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
