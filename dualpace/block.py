"""The one size that kernels, pools and schedulers agree on. Imports nobody."""

BLOCK_TOKENS = 16
"""Tokens in one KV block, on both tiers."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens of one request."""
    return -(-num_tokens // BLOCK_TOKENS)
