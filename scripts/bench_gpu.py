"""Checks and times the GPU library on this device: `python scripts/bench_gpu.py [key=value]`.

Llama-3.1-8B's shape with random weights. Correctness comes first; then decode steps in both forms
against the byte floor and vLLM's, prefill, swaps. Ends with one JSON line, also written to
`out=FILE`. Keys: out, cache (folder of measured tables), sections (comma-separated), layers,
attention, processes (that compile).

    python scripts/bench_gpu.py sections=products,decode_steps layers=4 out=FILE
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import torch

from dualpace.options import key_values, sentences, several, whole

# Functions, by their modules in dualpace.graphs.gpu.bench, which want what a GPU has (Triton).
SECTIONS = {
    "ceilings": "copies",
    "products": "decode",
    "attention_cuts": "decode",
    "correctness": "checks",
    "decode_steps": "decode",
    "stage_sums": "decode",
    "prefill": "prefill",
    "swaps": "copies",
    "inductor": "decode",
}
KEYS = ("out", "cache", "sections", "layers", "attention", "processes")


@torch.inference_mode()
def main() -> None:
    options = key_values(sys.argv[1:], __doc__, KEYS)
    with sentences():
        names = several(options, "sections", SECTIONS)
        for key in ("layers", "processes"):
            whole(options, key, 1)
    if not torch.cuda.is_available():
        sys.exit("bench_gpu.py needs a GPU that torch can use, and none is here.")
    from dualpace.graphs.gpu import attention
    from dualpace.graphs.gpu.bench.setting import CUDA, Bench

    with sentences():
        attention.choose(torch.bfloat16, options.get("attention", "auto"))
    began = time.perf_counter()
    bench = Bench(options)
    bench.note("device", torch.cuda.get_device_name(CUDA))
    bench.note("attention", f"{bench.choice.name}: {bench.choice.reason}")
    bench.note("setup_s", round(time.perf_counter() - began, 1))
    failed = []
    for name in names:
        began = time.perf_counter()
        try:
            module = import_module(f"dualpace.graphs.gpu.bench.{SECTIONS[name]}")
            getattr(module, name)(bench)
        except Exception:  # the other sections are worth their device time
            traceback.print_exc()
            failed.append(name)
        torch.cuda.synchronize()
        print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)
    bench.note("failed", failed)
    line = json.dumps(bench.result, default=str)
    if "out" in options:
        Path(options["out"]).write_text(line + "\n")
    print(line)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
