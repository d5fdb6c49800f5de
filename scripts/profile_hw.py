"""Measures this machine and fits its settings: `python scripts/profile_hw.py [+hw=NAME] ...`."""

from dualpace.cli import profile_hw

if __name__ == "__main__":
    profile_hw()
