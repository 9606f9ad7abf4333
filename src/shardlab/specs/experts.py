"""A mixture of experts: many feed-forward blocks, of which each token uses a few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .check import flag, number, whole
from .tensor import TensorSpec, linear


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of each layer but the `first_dense` ones (Shazeer et al., arXiv:1701.06538; DeepSeekMoE, 2401.06066).

    A router sends each token to `active` of `routed` experts, each a gated block of `ffn` hidden units; `shared` more
    of that size see every token. `bias`: experts and router have biases (gpt-oss). `routing_bias`: one number an expert
    is added to choose, not to weigh (DeepSeek-V3, arXiv:2412.19437, §2.1.2).

    An expert's `score` for a token is a "softmax" over all experts or its own "sigmoid". The weights of those chosen
    add up to 1 if `normalised`, and are multiplied by `scale`. Of `groups` of neighbouring experts, each token chooses
    among the `top_groups` whose two best score highest.

    Raises ValueError on sizes that are no whole numbers, on more active experts than there are to choose from, on
    groups of unequal size, or of one expert.
    """

    routed: int
    active: int
    ffn: int
    shared: int = 0
    first_dense: int = 0
    bias: bool = False
    routing_bias: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self):
        for name in ("routed", "active", "ffn", "groups", "top_groups"):
            whole(name, getattr(self, name))
        for name in ("shared", "first_dense"):
            whole(name, getattr(self, name), 0)
        for name in ("bias", "routing_bias", "normalised"):
            flag(name, getattr(self, name))
        number("scale", self.scale)
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score = {self.score!r}: experts are scored by a 'softmax' or by a 'sigmoid'")
        if self.active > self.routed:
            raise ValueError(f"{self.active} active experts of {self.routed}: a token can't use more than there are")
        self._check_groups()

    def _check_groups(self) -> None:
        if self.groups == 1 and self.top_groups == 1:
            return
        size, rest = divmod(self.routed, self.groups)
        if rest or size < 2:
            raise ValueError(f"{self.routed} experts don't make {self.groups} groups of equal size, of 2 or more")
        if not self.top_groups <= self.groups or self.active > self.top_groups * size:
            raise ValueError(f"a token takes {self.active} experts from {self.top_groups} of {self.groups} groups of "
                             f"{size}: there are not as many")

    def router(self, hidden: int) -> list[TensorSpec]:
        """What chooses, whole on every rank."""
        out = linear("mlp.gate", (self.routed, hidden), "router", "whole", self.bias)
        if self.routing_bias:
            out.append(TensorSpec("mlp.gate.e_score_correction_bias", (self.routed,), "router", "whole"))
        return out

    def one(self, hidden: int) -> list[TensorSpec]:
        """The weights of one routed expert."""
        return feed_forward("mlp.experts", hidden, self.ffn, "experts", self.bias)

    def sharing(self, hidden: int) -> list[TensorSpec]:
        """The weights of the shared experts, which are stored as one block."""
        return feed_forward("mlp.shared_experts", hidden, self.shared * self.ffn, "shared") if self.shared else []


def feed_forward(name: str, hidden: int, ffn: int, group: str, bias: bool = False, gated: bool = True
                 ) -> list[TensorSpec]:
    """The weights of a feed-forward block of `ffn` hidden units: gate, up and down, or up and down alone."""
    out: list[TensorSpec] = []
    for matrix in ("gate", "up") if gated else ("up",):
        out += linear(f"{name}.{matrix}_proj", (ffn, hidden), group, "column", bias)
    return out + linear(f"{name}.down_proj", (hidden, ffn), group, "row", bias)
