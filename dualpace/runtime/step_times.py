"""What whole steps will take, from a profile: curves by size, and nothing else. Knows no requests,
devices or files.

The same curves serve the live engine, which reads them from the plan, and the simulator, which
samples them from its cost model.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[Sequence[float]]  # (size, value), sizes rising, two or more


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight between its points, along its last piece beyond them, level before the first."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, size: float) -> float:
        sizes, values = self.sizes, self.values
        if size <= sizes[0]:
            return values[0]
        i = min(bisect_left(sizes, size), len(sizes) - 1)
        slope = (values[i] - values[i - 1]) / (sizes[i] - sizes[i - 1])
        return values[i - 1] + slope * (size - sizes[i - 1])


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step of all layers; rows are decode rows, KV tokens are summed over them."""

    gpu_dense: Curve  # by rows: a GPU round of decodes without its attention
    gpu_attention: Curve  # by KV tokens
    cpu_dense: Curve  # by rows: a CPU iteration as it is routed, without attention and waits
    cpu_attention: Curve  # by KV tokens
    cpu_alone: Curve  # by rows: as `cpu_dense`, with every stage on the CPU
    cpu_wait: Curve  # by rows: its waits for boundaries, as a share of the GPU round beside it
    assist: Curve  # by rows: GPU time that the assists of an iteration take
    prefill: Curve  # by tokens: a GPU round of one prompt

    @classmethod
    def from_points(cls, points: Mapping[str, Points]) -> "StepTimes":
        """KeyError or ValueError if a curve is missing or none."""
        curves = {}
        for name in cls.__slots__:
            sizes, values = zip(*points[name], strict=True)
            if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} needs two or more points, sizes rising")
            curves[name] = Curve(tuple(map(float, sizes)), tuple(map(float, values)))
        return cls(**curves)

    def points(self) -> dict[str, list[list[float]]]:
        """What `from_points` reads, as plain lists for a file."""
        curves = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: [[size, value] for size, value in zip(c.sizes, c.values, strict=True)]
            for name, c in curves.items()
        }

    def gpu_decode_s(self, rows: int, kv_tokens: float) -> float:
        """A GPU round of decodes alone."""
        return self.gpu_dense(rows) + (self.gpu_attention(kv_tokens) if kv_tokens else 0.0)

    def cpu_decode_s(
        self, rows: int, kv_tokens: float, gpu_round_s: float, assisted: bool = True
    ) -> float:
        """A CPU iteration beside GPU rounds of that length, as it is routed or with no assist."""
        attention_s = self.cpu_attention(kv_tokens) if kv_tokens else 0.0
        if not assisted:
            return self.cpu_alone(rows) + attention_s
        return self.cpu_dense(rows) + attention_s + self.cpu_wait(rows) * gpu_round_s

    def assist_pays(self, rows: int, gpu_rows: int, gpu_round_s: float) -> bool:
        """Whether the assists of so many rows take no longer from the GPU than so many tokens of
        its own do, in rounds of `gpu_rows`."""
        return self.assist(rows) * gpu_rows <= rows * gpu_round_s
