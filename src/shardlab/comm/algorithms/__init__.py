"""Collectives written from send and receive, each with the picture that it follows.

| verb             | algorithms, the first where none of the verb's is asked for |
|------------------|-------------------------------------------------------------|
| `all_reduce`     | ring, doubling, halving, tree, naive, two_level             |
| `all_gather`     | ring                                                        |
| `reduce_scatter` | ring                                                        |
| `all_to_all`     | pairwise                                                    |
| `broadcast`      | tree                                                        |
| `reduce`         | tree                                                        |
| `gather`         | naive                                                       |
| `scatter`        | naive                                                       |
| `barrier`        | doubling                                                    |

They work on flat, contiguous tensors, and take the group as `Peers`. `cost.messages` says, from above, which messages
each of them sends.
"""

from __future__ import annotations

from collections.abc import Callable

from . import direct, doubling, ring, tree, two_level

TABLE: dict[str, dict[str, Callable]] = {
    "all_reduce": {"ring": ring.all_reduce, "doubling": doubling.all_reduce, "halving": doubling.all_reduce_halving,
                   "tree": tree.all_reduce, "naive": direct.all_reduce, "two_level": two_level.all_reduce},
    "all_gather": {"ring": ring.all_gather},
    "reduce_scatter": {"ring": ring.reduce_scatter},
    "all_to_all": {"pairwise": direct.all_to_all},
    "broadcast": {"tree": tree.broadcast},
    "reduce": {"tree": tree.reduce},
    "gather": {"naive": direct.gather},
    "scatter": {"naive": direct.scatter},
    "barrier": {"doubling": doubling.barrier},
}


def names() -> list[str]:
    """The names of all algorithms, each once."""
    return list(dict.fromkeys(name for of_verb in TABLE.values() for name in of_verb))


def pick(verb: str, name: str) -> str:
    """The verb's algorithm of that name, or its first one if it has none."""
    return name if name in TABLE[verb] else next(iter(TABLE[verb]))
