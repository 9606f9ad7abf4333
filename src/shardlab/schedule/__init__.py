"""Pipeline schedules as data: who computes what when. Standard library only."""

from collections.abc import Callable

from .action import Action, B, F, I, Orders, W, computing, placement, size
from .check import check, peak_live
from .clock import Span, clock, units
from .dualpipe import dualpipe, dualpipe_v
from .flush import forward_only, gpipe, one_f_one_b
from .interleaved import interleaved
from .transfers import with_transfers
from .zero_bubble import zero_bubble

SCHEDULES: dict[str, Callable[..., list[list[Action]]]] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zero_bubble": zero_bubble,
    "dualpipe_v": dualpipe_v, "dualpipe": dualpipe}

__all__ = ["SCHEDULES", "Action", "B", "F", "I", "Orders", "Span", "W", "check", "clock", "computing", "dualpipe",
           "dualpipe_v", "forward_only", "gpipe", "interleaved", "one_f_one_b", "peak_live", "placement", "size",
           "units", "with_transfers", "zero_bubble"]
