"""What a scheduling round costs with both engines full: python scripts/bench_schedule.py"""

from dualpace.runtime.schedule.bench import main

if __name__ == "__main__":
    main()
