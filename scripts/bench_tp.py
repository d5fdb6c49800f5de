"""Benchmarks tensor parallelism: `python scripts/bench_tp.py [key=value]`.

device=cpu: sums over ranks by Gloo and by shared memory, and dense stages in one process with all
cores against ranks with a share each (model=, layers=, dtype=, backend=, threads= of a rank,
sections=sums,layers).
device=cuda: two GPUs against one: tokens and logits, sums over ranks, and the gain of every stage
(model=, layers=, sections=, processes= that compile). Says so and ends where there are fewer GPUs.
Both: ranks=N, limit_s=, out=FILE for the JSON that is also the last line.

`python scripts/bench_tp.py iteration cpu.tp=2 [out=FILE] [override]`: whole decode iterations of
the CPU worker, one rank with all cores against several with a share each, by turns in one run.
Overrides as for scripts/profile_hw.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    if sys.argv[1:2] == ["iteration"]:
        from dualpace.runtime.profile.contest import main

        main(sys.argv[2:])
        sys.exit()
    from dualpace.graphs.bench_ranks import main as other_parts

    sys.exit(other_parts(sys.argv[1:], __doc__))
