"""Says what this machine offers: `python scripts/doctor.py [+hw=NAME] [key=value ...]`."""

from dualpace.cli import doctor

if __name__ == "__main__":
    doctor()
