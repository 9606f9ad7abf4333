"""Expert parallelism: each rank has some of the experts, and tokens travel to those that they have chosen.

The ranks of a group have different tokens, as ranks of the data axis do. A layer sends each token to its experts'
ranks and gets what they make of it back, two all-to-alls forward and two backward. How many rows go where is known when
the router has chosen, and the ranks tell each other before the first:

    dispatch   rows sorted by expert → to the experts' ranks → sorted by expert there, whichever rank they come from
    combine    the same way back

No gradient is scaled: an expert adds up what all ranks' tokens ask of it, as the single process's does. (GShard,
arXiv:2006.16668, §2.2; uneven splits and no token dropped: MegaBlocks, arXiv:2211.15841.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm import ops, phase, regions
from ..model.moe import Experts, MoE
from ..model.router import Routing
from ..model.transformer import Transformer
from . import grads
from .agreement import differing


def cut(model: Transformer, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None = None) -> Transformer:
    """Keep this rank's experts of each layer, in place, and return the model.

    Every rank of the group calls it, on a plain model or one cut over a tensor axis; of n experts a layer, rank r of p
    keeps r·n/p to (r+1)·n/p, under the numbers they have in the whole. `replicas` is the group of the ranks that have
    the same experts, if there are others: they begin as those of its first rank, and `grads.finish` sums their
    gradients. What is no expert is whole on every rank: `data.replicate` the model over all ranks with tokens of their
    own, after this. Raises ValueError on a model without experts or whose experts are cut already, on one with a data
    axis or a pipeline, where the group does not divide the experts, and, on all ranks, where their models differ, or
    the experts of `replicas`.
    """
    layers = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    if model.spec.experts is None or not layers:
        raise ValueError(f"{model.spec.name} has no experts to cut: see its spec's `experts`")
    n, p = model.spec.experts.routed, group.size()
    if n % p:
        fit = [str(ranks) for ranks in range(1, n + 1) if n % ranks == 0]
        raise ValueError(f"{n} experts do not divide over {p} ranks: {', '.join(fit)} would do")
    if any(isinstance(layer.experts, ParallelExperts) for layer in layers):
        raise ValueError("this model's experts are cut already: cut the plain one")
    if hasattr(model, "reducer") or hasattr(model, "pipeline"):
        raise ValueError("this model has a data axis or a pipeline, which hold its parameters: cut it before that")
    if p == 1 and replicas is None:
        return model
    _apart(layers[0].experts, group)
    runs = [getattr(layer.run, "__name__", "") for layer in model.layers]  # computed again, or not
    plan = model.spec, model.rules, runs, layers[0].gate.weight.dtype
    with phase("start"):
        if (rank := differing(repr(plan).encode(), group)) is not None:
            raise ValueError(f"rank {rank} has another model or other rules than the first of its group, or computes "
                             "again what that keeps: build the same on all")
        if replicas and (rank := differing(repr((plan, p, group.rank())).encode(), replicas)) is not None:
            raise ValueError(f"rank {rank} has another model, or other experts, than the first of `replicas`: those "
                             "are the ranks at the same place of their groups")
    for layer in layers:
        layer.experts = ParallelExperts(layer.experts, group)
        for module in layer.experts.modules():
            for name in dict(module.named_parameters(recurse=False)):
                known = getattr(module, "marks", {}).get(name, grads.Mark())
                grads.mark(module, name, cut=(*known.cut, group), partial=replicas, spread=True)
        if replicas is not None:
            _equal(layer.experts, replicas)
    model.ends_early = False  # while other ranks' tokens may still come by
    return model


class ParallelExperts(Experts):
    """This rank's experts, for the tokens of all ranks of the group."""

    def __init__(self, plain: Experts, group: dist.ProcessGroup):
        size = len(plain) // group.size()
        names = list(plain)[group.rank() * size : (group.rank() + 1) * size]
        super().__init__({name: plain[name] for name in names})
        self.group = group

    def forward(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        if routing.handle is None:  # else backward computes it again: the ranks know
            routing.handle = meet(routing.counts, self.group, rows.device)
        handle: Handle = routing.handle
        return combine(self.apart(dispatch(rows, handle), handle.counts), handle)


@dataclass(frozen=True)
class Handle:
    """Which rows go where, for the way there and the way back."""

    group: dist.ProcessGroup
    given: list[int]  # rows from here to each rank
    taken: list[int]  # rows from each rank to here
    counts: list[int]  # of those taken, how many are each of this rank's experts'
    order: torch.Tensor  # sorts the rows taken by expert, each expert's by the ranks they come from
    back: torch.Tensor  # the inverse


def meet(counts: tuple[int, ...], group: dist.ProcessGroup,
         device: torch.device) -> Handle:
    """Tell each rank how many rows there are for each of its experts: `counts` (experts
    of the layer), of rows here."""
    p = group.size()
    mine = torch.tensor(counts, device=device)
    theirs = ops.all_to_all(mine, group=group).view(p, -1)  # (ranks, experts here)
    experts = torch.arange(theirs.shape[1], device=device).repeat(p)
    order = experts.repeat_interleave(theirs.flatten()).argsort(stable=True)
    return Handle(group, mine.view(p, -1).sum(1).tolist(), theirs.sum(1).tolist(),
                  theirs.sum(0).tolist(), order, order.argsort())


def dispatch(rows: torch.Tensor, handle: Handle) -> torch.Tensor:
    """rows (choices, hidden), sorted by expert → those of all ranks for this rank's
    experts, sorted by expert."""
    there = regions.all_to_all(rows, handle.given, handle.taken, handle.group)
    return there[handle.order]


def combine(rows: torch.Tensor, handle: Handle) -> torch.Tensor:
    """The inverse: what this rank's experts have made, back to the ranks whose tokens
    they are, sorted as there."""
    here = rows[handle.back]
    return regions.all_to_all(here, handle.taken, handle.given, handle.group)


def _apart(experts: Experts, group: dist.ProcessGroup) -> None:
    """Raise ValueError where ranks of the group have slices of the same experts: they would add up different ones."""
    ranks = set(dist.get_process_group_ranks(group))
    marks = [mark for module in experts.modules() for mark in getattr(module, "marks", {}).values()]
    for each in {axis for mark in marks for axis in mark.cut}:
        if len(both := ranks & set(dist.get_process_group_ranks(each))) > 1:
            raise ValueError(f"ranks {sorted(both)} have slices of the same experts, which tensor.cut has cut: spread "
                             "experts over ranks with the same slices, or leave them whole, tensor.cut(…, etp=1)")


@torch.no_grad()
def _equal(experts: Experts, replicas: dist.ProcessGroup) -> None:
    first = dist.get_process_group_ranks(replicas)[0]
    with phase("start"):
        for parameter in experts.parameters():
            if not parameter.is_meta:
                ops.broadcast(parameter.detach(), first, replicas)
