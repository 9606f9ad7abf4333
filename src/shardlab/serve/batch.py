"""What a step computes: some tokens of some requests, and where their caches are."""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    """One request's part of a step: `tokens` at positions from `start` on are computed, with the cache in `blocks`,
    its table, which is the scheduler's own and as long as the step lasts. `samples`: a next token is wanted."""

    number: int
    start: int
    tokens: list[int]
    blocks: list[int]
    samples: bool


class Batch(NamedTuple):
    """What a step computes."""

    items: list[Item]

    @property
    def work(self) -> list[tuple[int, int]]:
        """(new tokens, tokens attended to, these included) of each request: what a step's time depends on."""
        return [(new := len(tokens), start + new) for _, start, tokens, _, _ in self.items]

    @property
    def plan(self) -> tuple:
        """All that was decided, to be compared: numbers, positions, tokens' number, tables."""
        return tuple((item.number, item.start, len(item.tokens), tuple(item.blocks)) for item in self.items)
