"""What the data axis adds to a step: the gradients of the replicas' different data, summed, and what ZeRO shares out.

Exact in payload, call by call, for `parallel.data.replicate` and `parallel.zero.shard`. Plain data parallelism
all-reduces its gradients; ZeRO-1 and 2 reduce-scatter them, and all-gather the weights that each rank has stepped: in a
ring the two halves of the same all-reduce (arXiv:1910.02054, §7). ZeRO-3 keeps no weights, so it gathers those of a
block before its forward and again before its backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .collective import Collective, Phase, alike
from .data_rows import DataRows, Unit
from .sharing import own


@dataclass(frozen=True)
class DataAxis:
    """The calls of one rank over its data axis, in a step of `passes` forward and backward passes; with a pipeline
    (`staged`) gradients are summed when all passes are over."""

    rows: DataRows
    passes: int
    staged: bool = False

    def start(self) -> Iterator[Collective]:
        """Every replica says in four numbers which model it has, and takes the first one's weights."""
        yield from alike("dp", "all_gather", "start", "which model", [4], 8, self._dp)
        sizes = [each.numel for each in self.rows.parameters]
        # a stage has a tensor of no numbers, for its dtype
        yield from self._calls("broadcast", "start", "weights", [*sizes, 0] if self.staged else sizes)

    def loop(self) -> Iterator[Collective]:
        """The training loop's own: how many tokens of the step have labels, and its loss."""
        for what in ("valid tokens", "loss of the step"):
            yield from alike("dp", "all_reduce", "forward", what, [1], 8, self._dp)

    def forward(self) -> Iterator[Collective]:
        """Stage 3 gathers what each rank has a part of."""
        for unit in self.rows.units:
            yield from self._gathers("forward", unit, self.passes * unit.gathers)

    def backward(self) -> Iterator[Collective]:
        """Gradients, row by row: once a step, but from stage 2 in every pass, since no rank holds them whole."""
        for unit in self.rows.units:
            if unit.again:
                yield from self._gathers("backward", unit, self.passes)
        op = "reduce_scatter" if self._zero else "all_reduce"
        yield from self._calls(op, "finish" if self.staged else "backward", "gradients",
                               [row.numel for row, _ in self.rows.gradients], self.passes if self._zero > 1 else 1)

    def finish(self) -> Iterator[Collective]:
        """A byte for each trained parameter: whether a rank has used it."""
        yield from alike("dp", "all_reduce", "finish", "which are used", [len(self.rows.parameters.trained)], 1,
                         self._dp)

    def clip(self) -> Iterator[Collective]:
        """The sum of squares of what ranks have different slices of."""
        if self._zero and self.rows.parameters.trained:
            yield from alike("dp", "all_reduce", "clip", "norm", [1], 8, self._dp)

    def step(self) -> Iterator[Collective]:
        """Each rank's part of the new weights, to every rank."""
        if self._zero in (1, 2):
            yield from self._calls("all_gather", "step", "weights", [row.share for row, _ in self.rows.gradients])

    def summed(self, coordinate: int | None) -> tuple[dict[str, int], int]:
        """How many numbers of each gradient a rank has after that, and the bytes of one: of its slices of the rows
        under ZeRO, where half precision is summed up in fp32. `coordinate` is where it stands on the axis; None is the
        rank that has most of what tensor parallelism has yet to sum."""
        trained = self.rows.parameters.trained
        if not self._zero:
            return {each.name: each.numel for each in trained}, self.rows.width
        partial = {each.name for each in trained if each.copies > 1}
        everyone = range(self._dp) if coordinate is None else (coordinate,)
        held = [own(self.rows.gradients, r) for r in everyone] if partial else [{}]
        return max(held, key=lambda own: sum(own.get(name, 0) for name in partial)), max(4, self.rows.width)

    @property
    def _dp(self) -> int:
        return self.rows.ranks

    @property
    def _zero(self) -> int:
        return self.rows.layout.zero

    def _gathers(self, phase: Phase, unit: Unit, times: int) -> Iterator[Collective]:
        yield from self._calls("all_gather", phase, f"weights, {unit.name}", [row.share for row, _ in unit.rows], times)

    def _calls(self, op: str, phase: Phase, what: str, sizes: list[int], times: int = 1) -> Iterator[Collective]:
        yield from alike("dp", op, phase, what, sizes, self.rows.width, self._dp, times)
