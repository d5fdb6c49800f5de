"""What only a CUDA device runs: fused stages, attention, KV movement, CUDA graphs.

forward.py is the model as few, fused kernels; capture.py turns it into CUDA graphs; attention.py
chooses who attends; kv.py moves blocks. A worker puts them together. Nothing here knows requests.
"""
