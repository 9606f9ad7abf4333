"""Pipeline schedules as data: who computes what when. Standard library only."""

from collections.abc import Callable

from .action import Action, B, F, I, Orders, W, computing, placement, size
from .check import check, peak_live
from .clock import Span, clock, units
from .dualpipe import dualpipe, dualpipe_v
from .flush import forward_only, gpipe, one_f_one_b
from .interleaved import interleaved
from .limits import sized
from .transfers import with_transfers
from .zero_bubble import zero_bubble

# stages on each rank, of schedules that leave no choice
CHUNKS = {"gpipe": 1, "1f1b": 1, "zero_bubble": 1, "dualpipe_v": 2, "dualpipe": 2}
SCHEDULES: dict[str, Callable[..., list[list[Action]]]] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zero_bubble": zero_bubble,
    "dualpipe_v": dualpipe_v, "dualpipe": dualpipe}

__all__ = ["CHUNKS", "SCHEDULES", "Action", "B", "F", "I", "Orders", "Span", "W", "check", "clock", "computing",
           "dualpipe", "dualpipe_v", "forward_only", "gpipe", "interleaved", "one_f_one_b", "peak_live", "placement",
           "size", "sized", "units", "with_transfers", "zero_bubble"]
