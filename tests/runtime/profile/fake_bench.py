"""Stands for the benchmark in a process of its own: tokens/s grow with P; P = 7 cannot be served.

Counts its runs in a file beside the trace.
"""

import json
import sys
from pathlib import Path

options = dict(argument.split("=", 1) for argument in sys.argv[1:])
p = int(options["assist.post_attention_limit"])
with Path(options["trace"]).open("a") as runs:
    runs.write(f"{p}\n")
if p == 7:
    sys.exit("out of luck")
found = {
    "window_output_tokens_per_s": 100.0 + p,
    "window_requests_per_s": 1.0,
    "p99_itl_ms": 5.0,
    "stats": {"tokens": {"gpu": 30, "cpu": 10}},
}
print(json.dumps(found))
