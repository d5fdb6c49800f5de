"""Saturates the engine with a trace's lengths, no HTTP: `python scripts/bench_engine.py trace=FILE
[key=value]`."""

from dualpace.runtime.bench.offline import main

if __name__ == "__main__":
    main()
