"""Bookkeeping of KV memory: which physical blocks are taken, and how a pool is laid out. No
tensors.
"""

from dualpace.runtime.kv.layout import KvLayout
from dualpace.runtime.kv.pool import BlockPool

__all__ = ["BlockPool", "KvLayout"]
