"""How a model is laid out over ranks: the degree of each cut, and where the ranks of each cut stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal

from ..schedule import CHUNKS, SCHEDULES, Orders, sized
from .check import whole
from .layout_check import check_model, divisors, joined

if TYPE_CHECKING:
    from .model import ModelSpec

ORDER = "pp-dp-tp"


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism; 1 leaves something whole. pp · dp · cp · tp ranks.

    `tp`: ranks that share each layer (tensor parallelism). `dp`: ranks, or groups of cp · tp ranks, that have one
    replica each and different data. `zero`: what the replicas share out among them (ZeRO's stage): 1 optimizer states,
    2 also gradients, 3 also weights; 0 nothing. `sp`: whether what lies between the cut layers is cut along the
    sequence over the tp ranks (sequence parallelism); the input that a cut layer gathers is then kept for backward
    ("keep"), or gathered again ("again"). `cp`: ranks, or groups of tp ranks, that share each sequence (context
    parallelism).

    `pp`: ranks, or groups of dp · cp · tp ranks, with some of the layers each (pipeline parallelism). They run the
    `schedule`, one of `schedule.SCHEDULES`, which None stands for "1f1b" in, with `chunks` stages on each rank.
    `microbatches` is how many of them each replica runs in a step, one after the other where pp = 1.

    `ep`: ranks, or groups of `etp` ranks, that share a layer's experts (expert parallelism). They are ranks that the
    others make already, for which it doesn't count: tokens travel between them. `etp` is how many ranks share one
    expert: tp, which None stands for, or 1, where experts are whole and each of the tp ranks has a part of the tokens.

    `order` says which axis lies over ranks far apart and which over neighbours, the outermost first; cp goes with dp,
    inside of it. In the default order rank = ((stage · dp + data) · cp + context) · tp + tensor coordinate, and of the
    ranks of a stage, rank // etp % ep is the part of the experts it has: what is sent most often stays among
    neighbours. Raises ValueError on degrees that are no whole numbers above 0, and on what does not go together.
    """

    tp: int = 1
    dp: int = field(default=1, kw_only=True)
    pp: int = field(default=1, kw_only=True)
    cp: int = field(default=1, kw_only=True)
    ep: int = field(default=1, kw_only=True)
    etp: int | None = field(default=None, kw_only=True)
    zero: int = field(default=0, kw_only=True)
    sp: Literal[False, "keep", "again"] = field(default=False, kw_only=True)
    schedule: str | None = field(default=None, kw_only=True)
    microbatches: int = field(default=1, kw_only=True)
    chunks: int = field(default=1, kw_only=True)
    order: str = field(default=ORDER, kw_only=True)

    def __post_init__(self):
        for degree in ("tp", "dp", "pp", "cp", "ep", "microbatches", "chunks"):
            whole(degree, getattr(self, degree))
        if whole("zero", self.zero, 0) > 3:
            raise ValueError(f"zero = {self.zero} is no stage of ZeRO: 1 shares out optimizer states, 2 gradients too, "
                             "3 weights too, 0 nothing")
        if self.zero and self.data_ranks == 1:
            raise ValueError(f"zero = {self.zero} shares out over the ranks of the data axis, and dp = 1 is a single "
                             "one: give dp of 2 or more, or zero = 0")
        if self.sp is not False and self.sp not in ("keep", "again"):
            raise ValueError(f"sp must be False, 'keep' or 'again', not {self.sp!r}: what sequence parallelism gathers "
                             "is kept for backward, or gathered again")
        if self.sp and self.tp == 1:
            raise ValueError(f"sp = {self.sp!r} cuts the sequence over the ranks of the tensor axis, and tp = 1 is a "
                             "single one: give tp of 2 or more, or sp = False")
        if not isinstance(self.order, str) or sorted(self.order.split("-")) != sorted(ORDER.split("-")):
            raise ValueError(f"order = {self.order!r} must name each axis of {ORDER!r} once, the outermost first")
        self._check_pipeline()
        self._check_experts()

    def _check_pipeline(self) -> None:
        name, pp = self.schedule, self.pp
        if name is not None and name not in SCHEDULES:
            raise ValueError(f"schedule = {name!r} is none of {', '.join(SCHEDULES)}")
        if pp == 1:
            if name is not None or self.chunks > 1:
                raise ValueError(f"schedule = {name!r}, chunks = {self.chunks}: they are a pipeline's, and pp = 1 is a "
                                 "single stage: give pp of 2 or more, or leave them out")
            return
        if self.zero > 1:
            raise ValueError(f"zero = {self.zero} sums gradients in every backward pass, which with pp = {pp} is once "
                             "for each micro-batch: take zero = 1, which does so once a step, or pp = 1")
        if self.kind == "interleaved":
            if self.chunks == 1:
                raise ValueError("interleaved with chunks = 1 is 1f1b: give chunks of 2 or more, or schedule = '1f1b'")
        elif self.chunks != (own := CHUNKS[self.kind]):
            raise ValueError(f"{self.kind} has {own} stage{'s' * (own > 1)} on each rank, not chunks = {self.chunks}: "
                             f"give chunks = {own}, or schedule = 'interleaved', which has several in turn")
        sized(self.kind, pp, self.microbatches, self.chunks)

    def _check_experts(self) -> None:
        if self.etp is not None and whole("etp", self.etp) not in (1, self.tp):
            raise ValueError(f"etp = {self.etp}: an expert is cut as the layers are, etp = tp = {self.tp}, or is whole "
                             "on a rank, etp = 1")
        if self.expert_sites % self.ep:
            among = f"dp · cp = {self.data_ranks}" if self.expert_tp == self.tp else (
                f"dp · cp · tp = {self.stage_ranks}")
            raise ValueError(f"ep = {self.ep} does not divide {among} ranks, which experts are shared out over: ep can "
                             f"be {joined(divisors(self.expert_sites))}")
        if self.ep > 1 and self.order not in (ORDER, "dp-tp-pp"):
            raise ValueError(f"ep = {self.ep} lies over neighbours of a stage, which order = {self.order!r} parts: "
                             f"take {ORDER!r} or 'dp-tp-pp'")

    @property
    def world_size(self) -> int:
        """How many ranks the layout needs."""
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """How many ranks have the same layers, or parts of them."""
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of tp ranks, with tokens of their own: their gradients are summed, ZeRO shares out over
        them."""
        return self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """How many ranks share one expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_replicas(self) -> int:
        """How many ranks hold the same part of the same experts."""
        return self.stage_ranks // (self.ep * self.expert_tp)

    @property
    def spreads(self) -> bool:
        """Whether experts lie over other ranks than the rest of the model."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def expert_sites(self) -> int:
        """Ranks of a stage, or groups of etp of them, that may have experts of their own."""
        return self.stage_ranks // self.expert_tp

    @property
    def stages(self) -> int:
        """How many stages the layers are cut into; of DualPipe's each is on two ranks."""
        return self.pp if self.schedule == "dualpipe" else self.pp * self.chunks

    @property
    def kind(self) -> str:
        """The schedule's name, "1f1b" if none is given."""
        return self.schedule or "1f1b"

    @cached_property
    def orders(self) -> Orders | None:
        """The lists of actions that the pipeline's ranks do; None without a pipeline."""
        if self.pp == 1:
            return None
        chunks = {"chunks": self.chunks} if self.kind == "interleaved" else {}
        return SCHEDULES[self.kind](self.pp, self.microbatches, **chunks)

    @property
    def axes(self) -> dict[str, int]:
        """The axes and their sizes, outermost first: the last lies over neighbouring ranks."""
        sizes = {"pp": {"pp": self.pp}, "dp": {"dp": self.dp, "cp": self.cp}, "tp": {"tp": self.tp}}
        return {axis: size for name in self.order.split("-") for axis, size in sizes[name].items()}

    def place(self, rank: int) -> dict[str, int]:
        """The coordinates of `rank`, from 0, on each axis, and its parts of the experts ("ep"). Raises ValueError on a
        rank that there isn't."""
        if whole("rank", rank, 0) >= self.world_size:
            raise ValueError(f"rank = {rank} is none of {self.world_size} ranks: the last is {self.world_size - 1}")
        place, rest = {}, rank
        for axis, size in reversed(self.axes.items()):
            rest, place[axis] = divmod(rest, size)
        within = (place["dp"] * self.cp + place["cp"]) * self.tp + place["tp"]
        return {**{axis: place[axis] for axis in self.axes}, "ep": within // self.expert_tp % self.ep}

    def distance(self, axis: str) -> int:
        """How many ranks on the next one along the axis is: 1 are neighbours. For "ep" that is the next part of the
        experts, etp ranks of a stage on."""
        if axis == "ep":
            return self.expert_tp * self.distance("tp")
        sizes = list(self.axes.items())
        return prod(size for _, size in sizes[[name for name, _ in sizes].index(axis) + 1 :])

    @property
    def degrees(self) -> str:
        """The cuts that are made, in words: "dp = 4, tp = 2, ZeRO-3"; "tp = 1" where there are none."""
        axes = [f"{axis} = {getattr(self, axis)}" for axis in ("pp", "dp", "cp", "tp", "ep") if getattr(self, axis) > 1]
        axes = axes or ["tp = 1"]
        axes += ["etp = 1"] if self.expert_tp != self.tp else []
        more = [f"ZeRO-{self.zero}"] * (self.zero > 0) + [f"sequence parallel ({self.sp})"] * bool(self.sp)
        if self.pp > 1:
            more.append(self.kind + f" of {self.chunks} stages a rank" * (self.kind == "interleaved"))
        return ", ".join(axes + more)

    def check(self, spec: ModelSpec, redundant: int = 0) -> None:
        """Raise ValueError where `spec` can't be laid out so, with the numbers and the degrees that would do.

        Attention is cut by heads: tp divides the heads, and divides the KV heads or is a multiple of them (then several
        ranks hold the same KV head). Latent attention has no KV heads to cut. Feed-forward blocks (each
        expert's too) and the vocabulary are padded and ask for nothing. Each of the ep parts has equally many experts,
        `redundant` copies among them (`specs.placement`). Each stage has a layer at least.
        """
        check_model(self, spec, redundant)


def layout_of(layout: Layout | None) -> Layout:
    """`layout`, or that of one rank for None. Raises TypeError on anything else, such as a bare degree."""
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"a layout is wanted, not {layout!r}: Layout(tp=8)")
    return layout or Layout()


def served(layout: Layout | None) -> Layout:
    """`layout_of`, where no training is meant. Raises ValueError where the layout cuts what inference doesn't hold, or
    cuts sequences or the stream between layers, whose inference is not known here."""
    layout = staged(layout)
    if layout.cp > 1:
        raise ValueError(f"{layout.degrees}: the inference of sequences that are cut over ranks is not reckoned with "
                         "here: leave cp out")
    if layout.zero or layout.sp:
        raise ValueError(f"{layout.degrees}: what ZeRO and sequence parallelism save is held in training, and they are "
                         "not reckoned with here: leave zero and sp out")
    return layout


def staged(layout: Layout | None) -> Layout:
    """`layout_of`, for an account of all layers. Raises ValueError where a pipeline's ranks have some of them each."""
    layout = layout_of(layout)
    if layout.pp > 1:
        raise ValueError(f"pp = {layout.pp}: this is the account of ranks that have all layers, and a pipeline's ranks "
                         "differ: take cost.pipeline, or leave pp out")
    return layout
