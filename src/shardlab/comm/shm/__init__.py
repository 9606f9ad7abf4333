"""The fast link inside a host: the memory that its ranks share, as the verbs use it under `transport="shm"`.

The memory is mapped before the ranks are forked, so it has no name and nothing of it is left when they end. Each rank
finds its end by `here()`; one a process, since a rank is a process. Semantics are those of gloo, with three additions:

* who receives another tag, dtype or shape than was sent is told so, and so are ranks that enter different collectives;
* the work of a collective is done in the call, `async_op=True` or not: there is no thread to do it elsewhere;
* a send or a receive under way moves on whenever its rank waits in `comm` for anything.

One thread of a rank at a time.
"""

import threading
from collections.abc import Callable

from . import semaphore
from .segment import Segment
from .shared import Shared

MOST = 32  # ranks
GRACE = 1.0  # seconds that messages get which nobody waits for
__all__ = ["MOST", "Segment", "Shared", "attempt", "here", "join", "meanwhile", "settle"]


def attempt(make: Callable[[int], Segment], ranks: int) -> tuple[Segment | None, str]:
    """make(ranks), the memory of that many ranks, and ""; or None, and why they can't have any."""
    if semaphore.MISSING or ranks > MOST:
        return None, semaphore.MISSING or f"it is for up to {MOST} ranks of a host, not for {ranks}"
    try:
        return make(ranks), ""
    except OSError as error:
        return None, f"the system refuses it: {error}"


_shared: Shared | None = None
_missing = "this process is no rank that launch has started"


def join(rank: int, timeout: float, segment: Segment | None, why_not: str) -> None:
    """Make `segment` this process's own, as `rank`; or note why there is none. Called by the launcher, once a rank."""
    global _shared, _missing
    _shared = None if segment is None else Shared(segment, rank, timeout)
    _missing = why_not


def here() -> Shared:
    """This rank's end of the memory that it shares with the others. ValueError where there is none, saying why."""
    if _shared is None:
        raise ValueError(f"no shared memory between ranks here: {_missing}. Use the backend: "
                         "comm.use(transport='backend')")
    return _shared


def meanwhile(wait: Callable[[], object]) -> None:
    """Call `wait`, which waits for something else, and move the messages that are under way here until it is over."""
    if _shared is None or not _shared.moving:
        wait()
        return
    errors: list[BaseException] = []

    def waiting() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    while thread.is_alive():
        _shared.advance()
        thread.join(1e-4)
    if errors:
        raise errors[0]


def settle() -> None:
    """Called by the launcher when a rank's function has returned: whatever it has begun here must come to an end.

    Raises RuntimeError where a message is neither taken nor come within a second: it would turn up in the next run.
    """
    if _shared is not None and _shared.moving:
        _shared.settle(GRACE)
