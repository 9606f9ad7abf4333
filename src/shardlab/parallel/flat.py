"""Parameters laid out one behind the other, so that they, or their gradients, travel as one and are cut evenly.

Where each lies, and what a slice holds, is `specs.rows`'s to say; the padding is zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..specs.rows import FlatRow, rows_of


class Flat:
    """The layout of `parameters`, all of one dtype and device, in a row of `numel` numbers, p slices of `share`."""

    def __init__(self, parameters: Sequence[nn.Parameter], p: int = 1):
        self.parameters = list(parameters)
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self.row = FlatRow(tuple(parameter.numel() for parameter in self.parameters), p)
        self.start = dict(zip(self.parameters, self.row.starts, strict=True))
        self.numel, self.share = self.row.numel, self.row.share

    def empty(self) -> torch.Tensor:
        """New memory for the row, (numel,): zeros in the padding, the rest unfilled."""
        row = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        row[self.row.filled :] = 0
        return row

    def view(self, row: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """The part of `row` (numel,) that is `parameter`'s, in its shape."""
        start = self.start[parameter]
        return row[start : start + parameter.numel()].view(parameter.shape)

    def lay(self) -> torch.Tensor:
        """New memory for the row, with the parameters' values, which from now on have their place there."""
        row = self.empty()
        for parameter in self.parameters:
            place = self.view(row, parameter)
            place.copy_(parameter.detach())
            parameter.data = place
        return row

    def slices(self, r: int) -> Iterator[tuple[nn.Parameter, int, int]]:
        """What slice `r` holds: (parameter, first, last) for its flattened elements first to last, in their order."""
        for i, first, last in self.row.slices(r):
            yield self.parameters[i], first, last


class Slice:
    """Slice `r` of a row: which parameters it has a part of, and where that lies in memory (share,) for it."""

    def __init__(self, flat: Flat, r: int):
        self.flat, self.r = flat, r
        self.spans = {parameter: (first, last) for parameter, first, last in flat.slices(r)}

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """The slice (share,) of a whole `row` (numel,): a view."""
        return row[self.r * self.flat.share :][: self.flat.share]

    def part(self, values: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """What of `values` (share,) is the parameter's, one of `spans`: its elements first to last, a view."""
        first, last = self.spans[parameter]
        return values[self.flat.start[parameter] + first - self.r * self.flat.share :][: last - first]


def buckets(parameters: Sequence[nn.Parameter], p: int, nbytes: int) -> list[Flat]:
    """`parameters` in their order, in rows of one dtype and device, of `nbytes` at most or of a single parameter."""
    rows = rows_of([((each.dtype, each.device), each.nbytes) for each in parameters], nbytes)
    return [Flat([parameters[i] for i in row], p) for row in rows]
