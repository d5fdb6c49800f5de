"""Draws the paper's figures: `python scripts/plot.py results=[FOLDER] out=FOLDER`."""

from dualpace.cli import plot

if __name__ == "__main__":
    plot()
