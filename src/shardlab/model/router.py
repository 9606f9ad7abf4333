"""The router of a mixture of experts: it scores the experts for each token, and the best few get the token.

Softmax over all experts, as in Mixtral (arXiv:2401.04088, §2.1), or a sigmoid of each, as in DeepSeek-V3
(arXiv:2412.19437, §2.1.2), where a number of each expert's own is added to choose by, not to weigh by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..specs.check import number
from ..specs.experts import Experts as ExpertsSpec


@dataclass(frozen=True)
class Rules:
    """How training treats experts that are asked for more than others.

    `capacity`: an expert takes that many times its even share of a pass's tokens, rounded up, and no more; None takes
    all (dropless). Where it is full, "position" keeps the first tokens, "weight" those whose weights for it are the
    largest (`drop`). `balance` is the coefficient of the load-balance loss. Raises ValueError on a capacity that is not
    above 0, on another `drop`, and on a negative coefficient.
    """

    capacity: float | None = None
    drop: Literal["position", "weight"] = "position"
    balance: float = 0.0

    def __post_init__(self):
        if self.capacity is not None:
            number("capacity", self.capacity)
        if self.drop not in ("position", "weight"):
            raise ValueError(f"drop = {self.drop!r}: a full expert keeps the first tokens, 'position', or those with "
                             "the largest weights, 'weight'")
        if not self.balance >= 0:
            raise ValueError(f"balance = {self.balance}: the coefficient of the load-balance loss is 0 or more")


@dataclass(eq=False)
class Routing:
    """What one pass through one layer has chosen, once: when backward computes the layer again, it goes by it.

    `real` (tokens,): the tokens that are there; padding goes to no expert. Of what the router fills in, `load`
    (routed,) is how many tokens have chosen each expert, and `dropped` how many of these choices found it full. Where
    the rules have a coefficient for it, `balance` is a scalar with gradients: Σ over experts of (share of the choices)
    · (mean probability) · (number of experts), 1 where both are even (Switch Transformer, arXiv:2101.03961, §2.2).
    """

    gate: Router
    real: torch.Tensor
    experts: torch.Tensor | None = None  # (tokens, active): the numbers of those chosen
    slots: torch.Tensor | None = None  # the choices that are kept, by expert: token · active + place
    counts: tuple[int, ...] = ()  # how many of them are each expert's
    load: torch.Tensor | None = None
    dropped: int = 0
    balance: torch.Tensor | None = None
    handle: Any = None  # of a cut: what its ranks have told each other

    @property
    def tokens(self) -> int:
        """How many tokens are there."""
        return int(self.real.sum())


class Router(nn.Module):
    """Chooses `active` of the `routed` experts for each token."""

    def __init__(self, hidden: int, spec: ExpertsSpec, rules: Rules):
        super().__init__()
        self.spec, self.rules = spec, rules
        weight = torch.empty(spec.routed, hidden)
        self.weight = nn.Parameter(weight if weight.is_meta else nn.init.normal_(weight, std=0.02))
        bias = torch.zeros(spec.routed) if spec.routing_bias else None
        self.e_score_correction_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if (bias := self.e_score_correction_bias) is not None and bias.dtype.itemsize < 4:
            bias.data = bias.data.float()  # it moves by thousandths, which 16 bits lose
        return self

    def forward(self, x: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """x (tokens, hidden) → weights (tokens, active) and scores (tokens, routed), the former of the experts in
        `routing`, which are chosen here the first time."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if self.spec.score == "softmax" else logits.sigmoid()
        if routing.experts is None:
            with torch.no_grad():
                routing.experts = self.choose(scores)
        weights = scores.gather(1, routing.experts)
        if self.spec.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * self.spec.scale).to(x.dtype), scores

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The experts (tokens, active) with the best of the scores (tokens, routed), the
        bias added."""
        spec = self.spec
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if spec.groups > 1:
            grouped = scores.unflatten(1, (spec.groups, -1))
            best = grouped.topk(2, -1).values.sum(-1).topk(spec.top_groups, -1).indices
            out = torch.ones_like(grouped[..., 0], dtype=torch.bool)
            out.scatter_(1, best, False)
            scores = grouped.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)
        return scores.topk(spec.active, -1).indices

    @torch.no_grad()
    def plan(self, routing: Routing, weights: torch.Tensor) -> None:
        """Sort the choices by expert, each expert's in the order of tokens, and leave out those that find it full."""
        assert routing.experts is not None
        if routing.slots is not None:
            return
        n, active = self.spec.routed, self.spec.active
        expert = routing.experts.flatten().where(routing.real.repeat_interleave(active), n)  # n: padding's
        load = torch.bincount(expert, minlength=n + 1)[:n]
        order = expert.argsort(stable=True)[: int(load.sum())]
        routing.load = load
        if self.rules.capacity is not None:
            most = self.capacity(routing.tokens)
            if self.rules.drop == "weight":
                by_weight = weights.flatten()[order].argsort(descending=True, stable=True)
                order = order[by_weight][expert[order[by_weight]].argsort(stable=True)]
            starts = load.cumsum(0) - load
            place = torch.arange(len(order), device=order.device) - starts[expert[order]]
            kept = order[place < most].sort().values
            order = kept[expert[kept].argsort(stable=True)]
            routing.dropped, load = int((load - most).clamp(min=0).sum()), load.clamp(max=most)
        routing.slots, routing.counts = order, tuple(load.tolist())

    def capacity(self, tokens: int) -> int:
        """How many of a pass's choices an expert takes, of so many tokens."""
        assert self.rules.capacity is not None
        return math.ceil(Fraction(str(self.rules.capacity)) * tokens * self.spec.active / self.spec.routed)

    def balance(self, scores: torch.Tensor, real: torch.Tensor, routing: Routing,
                whole: Callable[[torch.Tensor], torch.Tensor] = lambda part: part) -> None:
        """Give `routing` its balance, if the rules want it, from the scores (tokens, routed) of `real` (tokens,) ones.

        Sigmoids are divided by their sum first (DeepSeek-V3, eq. 18). Where these are some of the routing's tokens,
        `whole` adds up the parts.
        """
        if not self.rules.balance:
            return
        assert routing.load is not None
        if self.spec.score == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        mean = (scores * real.unsqueeze(-1)).sum(0) / max(routing.tokens, 1)
        share = routing.load.to(scores.dtype) / routing.load.sum().clamp(min=1)
        balance = whole(self.spec.routed * (share * mean).sum())
        if routing.balance is None:  # else backward has come by, which asks for the first pass's
            routing.balance = balance
