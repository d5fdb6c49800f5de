"""What the engine's work on a round costs with both tiers full: python scripts/bench_schedule.py"""

from dualpace.runtime.engine.bench import main

if __name__ == "__main__":
    main()
