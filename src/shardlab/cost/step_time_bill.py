"""The bill of a training step's time: where the seconds go, what is sent, and what was taken for granted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..specs import ClusterSpec, Layout, ModelSpec
from ..specs.units import count, decimal
from .bill import Bill, Row
from .step_time_layers import Layers
from .step_time_pass import Pass
from .time import forward_flops, utilisation
from .timeline import Timeline

NAMES = {"tp": "tensor axis", "cp": "context axis", "ep": "experts' messages", "pp": "bubble",
         "data": "data axis"}


@dataclass(frozen=True, repr=False, eq=False)
class StepTime(Bill):
    """Seconds of a step, in `parts` that add up to it: what a rank does on average, and what it waits for.

    `passes` is what a micro-batch takes of each stage; `sent` bytes that a rank sends in the step over each axis,
    inside its domain and between domains, on average over the pipeline's ranks ("data": of the rank that sends most).
    `line` is the pipeline in time; None where there is none.
    """

    headings = ("what", "how it comes about", "", "", "where from")

    layers: Layers
    passes: tuple[Pass, ...]
    parts: dict[str, float]
    sent: dict[str, tuple[float, float]]
    line: Timeline | None

    @property
    def spec(self) -> ModelSpec:
        return self.layers.spec

    @property
    def layout(self) -> Layout:
        return self.layers.layout

    @property
    def cluster(self) -> ClusterSpec:
        return self.layers.cluster

    @cached_property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.parts.values())

    @property
    def sequences(self) -> int:
        """Sequences of a step, of all replicas."""
        return self.layers.batch * self.layout.microbatches * self.layout.dp

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all replicas."""
        return self.sequences * self.layers.seq

    @property
    def tokens_per_second(self) -> float:
        """Of all cards together."""
        return self.tokens / self.seconds

    @property
    def flop(self) -> int:
        """FLOP that the model needs for a step: three times a forward pass, nothing that is computed again."""
        return 3 * forward_flops(self.spec, self.layers.seq, self.sequences)

    @property
    def utilisation(self) -> float:
        """The part of the cards' peak in `arithmetic` that these are, MFU."""
        rate = self.cluster.card.flop_rate(self.layers.arithmetic)
        return utilisation(self.flop, self.seconds, self.cluster.cards, rate)

    @property
    def bubble_over_total(self) -> float:
        """The part of the step in which a rank waits for others of its pipeline, imbalance included."""
        return (self.parts["bubble"] + self.parts["imbalance"]) / self.seconds

    @property
    def bottleneck(self) -> str:
        """The part that takes longest beside the arithmetic; "arithmetic" where no other takes a twentieth of it."""
        others = {name: value for name, value in self.parts.items() if name != "arithmetic"}
        name = max(others, key=lambda each: others[each])
        return name if others[name] > self.parts["arithmetic"] / 20 else "arithmetic"

    @property
    def title(self) -> str:
        each = self.layers
        return (f"{self.spec.name} on {self.cluster.name}: {self.layout.degrees}; a step of "
                f"{self.layout.microbatches} × {each.batch} × {each.seq:,} tokens on each replica, "
                f"{count(self.tokens)} in all, {each.dtype}, {each.recompute or 'no'} recomputation")

    @property
    def rows(self) -> list[Row]:
        whole = self.seconds
        rows = [Row(name, f"{self._why(name)}{100 * value / whole:.1f}% of the step", round(value, 6), "s")
                for name, value in self.parts.items() if value]
        rows += [Row("a step", "sum of these", round(whole, 6), "s"),
                 Row("tokens a second", f"{count(self.tokens)} tokens ÷ {whole:.4g} s", round(self.tokens_per_second),
                     "tokens/s"),
                 Row("utilisation (MFU)", f"{self.flop:.4g} FLOP ÷ {whole:.4g} s ÷ {self.cluster.cards} cards ÷ "
                     f"{self.cluster.card.flop_rate(self.layers.arithmetic):.4g} FLOP/s", round(
                         100 * self.utilisation, 2), "%")]
        return [*rows, *self.layers.speeds.rows(self.cluster, self.layers.arithmetic)]

    @property
    def footnotes(self) -> list[str]:
        notes = ["Seconds of passes are those of a rank on average; imbalance and bubble are what it waits for.",
                 "From formulas; a parameter is measured, from a datasheet, or assumed, as it says."]
        if self.layout.kind == "dualpipe" and self.layout.pp > 1:
            notes.append("DualPipe has each stage on two ranks; nothing here runs it.")
        if self.layers.recompute == "light":
            notes.append("Light recomputation is DeepSeek-V3's; nothing here runs it.")
        if self.spec.mtp:
            notes.append(f"{self.spec.name}'s module for a further token is left out.")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """The bill as plain data: inputs, seconds by part, bytes by axis, rows."""
        each, speeds = self.layers, self.layers.speeds
        inputs = {"model": self.spec.name, "cluster": self.cluster.name, **asdict(self.layout), "batch": each.batch,
                  "seq": each.seq, "dtype": each.dtype, "arithmetic": each.arithmetic, "handed": each.handed,
                  "recompute": each.recompute, "speeds": asdict(speeds) | {"measured": sorted(speeds.measured)}}
        sent = {axis: {"inside": inside, "between": between} for axis, (inside, between) in self.sent.items()}
        return {**inputs, "seconds": self.seconds, "parts": self.parts, "sent": sent, "tokens": self.tokens,
                "tokens_per_second": self.tokens_per_second, "flop": self.flop, "utilisation": self.utilisation,
                "bubble_over_total": self.bubble_over_total, "bottleneck": self.bottleneck, **super().to_dict()}

    def _why(self, name: str) -> str:
        """What is sent for it, if anything, and over which link."""
        axis = next((axis for axis, part in NAMES.items() if part == name), None)
        if axis is None:
            return ""
        where = zip(self.sent[axis], (self.cluster.inside, self.cluster.between), strict=True)
        ways = [f"{decimal(nbytes)} over {link.name}" for nbytes, link in where if nbytes]
        return f"{' and '.join(ways)}, {self.layers.groups[axis].ranks} ranks; " if ways else ""
