"""The ladder for training: what to try, in which order, before a model is cut to be trained, and then the cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..specs import CardSpec, Layout, ModelSpec, dtype_of, find_link
from ..specs.check import whole
from ..specs.units import decimal, seconds
from .memory_bill import MemoryBill
from .step import Step, bigger, none_bigger, tensor_degrees
from .time import training_flops
from .training import RESERVE, training


@dataclass(frozen=True, kw_only=True)
class Train:
    """A step on `batch` × `seq` tokens on each replica: weights in `dtype`, `master` weights (None: without), the
    `optimizer`'s states, `recompute` as the model takes it."""

    batch: int = 1
    seq: int = 4096
    dtype: str = "bf16"
    master: str | None = "fp32"
    optimizer: str = "adamw"
    recompute: str | None = None
    reserve: str = RESERVE

    def __post_init__(self):
        whole("batch", self.batch)
        whole("seq", self.seq)

    def bill(self, spec: ModelSpec, layout: Layout | None = None, recompute: str | None = None) -> MemoryBill:
        """What each rank holds of this step; `recompute` overrides the task's."""
        return training(spec, layout, batch=self.batch, seq=self.seq, dtype=self.dtype, master=self.master,
                        optimizer=self.optimizer, recompute=recompute or self.recompute, reserve=self.reserve)


def train_rungs(spec: ModelSpec, card: CardSpec, task: Train, cards: int) -> Iterator[Step]:
    """The rungs in order, without an end: the caller stops at the first that does."""
    plain = task.bill(spec)
    yield _fits("one card", plain, card)
    full = task.bill(spec, recompute="full")
    if task.recompute != "full":
        yield _fits("recompute in full", full, card, "; backward computes every layer again, a third more arithmetic")
    yield _offload(spec, card, task)
    yield _bigger_card(card, plain, full)
    yield from _cut(spec, card, task, cards)


def _fits(name: str, bill: MemoryBill, card: CardSpec, more: str = "") -> Step:
    states = bill.held
    if bill.per_rank <= card.memory:
        return Step(name, "yes", bill.per_rank, f"{decimal(bill.per_rank)} of {decimal(card.memory)}{more}", bill)
    per = states / sum(bill.elements.values())
    why = (f"does not fit: {decimal(states)} of weights, gradients and states ({per:.3g} B a parameter) in "
           f"{decimal(card.memory)}" if states > card.memory else
           f"does not fit: {decimal(bill.per_rank - states)} of activations and buffers beside {decimal(states)} of "
           f"states in {decimal(card.memory)}")
    return Step(name, "no", bill.per_rank, why, bill)


def _offload(spec: ModelSpec, card: CardSpec, task: Train) -> Step:
    """Optimizer states with the host, which steps there: gradients go down and weights come back once a step
    (ZeRO-Offload, arXiv:2101.06840). It costs nothing as long as the arithmetic takes longer."""
    ways = {recompute: task.bill(spec, recompute=recompute) for recompute in dict.fromkeys((task.recompute, "full"))}
    left = {recompute: bill.per_rank - bill.states for recompute, bill in ways.items()}
    recompute = next((way for way, held in left.items() if held <= card.memory), None if None in left else "full")
    bill, held = ways[recompute], left[recompute]
    if card.host_link is None or held > card.memory:
        why = "its link to the host isn't known" if card.host_link is None else (
            f"{decimal(min(left.values()))} are left on the card without optimizer states, of {decimal(card.memory)}")
        return Step("offload the optimizer", "no", min(left.values()), why)
    if dtype_of(task.dtype).name not in card.flops:
        return Step("offload the optimizer", "no", held, f"the card has no arithmetic in {task.dtype} that is known")
    link, again = find_link(card.host_link), recompute == "full"
    wire = (bill.gradients + bill.weights) / link.per_direction
    work = training_flops(spec.active, task.batch * task.seq) * (4 / 3 if again else 1) / card.flop_rate(task.dtype)
    how = ", recomputing in full" if again else ""
    why = (f"{decimal(held)} stay on the card{how}; gradients down and weights up over {link.name} take "
           f"{seconds(wire)} a step, the arithmetic {seconds(work)} or more")
    return Step("offload the optimizer", "yes" if wire <= work else "would", held, why)


