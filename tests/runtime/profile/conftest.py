"""Made-up results of sweeps, and a profile file of this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualpace.graphs.source import resolve_source
from dualpace.runtime.assist import AssistKind
from dualpace.settings.hardware import probe
from dualpace.settings.machine import fingerprint
from dualpace.settings.resolve import resolve
from dualpace.settings.schema import ServeConfig
from tests.tiny_settings import settings

SETTINGS = {
    "post_attention_limit": 48,
    "post_layer_limit": 40,
    "token_limit": 320,
    "cpu_batch_limit": 40,
}


def here(config: ServeConfig) -> dict[str, Any]:
    plan = resolve(config)
    return fingerprint(
        device=plan.gpu.device,
        dtype=plan.model.dtype,
        threads=(plan.gpu.threads, plan.cpu.threads),
        tp=(1, 1),
        spec=resolve_source(config.model.source).spec,
        hardware=probe(),
    )


@pytest.fixture
def write_profile(tmp_path: Path) -> Callable[..., str]:
    """A profile of this machine and the tiny model, with changed entries of the fingerprint."""

    def write(**changed: Any) -> str:
        found = {**here(settings()), **changed}
        file = tmp_path / "mine.yaml"
        file.write_text(
            yaml.safe_dump({"name": "mine", "fingerprint": found, "settings": SETTINGS})
        )
        return str(file)

    return write


def sampled(ms: float) -> dict[str, Any]:
    return {"ms": ms, "repeats_ms": [ms], "invocations": 1}


def result(kind: str, batch: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"point": {"kind": kind, "batch": batch}, "layers": 4, "values": values}


def machine(cpu_row_ms: float = 0.05, gpu_ms: float = 1.0) -> list[dict[str, Any]]:
    """A machine whose CPU takes time by rows, and whose GPU a fixed time."""
    found = []
    for batch in (1, 16, 64, 80):
        post = 0.2 + cpu_row_ms * batch
        names = {"post_attention": post, "post_layer": 2 * post, "pre_attention": post / 3}
        names |= {"write": 0.01, "read": 0.01, "write_final": 0.01}
        parts = {"wait": 0.1, "launch": 0.02, "h2d": 0.01, "compute": gpu_ms, "sampling": gpu_ms}
        parts |= {"d2h": 0.01, "finalize": 0.01}
        found.append(
            result(
                "route",
                batch,
                {
                    "samples": {name: sampled(ms) for name, ms in names.items()},
                    "assists": {k.name: {**sampled(gpu_ms), "parts": parts} for k in AssistKind},
                    "calls": [
                        {
                            "kind": int(kind),
                            "rows": batch,
                            "wait": gpu_ms + 0.3,
                            "device": gpu_ms,
                            "launch": 0.02,
                            "finalize": 0.01,
                        }
                        for kind in AssistKind
                    ],
                },
            )
        )
    beside = {"steps": 10, "alone_ms": 8.0, "beside_ms": 8.4, "assists": 10, "assist_ms": 1.0}
    found.append(result("beside", 64, {**beside, "loss": 0.4}))
    for batch in (1, 16, 64):
        contexts = [
            {
                "context": c,
                **sampled(1.0),
                "attention": sampled(batch * c / 1e5),
                "throughput": batch * 1e3 / (1 + c / 512),
            }
            for c in (64, 256)
        ]
        found.append(result("decode", batch, {"contexts": contexts}))
        steps = [{"context": c, **sampled(8.0 + batch * c / 1e4)} for c in (16, 512)]
        found.append(result("step", batch, {"contexts": steps}))
    for batch in (1, 4):
        lengths = [
            {"length": n, "tokens": batch * n, **sampled(4 * (2.0 + batch * n / 1e3))}
            for n in (16, 64, 256)
        ]
        for shape in lengths:
            shape["throughput"] = shape["tokens"] * 4 / shape["ms"] * 1e3
        found.append(result("prefill", batch, {"lengths": lengths}))
    swaps = {"bytes": 10**8, "swap_out": sampled(10.0), "swap_in": sampled(10.0)}
    return [*found, result("copies", 64, swaps)]
