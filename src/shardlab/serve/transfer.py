"""A cache on its way from the replica that computed a prompt to the one that will go on: who holds which blocks, until
when.

    reserved    the target has blocks for the whole prompt, some of which it may have had already
    streaming   the source sends, layer by layer, while it computes or afterwards
    sealed      all has been sent, and how much it was
    acked       the target has all of it, compared: it may decode
    freed       the source's blocks, and the request is the target's
    draining    it was given up: blocks on both sides stay taken until nobody writes or reads them any more
    dropped     now they don't
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .events import Instance

STATES = ("reserved", "streaming", "sealed", "acked", "freed")
GIVEN_UP = (("reserved", "draining"), ("streaming", "draining"), ("sealed", "draining"), ("draining", "dropped"),
            ("acked", "dropped"))


@dataclass(slots=True, eq=False)
class Transfer:
    """The caches of `tokens` tokens of request `number`, of which the target had the first `had`; the first `sent` are
    sent. `serial` is no other transfer's.

    `taken` is the source's block table, `given` the target's, each with a hold of the transfer's own; `parent` is the
    number of the target's last known content. `begun` is when the request's first token was made, `adopted` when the
    target could go on, in seconds: the time between is what the reader of the answer waits for the transfer. Both are
    known once it has been freed.
    """

    serial: int
    number: int
    source: Instance
    target: Instance
    tokens: int
    had: int
    taken: list[int]
    given: list[int]
    parent: int
    state: str = "reserved"
    sent: int = 0
    begun: float = 0.0
    adopted: float = 0.0

    def __post_init__(self) -> None:
        self.sent = self.had

    def to(self, state: str) -> None:
        """Go on to the next state, or give it up. RuntimeError where that is not what comes next."""
        follows = STATES[STATES.index(self.state) + 1] if self.state in STATES[:-1] else None
        if state != follows and (self.state, state) not in GIVEN_UP:
            raise RuntimeError(f"the transfer of request {self.number} is {self.state}: it can't be {state} next")
        self.state = state
