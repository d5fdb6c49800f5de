"""The GPU worker's side of Dense Assist: one stage of a CPU-owned batch, run at a stage boundary
(paper 4.2).

It takes no KV, no queue and no ownership: tensors in, tensors or tokens out.
"""

import time

import torch

from dualpace.graphs.executor import Stages
from dualpace.runtime.assist import AssistKind
from dualpace.runtime.messages import AssistDone
from dualpace.runtime.worker.activations import Activations, sampling_rows
from dualpace.runtime.worker.link import Link


class AssistService:
    must_poll = False  # an assist has ended when `serve` returns

    def __init__(
        self, link: Link, stages: Stages, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._link = link
        self._stages = stages
        self._buffer = link.assist
        self._shared = Activations(link.assist, dtype)
        self._device = device

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
        launched = time.monotonic()
        x = self._shared.residual[:rows].to(self._device)
        attention = self._shared.attention[:rows].to(self._device)
        moved_in = time.monotonic()
        if kind != AssistKind.POST_LAYER:
            x = self._stages.post_attention(layer, attention, x)
        computed = time.monotonic()
        tokens = self._stages.post_layer(x, sampling) if sampling is not None else None
        sampled = time.monotonic()
        if tokens is None:
            self._shared.result[:rows].copy_(x)
        else:
            self._buffer.tokens[:rows] = tokens.cpu().numpy()
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
