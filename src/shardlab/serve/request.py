"""What a user asks for, and what comes back: tokens, and when each was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..specs.check import whole


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids and how many new tokens are wanted at most; `stop` ends it earlier, once it is made.

    `arrival` is when it is due, in seconds from the start of the run: waits count from then, whether or not anybody was
    there to take it. Raises ValueError on an empty prompt, on `new_tokens` below 1 and on an `arrival` below 0.
    """

    number: int
    prompt: Sequence[int]
    new_tokens: int
    arrival: float = 0.0
    stop: int | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError(f"request {self.number} has an empty prompt: a model continues at least one token")
        whole("new_tokens", self.new_tokens)
        if not 0 <= self.arrival < float("inf"):
            raise ValueError(f"request {self.number} arrives at {self.arrival!r} s: a time from the start, 0 or later")


@dataclass(slots=True)
class Answer:
    """The new tokens of a request, and for each when it was made, in seconds on the clock of its arrival.

    `refused` says why it was never begun. `cached` prompt tokens were not computed, since blocks of an earlier request
    held them; `preempted` times its cache was given up and computed again.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    cached: int = 0
    preempted: int = 0
    refused: str = ""
