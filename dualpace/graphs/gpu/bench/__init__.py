"""Checks and timings of the GPU library on the device at hand; scripts/bench_gpu.py runs them."""
