"""Requests that HBM has no room for all at once, and settings that make each policy move them."""

from typing import Any

from dualpace import SamplingParams

PROMPTS = [[i + 1] * (5 + 7 * i) for i in range(14)]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)
TIGHT: dict[str, dict[str, Any]] = {
    # Every post-attention is assisted: both engines and both workers matter.
    "dualpace": {
        "kv.gpu_blocks": 30,
        "cpu.max_batch_size": 4,
        "assist.post_attention_limit": 0,
        "assist.post_layer_limit": 0,
    },
    # HBM for about two requests; `launch_ms` below 0 makes the predictor say that all CPU attention
    # hides, so that many host rows run beside the GPU's.
    "neo": {
        "policy": "neo",
        "policy.launch_ms": -1000.0,
        "kv.gpu_blocks": 12,
        "kv.host_blocks": 400,
        "kv.output_estimate": "declared",
    },
}
