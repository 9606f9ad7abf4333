"""What the control plane knows of a replica, what it asks of the world, and what the world tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, get_args

from .batch import Batch
from .request import Answer, Request
from .scheduler import Scheduler
from .transfer import Transfer

Role = Literal["both", "prefill", "decode"]


def check_role(name: str, role: object) -> None:
    """Raise ValueError on what is no role."""
    if role not in get_args(Role):
        raise ValueError(f"{name} has the role {role!r}: use one of {', '.join(get_args(Role))}")


class Instance:
    """A replica as the control plane knows it: its name, what it is for, its scheduler, and what it is computing."""

    def __init__(self, name: str, scheduler: Scheduler, role: Role = "both", cards: int = 1):
        check_role(name, role)
        self.name, self.scheduler, self.role, self.cards = name, scheduler, role, cards
        self.pool = scheduler.pool
        self.working: Batch | None = None
        self.alive = True
        self.outstanding = 0  # tokens that its requests still have to compute or to make, at most


class Arrived(NamedTuple):
    """A request is due, whose answer this is."""

    answer: Answer


class Stepped(NamedTuple):
    """An instance has computed a batch; by request, the token that followed."""

    instance: Instance
    batch: Batch
    tokens: dict[int, int]


class Moved(NamedTuple):
    """What has become of a transfer: "acked", "failed" (what came was not what was sent, or took too long), or
    "drained" (it was cancelled, and nobody touches its blocks any more)."""

    transfer: Transfer
    how: Literal["acked", "failed", "drained"]


class Lost(NamedTuple):
    """An instance is gone, with all that it held."""

    instance: Instance


Event = Arrived | Stepped | Moved | Lost


class Stream(NamedTuple):
    """Tokens `start` to `stop` of a transfer, to be sent; the `last` ones are followed by the seal."""

    transfer: Transfer
    start: int
    stop: int
    last: bool


class World(Protocol):
    """What really happens, or is said to. Whatever is begun comes back as an event."""

    def begin(self) -> None:
        """A run starts: it is 0."""

    def now(self) -> float: ...

    def arrive(self, answer: Answer) -> None:
        """`Arrived`, when the answer's request is due."""

    def run(self, instance: Instance, batch: Batch, streams: Sequence[Stream] = ()) -> None:
        """Compute a batch: `Stepped`. Of the tokens in `streams` each layer is sent as soon as it is computed."""

    def send(self, stream: Stream) -> None:
        """Send these tokens' caches, all layers. After the last of a transfer's streams: `Moved`, acked or failed."""

    def cancel(self, transfer: Transfer) -> None:
        """Stop a transfer that was not acked yet: `Moved`, drained, and nothing else of it from then on. Its source or
        target may be lost."""

    def next(self) -> Event | None:
        """What happened next; None when nothing more will."""


class Router(Protocol):
    """Chooses one of some instances for a request."""

    def pick(self, instances: Sequence[Instance], request: Request) -> Instance: ...
