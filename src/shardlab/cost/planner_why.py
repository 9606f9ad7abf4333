"""Why one layout is slower than another: the difference of two bills of time, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..specs import ClusterSpec
from ..specs.units import decimal
from .bill import Bill, Row
from .step_time_bill import NAMES, StepTime


@dataclass(frozen=True, repr=False, eq=False)
class Difference(Bill):
    """What step `b` takes more than step `a`, part by part; below 0 where it takes less."""

    headings = ("what", "how it comes about", "", "", "")

    a: StepTime
    b: StepTime

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.b.seconds - self.a.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part, the largest difference first."""
        each = {part: self.b.parts[part] - self.a.parts[part] for part in self.a.parts}
        return dict(sorted(each.items(), key=lambda item: -abs(item[1])))

    @property
    def sentence(self) -> str:
        """The two parts that make most of it, in words and numbers."""
        if not round(self.seconds, 6):
            return "as long"
        ratio = self.b.seconds / self.a.seconds
        way = [(part, value) for part, value in self.parts.items() if value / self.seconds > 0.05][:2]
        named = [f"{value:+.3g} s {part}{self._more(part)}" for part, value in way]
        return f"{ratio:.3f} × as long: {', '.join(named)}"

    @property
    def title(self) -> str:
        return f"{self.b.layout.degrees}, against {self.a.layout.degrees}: {self.sentence}"

    @property
    def rows(self) -> list[Row]:
        rows = [Row(part, f"{self.a.parts[part]:.4g} s → {self.b.parts[part]:.4g} s{self._more(part)}", round(value, 6),
                    "s") for part, value in self.parts.items() if round(value, 6)]
        return [*rows, Row("a step", f"{self.a.seconds:.4g} s → {self.b.seconds:.4g} s", round(self.seconds, 6), "s")]

    @property
    def footnotes(self) -> list[str]:
        same = self.a.tokens == self.b.tokens and self.a.cluster.cards == self.b.cluster.cards
        return [] if same else ["The two steps are not of as many tokens, or cards."]

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data: both layouts, seconds, parts, rows."""
        return {"a": self.a.layout.degrees, "b": self.b.layout.degrees, "seconds": self.seconds, "parts": self.parts,
                "sentence": self.sentence, **super().to_dict()}

    def _more(self, part: str) -> str:
        """What is sent for it, in one and the other."""
        axis = next((axis for axis, name in NAMES.items() if name == part), None)
        if axis is None or part == "bubble":
            return ""
        ways = [f"{decimal(one)} → {decimal(other)} over {link}" for one, other, link in zip(
            self.a.sent[axis], self.b.sent[axis], _links(self.b.cluster), strict=True) if round(one) != round(other)]
        return f" ({', '.join(ways)})" if ways else ""


def why(a: StepTime, b: StepTime) -> Difference:
    """What makes step `b` slower than step `a`, or faster: seconds of each part, and bytes that a rank sends for it.
    Raises TypeError on what is no bill of a step's time."""
    for one in (a, b):
        if not isinstance(one, StepTime):
            raise TypeError(f"two steps are compared, not {one!r}: give what cost.step_time returns")
    return Difference(a, b)


def _links(cluster: ClusterSpec) -> tuple[str, str]:
    return cluster.inside.name, cluster.between.name
