"""What runs: model spec, weights, stages, sampling, graph cache. Knows nothing about requests."""
