"""Who runs what, when: engines, schedulers, workers, server."""
