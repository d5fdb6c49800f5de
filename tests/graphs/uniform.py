"""The uniform number of a seed and a position, in Python's integers."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """SplitMix64's finalizer of a counter; any integer seed, position >= 0."""
    return (_mix(_mix(seed & _MASK) + position * _GOLDEN & _MASK) >> 40) * 2.0**-24


def _mix(value: int) -> int:
    value = value + _GOLDEN & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
