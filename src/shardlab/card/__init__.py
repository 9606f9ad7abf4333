"""A card: a limit on what a rank may hold, so that a model which is too large fails on a laptop as it does on a GPU.

    launch(load, 1, card="256 MiB")       # PyTorch's own out-of-memory error, then what the rank held

    def load(group, folder):
        try:
            ...
        except RuntimeError:
            print(card.resident())        # the rank goes on

`card=` takes a size, bytes, or a `specs.CardSpec`. Where there is no way to limit a process, the launch says so with an
`UnlimitedWarning`, and goes on.
"""

from .limit import Limit, UnlimitedWarning, budget, check_machine, resident
from .resident import Group, Resident

__all__ = ["Group", "Limit", "Resident", "UnlimitedWarning", "budget", "check_machine", "resident"]
