"""The worker processes: they compute what the engine schedules, and decide nothing themselves."""
