"""The schedules that the tests of this folder go through, and mutations of them."""

from shardlab.schedule import SCHEDULES, forward_only

CHUNKED = {"interleaved", "forward_only"}


def made(ranks, microbatches, chunks):
    """(what it is, its lists) of every schedule that is defined for these sizes."""
    for name, make in {**SCHEDULES, "forward_only": forward_only}.items():
        sizes = ranks, microbatches, chunks
        if name not in CHUNKED:
            if chunks > 1:
                continue
            sizes = sizes[:2]
        try:
            yield (name, *sizes), make(*sizes)
        except ValueError:
            continue


def copied(orders):
    """The lists anew, to be changed."""
    return [list(order) for order in orders]
