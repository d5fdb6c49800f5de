"""Simulates a policy on a machine: `python scripts/simulate.py [--multirun] [key=value ...]`."""

from dualpace.cli import simulate

if __name__ == "__main__":
    simulate()
