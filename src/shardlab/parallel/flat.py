"""Parameters laid out one behind the other, so that they, or their gradients, travel as one and are cut evenly.

The row is padded with zeros to a multiple of the group's size p; slice r is its r-th p-th. Where a parameter ends has
nothing to do with where a slice ends: a slice may hold parts of several parameters, or padding only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..specs import padded


class Flat:
    """The layout of `parameters`, all of one dtype and device, in a row of `numel` numbers, p slices of `share`."""

    def __init__(self, parameters: Sequence[nn.Parameter], p: int = 1):
        self.parameters = list(parameters)
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self.start: dict[nn.Parameter, int] = {}
        end = 0
        for parameter in self.parameters:
            self.start[parameter] = end
            end += parameter.numel()
        self.numel = padded(end, p)
        self.share = self.numel // p

    def empty(self) -> torch.Tensor:
        """New memory for the row, (numel,): zeros in the padding, the rest unfilled."""
        row = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        row[sum(parameter.numel() for parameter in self.parameters) :] = 0
        return row

    def view(self, row: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """The part of `row` (numel,) that is `parameter`'s, in its shape."""
        start = self.start[parameter]
        return row[start : start + parameter.numel()].view(parameter.shape)

    def slices(self, r: int) -> Iterator[tuple[nn.Parameter, int, int]]:
        """What slice `r` holds: (parameter, first, last) for its flattened elements first to last, in their order."""
        for parameter, start in self.start.items():
            first = min(max(r * self.share - start, 0), parameter.numel())
            last = min(max((r + 1) * self.share - start, 0), parameter.numel())
            if first < last:
                yield parameter, first, last


def buckets(parameters: Sequence[nn.Parameter], p: int, nbytes: int) -> list[Flat]:
    """`parameters` in their order, in rows of one dtype and device, of `nbytes` at most or of a single parameter."""
    rows: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        last = rows[-1][-1] if rows else None
        same = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not same or size + parameter.nbytes > nbytes:
            rows.append([])
            size = 0
        rows[-1].append(parameter)
        size += parameter.nbytes
    return [Flat(row, p) for row in rows]
