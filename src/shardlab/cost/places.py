"""Where ranks stand: at a place of the pipeline, with the layers that are there, and within it among those who have the
same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ..schedule import SCHEDULES, placement
from ..specs import Layout, ModelSpec
from ..specs.layout import ORDER
from .parameters import Stage
from .pipeline_stages import stages_of


class Place(NamedTuple):
    """A place of a pipeline, and the `stages` there; whether a tied embedding is `apart`, at two places that have a
    part of its gradient each."""

    number: int
    stages: tuple[Stage, ...]
    apart: bool = False

    @property
    def what(self) -> str:
        """In words: "layers 0–9, embedding"."""
        return "; ".join(stage.what for stage in self.stages)


def places_of(spec: ModelSpec, homes: Sequence[Sequence[int]], weights: Sequence[float] | None = None) -> list[Place]:
    """The places of a pipeline that has the stages `homes[i]` at place i; see `specs.stages.split` for `weights`."""
    stages = stages_of(spec, len({number for mine in homes for number in mine}), weights)
    first, last = ({i for i, mine in enumerate(homes) if number in mine} for number in (0, len(stages) - 1))
    return [Place(i, tuple(stages[number] for number in mine), spec.tied and first != last and i in first | last)
            for i, mine in enumerate(homes)]


def places(spec: ModelSpec, layout: Layout, weights: Sequence[float] | None = None) -> list[Place]:
    """The places of the layout's pipeline; without one there is one, with all layers."""
    return places_of(spec, [[0]] if layout.pp == 1 else _homes(layout.kind, layout.pp, layout.chunks), weights)


@cache
def _homes(kind: str, pp: int, chunks: int) -> list[list[int]]:
    """The stages of each place: the same however many micro-batches there are, for which all are defined at 2 · pp."""
    return placement(SCHEDULES[kind](pp, 2 * pp, **({"chunks": chunks} if kind == "interleaved" else {})))


def alone(layout: Layout) -> Layout:
    """The layout of the ranks at one place, which have the same layers: without the pipeline."""
    return replace(layout, pp=1, schedule=None, chunks=1, order=ORDER)


def within(layout: Layout, rank: int) -> int:
    """Which of the ranks at its place `rank` is, counted with the tensor axis innermost."""
    at = layout.place(rank)
    return (at["dp"] * layout.cp + at["cp"]) * layout.tp + at["tp"]


def rank_at(layout: Layout, place: int, number: int) -> int:
    """The rank that is `number` within that place: the inverse of `within`."""
    data, tensor = divmod(number, layout.tp)
    at = {"pp": place, "dp": data // layout.cp, "cp": data % layout.cp, "tp": tensor}
    return sum(coordinate * layout.distance(axis) for axis, coordinate in at.items())

