"""Measures a server under a workload: `python scripts/bench.py [--multirun] [key=value ...]`."""

from dualpace.cli import bench

if __name__ == "__main__":
    bench()
