"""The bill of a pipeline's ranks, and what it can be asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..specs import Layout, ModelSpec
from ..specs.check import whole as whole_number
from .bill import Bill, Row
from .pipeline_rows import rows_of
from .pipeline_stages import StageBill
from .pipeline_traffic import PipelineAxis, Routes
from .places import within
from .traffic import TrafficBill, merged


@dataclass(frozen=True)
class RankBill:
    """Bytes that one rank holds, and sends in a step: at place `rank` of the pipeline, and `number` of all ranks.

    `live` counts, where it keeps most between two actions, the micro-batches of each stage whose backward is to come,
    `late` those whose weight gradients are; `activations` is what is kept for them. `peak` is the most inside of an
    action, gradients on their way back left out, but for those of the logits. `forward` and `backward` are bytes sent
    to other stages, in `messages` messages.
    """

    rank: int
    number: int
    stages: tuple[StageBill, ...]
    parameters: int
    weights: int
    gradients: int
    states: int
    live: dict[int, int]
    late: dict[int, int]
    activations: int
    peak: int
    forward: int
    backward: int
    messages: int

    @property
    def held(self) -> int:
        """Bytes of weights, gradients, states, and of activations at most."""
        return self.weights + self.gradients + self.states + self.peak


@dataclass(frozen=True, repr=False)
class RankTraffic(TrafficBill):
    """What one rank hands to messages and collectives in a step."""

    rank: int = 0

    @property
    def title(self) -> str:
        return f"{super().title}, on rank {self.rank} of its pipeline".replace(" by each rank", "")


@dataclass(frozen=True, repr=False, eq=False)
class PipelineBill(Bill):
    """The ranks of a pipeline: at each place one of as many as its stages are cut and copied over, which are alike but
    for what ZeRO shares out and routers choose. `ranks` has of each place the one that holds most; `at` has any.

    `layout` is that of all ranks.
    """

    spec: ModelSpec
    layout: Layout
    axis: PipelineAxis
    microbatches: int
    recompute: str | None
    optimizer: str
    frozen: tuple[str, ...]
    ranks: tuple[RankBill, ...]
    bill_of: Callable[[int, int | None], RankBill]

    def __getitem__(self, place: int) -> RankBill:
        return self.ranks[place]

    def at(self, rank: int) -> RankBill:
        """The bill of this rank of all the layout's. Raises ValueError where there is none."""
        return self.bill_of(self.layout.place(rank)["pp"], within(self.layout, rank))

    @property
    def hop(self) -> int:
        """Bytes of one message: a micro-batch's stream, or a rank's slice of it."""
        return self.axis.hop

    @property
    def largest(self) -> RankBill:
        """The rank that holds most, the first of equals."""
        return max(self.ranks, key=lambda each: each.held)

    def traffic(self, rank: int | RankBill, *, start: bool = False, clip: bool = False, loop: bool = False,
                routed: Routes = None) -> RankTraffic:
        """All that the rank at that place hands to messages and collectives in a step: `execute.run`, `grads.finish`
        and what ZeRO does behind the optimizer's step; with `start` also what the cuts send, with `clip` the norm of
        the gradients, with `loop` all that `train.step` sends. Give `at(rank)` for another rank than the one that holds
        most. A message counts with its sender and, its room being handed in, with its receiver; only the sender's is
        wire. Where ep shares out experts, `routed[r]` is what rank r of all has chosen, its `Routing.counts` in the
        order of its passes; "even" is the bill of experts that are asked for alike. With a balance loss the step's loss
        is summed, not sent by the last rank: the same 8 bytes. Raises ValueError where `routed` is wanted or is of
        other passes, and on tp for a model that is no Llama.
        """
        saved, one = self.axis.saved, rank if isinstance(rank, RankBill) else self.ranks[rank]
        calls = self.axis.at(one.rank, within(self.layout, one.number), routed).calls(start, clip, loop)
        return RankTraffic(self.spec, self.layout, saved.batch, saved.seq, self.axis.dtype, tuple(merged(calls)),
                           self.recompute, self.microbatches, one.rank)

    def stashed(self, rank: int) -> int:
        """Bytes of weights that PipeDream would keep on the rank, all versions: see `weight_versions`."""
        if any(len(each.stages) > 1 for each in self.ranks):
            raise ValueError("PipeDream has one stage on each rank: give a schedule of that kind, such as 1F1B")
        return weight_versions(len(self.ranks), rank) * self.ranks[rank].weights

    @property
    def title(self) -> str:
        s, one = self.axis.saved, self.axis.layout
        cut = f" × {one.degrees}" if one.world_size > 1 else ""
        return (f"{self.spec.name}, {len(self.axis.homes)} stages on {len(self.ranks)} ranks{cut}, "
                f"{self.microbatches} micro-batches of {s.batch} × {s.seq} tokens, {self.axis.dtype.name}, "
                f"{self.recompute or 'no'} recomputation")

    @property
    def rows(self) -> list[Row]:
        return rows_of(self)

    @property
    def footnotes(self) -> list[str]:
        notes = ["activations: kept for backward, between two actions of the rank"]
        if self.layout.zero:
            notes.append("of the ranks at a place the one that holds most: others differ by padding and step counters")
        if self.frozen:
            notes.append("activations as if nothing were frozen, which is a bound from above")
        if any(len(homes) > 1 for homes in self.axis.homes.values()):
            notes.append("stages on two ranks: no run of ours is behind it")
        if self.axis.saved.device != "cpu" or self.spec.beyond_llama or self.layout.cp > 1:
            notes.append("activations from shapes, no run of ours is behind them")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """The account as plain data: inputs, each rank's bytes, rows."""
        s = self.axis.saved
        inputs = {"model": self.spec.name, **asdict(self.layout), "batch": s.batch, "seq": s.seq,
                  "dtype": self.axis.dtype.name, "recompute": self.recompute, "optimizer": self.optimizer,
                  "frozen": list(self.frozen), "device": s.device, "microbatches": self.microbatches, "hop": self.hop}
        ranks = [asdict(each) | {"stages": [_plain(stage) for stage in each.stages]} for each in self.ranks]
        return {**inputs, "ranks": ranks, **super().to_dict()}


def weight_versions(ranks: int, rank: int) -> int:
    """How many versions of its weights PipeDream keeps on a rank (arXiv:1806.03377, §3.3): p − r of them, since a
    micro-batch's backward pass takes the weights of its forward pass, and there are as many under way as there are
    stages from here to the end. With a flush, as all schedules here have, it is one. A formula with no run behind it.
    """
    ranks, rank = whole_number("ranks", ranks), whole_number("rank", rank, 0)
    if rank >= ranks:
        raise ValueError(f"rank = {rank} is none of {ranks} ranks: the last is {ranks - 1}")
    return ranks - rank


def _plain(bill: StageBill) -> dict[str, Any]:
    n = bill.stage.layers
    return {"stage": bill.stage.number, "layers": [n.start, n.stop], "kept": bill.kept, "put_off": bill.put_off,
            "passing": bill.passing}
