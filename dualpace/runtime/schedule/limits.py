"""The budgets of a round and what they say about the longest request. Knows no queues."""

from dataclasses import dataclass

from dualpace.block import BLOCK_TOKENS
from dualpace.errors import ConfigError


class RequestTooLong(ValueError):
    """A request that no round could ever run: the server answers 400 with this sentence."""


def context_limit(gpu_capacity: int, host_capacity: int, host_prompt: int) -> int:
    """Tokens of KV that one request may reach. Capacities are usable blocks, the host's if requests
    decode there without HBM, else 0; `host_prompt` is the longest prefill for the host.

    Any prefill may have to be repeated with all outputs so far: in HBM in chunks, to the host in
    one forward. A request with `prompt_len + max_tokens - 1 <= context_limit` always finishes.
    """
    return max(gpu_capacity * BLOCK_TOKENS, min(host_capacity * BLOCK_TOKENS, host_prompt))


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one round. `None` takes the default named beside it.

    `soft_tokens` (gpu.token_limit) bounds optional work and may be crossed by one prompt;
    `hard_tokens` (gpu.max_batched_tokens) is never exceeded.
    """

    gpu_rows: int = 256
    cpu_rows: int = 256
    soft_tokens: int = 1024
    hard_tokens: int = 8192
    staging_tokens: int | None = None  # tokens of Prefill-to-CPU a round; hard_tokens
    cpu_waiting: int | None = None  # host decode-admission limit; cpu_rows

    def __post_init__(self) -> None:
        for key in ("gpu_rows", "cpu_rows", "soft_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)} admits nothing: set at least 1")
        floor = max(self.soft_tokens, self.gpu_rows)
        if self.hard_tokens < floor:
            raise ConfigError(
                f"hard_tokens={self.hard_tokens} is below {floor}, the larger of soft token limit "
                "and GPU row limit: raise gpu.max_batched_tokens or lower the other two"
            )

    @property
    def staging(self) -> int:
        """Tokens of Prefill-to-CPU prompts that the staging buffers take in one round."""
        return self.hard_tokens if self.staging_tokens is None else self.staging_tokens

    @property
    def host_admission(self) -> int:
        """CPU-waiting requests at which Prefill-to-CPU stops."""
        return self.cpu_rows if self.cpu_waiting is None else self.cpu_waiting

    @property
    def host_prompt(self) -> int:
        """Longest prefill in tokens that can go to the host: one forward through staging."""
        return min(self.hard_tokens, self.staging)

    def admit_length(
        self, prompt_len: int, max_tokens: int, gpu_capacity: int, host_capacity: int
    ) -> None:
        """Raises RequestTooLong for a request that could get stuck, whatever the load."""
        if prompt_len < 1 or max_tokens < 1:
            raise RequestTooLong(
                f"prompt of {prompt_len} tokens, max_tokens={max_tokens}: both must be at least 1"
            )
        limit = context_limit(gpu_capacity, host_capacity, self.host_prompt)
        longest = prompt_len + max_tokens - 1
        if longest > limit:
            why = ""
            if host_capacity * BLOCK_TOKENS > limit:
                why = f", as a prompt for the host is one forward of at most {self.host_prompt}"
            raise RequestTooLong(
                f"prompt of {prompt_len} tokens with max_tokens={max_tokens}: KV for {longest} "
                f"tokens, the limit is {limit}{why}: shorten it or lower max_tokens"
            )
