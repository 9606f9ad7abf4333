"""Ranks: a function run by several processes at once, their results brought back, or the first one's failure.

    def total(group, numbers):                       # runs on every rank; group.rank() tells which one it is
        return comm.all_reduce(numbers + group.rank())

    launch(total, 4, torch.ones(2))                  # [tensor, tensor, tensor, tensor], in rank order

    with ranks(4) as r:                              # ranks that stay: each further run costs milliseconds
        r.run(total, torch.ones(2))

    launch(total, 4, torch.ones(2), card="256 MiB")  # ranks that run out of memory at 256 MiB each

The same from a notebook, a script, a test, and under torchrun, where the function runs in torchrun's own processes.
A failure in one rank ends all ranks and shows that rank's traceback; a hang ends at its time limit with a table of
what each rank was doing. Linux, macOS and WSL: Windows has no fork.
"""

from .report import RankError, RankExited, RankTimeout
from .run import Ranks, launch, ranks

__all__ = ["RankError", "RankExited", "RankTimeout", "Ranks", "launch", "ranks"]
