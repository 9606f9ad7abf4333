"""What a service is asked for, and in which time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..specs import ModelSpec
from ..specs.check import number, whole


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked for: `rate` requests a second, of `prompt` tokens, of which the share `hits` is cached already, and
    `answer` new ones. On average the first token may take `ttft` seconds, a further one `tpot`; `gap` is the longest
    that an answer may stand still between two tokens. None is no limit. Raises ValueError on what is not above 0."""

    rate: float
    prompt: int
    answer: int
    hits: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    gap: float | None = None

    def __post_init__(self):
        number("rate", self.rate)
        for name in ("prompt", "answer"):
            whole(name, getattr(self, name))
        for name in ("ttft", "tpot", "gap"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name))
        if not 0 <= self.hits < 1:
            raise ValueError(f"hits = {self.hits} is a share of the prompt: 0 to less than 1")

    @property
    def uncached(self) -> int:
        """Tokens of a prompt that are computed, the last one at least."""
        return max(1, ceil(self.prompt * (1 - self.hits)))

    @property
    def longest(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt + self.answer

    @property
    def context(self) -> int:
        """Tokens that a decoding request has on average."""
        return self.prompt + (self.answer + 1) // 2

    def within(self, spec: ModelSpec) -> None:
        """Raise ValueError where the model was not made for so many tokens."""
        if self.longest - 1 > spec.max_positions:
            raise ValueError(f"{self.prompt:,} + {self.answer:,} tokens, and {spec.name} was made for "
                             f"{spec.max_positions:,}: no number of cards helps, shorten the prompt or the answer")

    def keeps(self, ttft: float, tpot: float, gap: float) -> bool:
        """Whether these seconds are within the limits."""
        return all(limit is None or value <= limit for value, limit in (
            (ttft, self.ttft), (tpot, self.tpot), (gap, self.gap)))
