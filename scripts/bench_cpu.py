"""Benchmark the CPU kernels: `python scripts/bench_cpu.py --help`."""

import sys

from dualpace.cpu.bench import main

if __name__ == "__main__":
    sys.exit(main())
