"""The time of a serving step, fitted to a log of steps: a + b · tokens + c · context + d · Σ tokens · context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from ..specs.check import number
from ..specs.units import seconds as in_seconds
from .bill import Bill, Row
from .queueing import Work

NAMES = ("a step", "a new token", "a token of context", "a new token × a token of context")
ALIKE = 1e-6  # a column of which less than this is left, the others taken off, says nothing of its own


@dataclass(frozen=True, repr=False, eq=False)
class StepFit(Bill):
    """`coefficients` are a, b, c and d in seconds; 0 where the log doesn't tell one from those before it, as of decodes
    alone, where the last two are the same. `residuals` are (fitted − measured) / measured, one a step."""

    coefficients: tuple[float, float, float, float]
    residuals: tuple[float, ...]

    def __call__(self, work: Work) -> float:
        """Seconds of a step that does this `work`: (new tokens, context, the new ones included) of each request."""
        a, b, c, d = self.coefficients
        return a + sum(b * new + c * context + d * new * context for new, context in work)

    @property
    def error(self) -> float:
        """The median of the residuals' sizes."""
        return sorted(map(abs, self.residuals))[len(self.residuals) // 2]

    @property
    def title(self) -> str:
        return f"the time of a step, fitted to {len(self.residuals)} of them"

    @property
    def rows(self) -> list[Row]:
        return [Row(name, f"{in_seconds(value) if value else '0 s'} each", value, "s")
                for name, value in zip(NAMES, self.coefficients, strict=True)]

    @property
    def footnotes(self) -> list[str]:
        worst = max(self.residuals, key=abs)
        return [f"off by {100 * self.error:.1f}% in the median, {100 * worst:+.1f}% at worst"]

    def to_dict(self) -> dict[str, Any]:
        """The fit as plain data: coefficients, residuals, rows."""
        return {"coefficients": list(self.coefficients), "residuals": list(self.residuals), **super().to_dict()}


def fit_steps(log: Iterable[tuple[Work, float]]) -> StepFit:
    """The four numbers, none below 0, that come closest to a log of (work, seconds), by the squares of relative errors,
    so that a short step weighs as much as a long one. Vidur and DistServe fit such forms (arXiv:2405.05465, §4.3;
    2401.09670, §3.3 and appendix A).

    Raises ValueError on a log of fewer than two different steps, and on times that are not above 0.
    """
    steps = [(tuple(work), number("seconds", seconds)) for work, seconds in log]
    if wrong := [each for work, _ in steps for each in work if not 1 <= each[0] <= each[1]]:
        raise ValueError(f"{wrong[0]} is no work: one new token or more, of a context that counts them in")
    if len({work for work, _ in steps}) < 2:
        raise ValueError(f"a fit takes two different steps at least, and the log has {len({w for w, _ in steps})}: log "
                         "more of them")
    columns = [[value / seconds for (_, seconds), value in zip(steps, values, strict=True)] for values in (
        [1.0] * len(steps), [sum(new for new, _ in work) for work, _ in steps],
        [sum(context for _, context in work) for work, _ in steps],
        [sum(new * context for new, context in work) for work, _ in steps])]
    used = [i for i, column in enumerate(columns) if any(column)]
    while True:
        found = _least_squares([columns[i] for i in used])
        lowest = min(range(len(used)), key=lambda i: found[i] * _length(columns[used[i]]))
        if found[lowest] >= 0:
            break
        used.pop(lowest)  # no step gets shorter for doing more
    all_ = [0.0] * len(columns)
    for i, value in zip(used, found, strict=True):
        all_[i] = value
    fitted = StepFit((all_[0], all_[1], all_[2], all_[3]), ())
    return StepFit(fitted.coefficients, tuple(fitted(work) / seconds - 1 for work, seconds in steps))


def _least_squares(columns: Sequence[Sequence[float]]) -> list[float]:
    """What to take of each column to come closest to a column of ones, 0 of one that the others before it make up:
    Gram and Schmidt's way, one column after the other made square to those before it."""
    kept: list[tuple[int, list[float], list[float]]] = []  # number, direction of length 1, what it has of those before
    for number_of, column in enumerate(columns):
        rest, parts = list(column), []
        for _, direction, _ in kept:
            part = _product(rest, direction)
            parts.append(part)
            rest = [x - part * y for x, y in zip(rest, direction, strict=True)]
        if (length := _length(rest)) > ALIKE * _length(column):
            kept.append((number_of, [x / length for x in rest], [*parts, length]))
    found, ones, takes = [0.0] * len(columns), [1.0] * len(columns[0]), []
    for _, direction, _ in kept:
        takes.append(_product(ones, direction))
        ones = [x - takes[-1] * y for x, y in zip(ones, direction, strict=True)]
    for i in range(len(kept) - 1, -1, -1):
        later = sum(found[number_of] * parts[i] for number_of, _, parts in kept[i + 1 :])
        found[kept[i][0]] = (takes[i] - later) / kept[i][2][i]
    return found


def _product(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _length(column: Sequence[float]) -> float:
    return sqrt(_product(column, column))
