"""The rows in which the data axis moves a rank's parameters and gradients: `parallel.data`'s and `parallel.zero`'s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..specs import Layout
from ..specs.rows import FlatRow, rows_of
from .parameters import Parameter, Parameters


class Rowed(NamedTuple):
    """A row, and the parameters that are in it."""

    row: FlatRow
    parameters: list[Parameter]

    @property
    def trained(self) -> bool:
        """Whether the parameters are trained: all of a row are, or none is."""
        return self.parameters[0].trained


class Unit(NamedTuple):
    """What ZeRO-3 gathers at a time: trained and frozen parameters have a row each, where there are any.

    `gathers` is how often forward gathers it; `again` whether backward does too.
    """

    name: str
    rows: list[Rowed]
    gathers: int
    again: bool

    def numel(self, trained: bool = False) -> int:
        """Numbers of its rows, padding included; or of the trained one alone."""
        return sum(each.row.numel for each in self.rows if each.trained or not trained)


@dataclass(frozen=True)
class DataRows:
    """How `layout`'s data axis lays out the parameters of a rank, whose gradients have `width` bytes a number; `bucket`
    bytes of them make a row. `tied` says whether the head is the embedding. Spread experts have rows of their own, over
    the ranks that hold the same ones; and under ZeRO so has a tied embedding that is `apart`, on another rank of the
    pipeline too."""

    parameters: Parameters
    layout: Layout
    tied: bool
    width: int
    bucket: int
    apart: bool = False

    @property
    def ranks(self) -> int:
        """How many ranks share the rows."""
        return self.layout.expert_replicas if self._spread else self.layout.data_ranks

    def coordinate(self, within: int) -> int:
        """Which of those a rank is that has this number among the ranks with the same layers."""
        return within // (self.layout.ep * self.layout.expert_tp if self._spread else self.layout.tp)

    @property
    def _spread(self) -> bool:
        return bool(self.parameters) and self.parameters[0].spread

    @cached_property
    def gradients(self) -> list[Rowed]:
        """The rows in which gradients are summed: the last parameters first, but in stage 3 by unit. Plain data
        parallelism does not cut them. In stages 1 and 2 weights lie in them too."""
        if self.layout.zero == 3:
            return [row for unit in self.units for row in unit.rows if row.trained]
        table = [each for each in self.parameters.trained
                 if self.apart and self.layout.zero and each.name == "embed_tokens.weight"]
        rest = [each for each in self.parameters.trained[::-1] if each not in table]
        return [self._row([some[i] for i in row]) for some in (rest, table)
                for row in rows_of([(None, each.numel * self.width) for each in some], self.bucket)]

    @cached_property
    def units(self) -> list[Unit]:
        """Stage 3's units, in the order of the forward pass: the embedding, each block, last norm and head. Without it
        there are none.

        The head's stays from forward to backward, which begins there, and the backward pass of an embedding reads no
        weights. A tied head makes one unit of both ends, which forward gathers at either. A block is gathered again
        where backward comes to it.
        """
        parts: dict[int | str, list[Parameter]] = {}
        for each in (each for each in self.parameters if self.layout.zero == 3 and not each.whole):
            end = "ends" if self.tied else "embedding" if each.name.startswith("embed_") else "head"
            parts.setdefault(end if each.layer is None else each.layer, []).append(each)
        return [Unit("layer", list(self._split(inside)), 1, self.parameters.reached(inside[-1].name))
                if isinstance(key, int) else Unit(key, list(self._split(inside)), 2 if key == "ends" else 1, False)
                for key, inside in parts.items()]

    def _split(self, inside: Sequence[Parameter]) -> Iterator[Rowed]:
        for kind in (True, False):
            if some := [each for each in inside if each.trained == kind]:
                yield self._row(some)

    def _row(self, parameters: list[Parameter]) -> Rowed:
        sizes = tuple([each.numel for each in parameters])
        if sizes not in self._known:  # a model of many experts has many rows, and few that differ
            self._known[sizes] = FlatRow(sizes, self.ranks if self.layout.zero else 1)
        return Rowed(self._known[sizes], parameters)

    @cached_property
    def _known(self) -> dict[tuple[int, ...], FlatRow]:
        return {}
