"""Benchmark stage graphs and their starts: `python scripts/bench_graphs.py --help`."""

from dualpace.graphs.bench import main

if __name__ == "__main__":
    main()
