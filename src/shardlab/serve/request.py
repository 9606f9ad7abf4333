"""What a user asks for, and what comes back: tokens, and when each was made."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import NamedTuple

from ..specs import ModelSpec
from ..specs.check import whole


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids and how many new tokens are wanted at most; `stop` ends it earlier, once it is made.

    `arrival` is when it is due, in seconds from the start of the run: waits count from then, whether or not anybody was
    there to take it. A prompt may be a tensor, and is a list then. Raises ValueError on an empty prompt and one of
    anything but whole numbers, on `new_tokens` below 1 and on an `arrival` below 0.
    """

    number: int
    prompt: Sequence[int]
    new_tokens: int
    arrival: float = 0.0
    stop: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, array):  # an array has whole numbers already, 4 bytes each
            ids = self.prompt.tolist() if hasattr(self.prompt, "tolist") else list(self.prompt)
            if not isinstance(ids, list) or not all(isinstance(each, Integral) for each in ids):
                raise ValueError(f"request {self.number} has a prompt of {ids!r:.60}: token ids are whole numbers")
            object.__setattr__(self, "prompt", ids)
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


class Limits(NamedTuple):
    """What a model can be asked: at most `tokens` in all, with ids below `vocab`."""

    tokens: int
    vocab: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Limits:
        return cls(spec.max_positions, spec.vocab)

    def refusal(self, request: Request) -> str:
        """Why the model can't answer the request; "" where it can."""
        tokens = len(request.prompt) + request.new_tokens - 1  # the last one made is not read again
        if tokens > self.tokens:
            return (f"{tokens} tokens, and the model was made for {self.tokens}: shorten the prompt or ask for fewer "
                    "new ones")
        if wrong := [each for each in (min(request.prompt), max(request.prompt)) if not 0 <= each < self.vocab]:
            return f"token {wrong[0]} of its prompt is outside the vocabulary of {self.vocab}"
        return ""
