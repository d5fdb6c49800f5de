"""Serves one load under several thresholds, the profile's own among them, and ranks them:
`python scripts/bench_settings.py trace=FILE [key=value]`."""

from dualpace.runtime.profile.compare import main

if __name__ == "__main__":
    main()
