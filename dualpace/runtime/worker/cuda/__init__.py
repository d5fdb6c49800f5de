"""The accelerator worker's parts on a CUDA device: what the stand-in does at once is queued here.

Knows the library of `graphs.gpu` and the worker's interfaces; nothing here is imported elsewhere.
"""
