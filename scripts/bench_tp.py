"""Benchmarks tensor parallelism: `python scripts/bench_tp.py [key=value]`.

device=cpu: Gloo against shared memory, all-reduce at several row counts (threads=N a rank).
device=cuda: two GPUs against one: tokens and logits, sums over ranks, and the gain of every stage
(model=, layers=, sections=, processes= that compile). Says so and ends where there are fewer GPUs.
Both: ranks=N, limit_s=, out=FILE for the JSON that is also the last line.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dualpace.graphs.bench_ranks import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