def _bigger_card(card: CardSpec, plain: MemoryBill, full: MemoryBill) -> Step:
    """The smallest card that does it alone. It sends nothing, so it comes before the cut."""
    for other in bigger(card):
        for bill, how in ((plain, ""), (full, ", recomputing in full")):
            step = _fits(f"a bigger card, {other.name}", bill, other, f"{how}, and no collective")
            if step.does == "yes":
                return step._replace(does="would")
    return none_bigger(card, full.per_rank)


def _cut(spec: ModelSpec, card: CardSpec, task: Train, cards: int) -> Iterator[Step]:
    """The data axis first, its states shared out (ZeRO), as far as it takes; recomputation only if that won't do; then
    tensor parallelism inside a domain beside it."""
    for tp in (1, *tensor_degrees(spec, card, cards)):
        dp = cards // tp
        for recompute in dict.fromkeys((task.recompute, "full")):
            whole = task.bill(spec, Layout(tp), recompute)
            for stage in (1, 2, 3) if dp > 1 else (0,):
                if _at_least(whole, stage, dp) > card.memory:
                    continue  # the bill, which takes longer, would only say so to the byte
                bill = task.bill(spec, Layout(tp, dp=dp, zero=stage), recompute)
                if bill.per_rank <= card.memory:
                    again = ", recomputing in full" if recompute == "full" else ""
                    cuts = [f"tensor parallel over {tp}"] * (tp > 1) + [f"ZeRO-{stage} over {dp}"] * (dp > 1)
                    step = _fits(f"cut, {' and '.join(cuts)}", bill, card, f" on each card{again}")
                    yield step._replace(cards=dp * tp)
                    return
    yield from _further(spec, card, task, cards)


def _further(spec: ModelSpec, card: CardSpec, task: Train, cards: int) -> Iterator[Step]:
    """ZeRO-3 with the optimizer's states on the host, as ZeRO-Infinity has them (arXiv:2104.07857), which nothing here
    runs; or what binds, and how many cards would do."""
    bill = task.bill(spec, recompute="full")
    if cards > 1 and card.host_link:
        shared = task.bill(spec, Layout(dp=cards, zero=3), "full")
        held = shared.per_rank - shared.states
        if held <= card.memory:
            why = (f"{decimal(held)} of {decimal(card.memory)} on each card, recomputing in full, the optimizer's "
                   "states on the host (as ZeRO-Infinity has them; nothing here runs it)")
            yield Step(f"cut and offload, ZeRO-3 over {cards}", "would", held, why)
            return
    beside = bill.per_rank - bill.held
    room = card.memory - beside
    why = (f"{decimal(beside)} of activations and buffers in {decimal(card.memory)}: a smaller batch, its gradients "
           "summed over several passes, or a shorter sequence")
    if room > 0:
        why = f"{decimal(bill.held)} of weights, gradients and states ask for about {math.ceil(bill.held / room)} cards"
    yield Step("cut further", "no", bill.held // cards, why)


def _at_least(bill: MemoryBill, stage: int, dp: int) -> int:
    """Bytes on a rank, from below, when ZeRO's `stage` shares out over `dp` ranks what the `bill` has whole: from stage
    1 the optimizer's states, from 2 the gradients, at 3 the weights (arXiv:1910.02054, §5)."""
    kinds = ((1, bill.states), (2, bill.gradients), (3, bill.weights))
    shared = sum(nbytes // dp if stage >= first else nbytes for first, nbytes in kinds)
    return bill.per_rank - bill.held + shared - bill.steps
