"""The parameters of a rank, in the order in which the model has them: what the data axis lays in rows and sends."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ..specs import Layout, ModelSpec, TensorSpec


class Parameter(NamedTuple):
    """What one of `tp` ranks holds of one weight: `numel` numbers, padding included; in which layer, None at the ends.

    `copies` is how many of the ranks hold the same with a part of its gradient each: 1 where none does. `cut` says
    whether the ranks together hold different parts of it. An expert is `spread` where experts lie over other ranks than
    the rest.
    """

    name: str
    layer: int | None
    numel: int
    copies: int
    cut: bool
    trained: bool
    spread: bool = False

    @property
    def whole(self) -> bool:
        """Whether it moves by a rule and ZeRO leaves it as it is: what balances the loads of experts."""
        return self.name.endswith("e_score_correction_bias")


class Stage(NamedTuple):
    """A stage of a pipeline: some layers, before them the embedding if it is `first`, behind them norm and head if it
    is `last`. A model that is not cut is both."""

    number: int
    layers: range
    first: bool
    last: bool

    @property
    def what(self) -> str:
        """In words: "layers 0–9, embedding"."""
        n = self.layers
        layers = [f"layers {n[0]}–{n[-1]}" if len(n) > 1 else f"layer {n[0]}"] if n else []
        ends = [name for name, there in (("embedding", self.first), ("norm, head", self.last)) if there]
        return ", ".join(layers + ends) or "no layer"


class Parameters(tuple[Parameter, ...]):
    """The parameters of a rank in the model's order; a tied head is the embedding, and not listed again."""

    def of(self, stages: Collection[Stage], tied: bool) -> Parameters:
        """Those that the stages are made of; a last one has the embedding too, where the head is `tied` to it."""
        layers = {layer for stage in stages for layer in stage.layers}
        first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
        table = first or (last and tied)
        return Parameters(
            each for each in self
            if (each.layer in layers if each.layer is not None
                else (table if each.name == "embed_tokens.weight" else first) if each.name.startswith("embed_")
                else last))

    @property
    def trained(self) -> list[Parameter]:
        """Those that are not frozen."""
        return [parameter for parameter in self if parameter.trained]

    def apart(self) -> tuple[Parameters, Parameters]:
        """Those that are not spread, and those that are: each are shared out over ranks of their own."""
        rest, spread = (Parameters(each for each in self if each.spread is kind) for kind in (False, True))
        return rest, spread

    def reached(self, name: str) -> bool:
        """Whether backward comes to the output of the weight `name`: whether it, or one before it, is trained."""
        for parameter in self:
            if parameter.trained:
                return True
            if parameter.name == name:
                return False
        raise ValueError(f"there is no {name}")


def parameters(spec: ModelSpec, tp: int = 1, sp: bool = False, frozen: Collection[str] = (), *, ep: int = 1,
               etp: int | None = None, part: int = 0, stages: Sequence[Stage] | None = None) -> Parameters:
    """What each of `tp` ranks holds of `spec`, or of these `stages` of it. `frozen` names weights, or modules with all
    weights inside them:
    ("embed_tokens", "layers.0.mlp.up_proj"). With `sp`, sequence parallelism, each rank has the gradients of its part
    of the sequence for weights that all hold whole. Of `ep` parts of each layer's experts the rank has number `part`,
    each expert cut over `etp` ranks (tp if None). Raises ValueError on a name that the model doesn't have."""
    if isinstance(frozen, str):
        raise ValueError(f"frozen = {frozen!r} is one name: give several, ({frozen!r},)")
    how = tp, sp, etp or tp, ep > 1 or etp not in (None, tp)
    layers = range(spec.layers) if stages is None else sorted(layer for stage in stages for layer in stage.layers)
    some = spec.experts.routed // ep if spec.experts else 0
    held = list(_held(spec, layers, range(part * some, (part + 1) * some), *how))
    if frozen:
        every = _held(spec, range(spec.layers), range(some * ep), *how)
        known = {name.rsplit(".", i)[0] for name, *_ in every for i in range(name.count(".") + 1)}
        if unmet := [name for name in frozen if name not in known]:
            tied = ": its head is the embedding's weight" if spec.tied and unmet[0].startswith("lm_head") else ""
            raise ValueError(f"{spec.name} has no {unmet[0]} to freeze{tied}")
        names = tuple(f"{name}." for name in frozen)
        held = [each._replace(trained=each.trained and not f"{each.name}.".startswith(names)) for each in held]
    return Parameters(held) if stages is None else Parameters(held).of(stages, spec.tied)


def parameters_of(spec: ModelSpec, layout: Layout, frozen: Collection[str] = (), rank: int = 0,
                  stages: Sequence[Stage] | None = None) -> Parameters:
    """What `rank` of `layout` holds, or would hold of these `stages`. Raises ValueError as `parameters` does."""
    return parameters(spec, layout.tp, bool(layout.sp), frozen, ep=layout.ep, etp=layout.expert_tp,
                      part=layout.place(rank)["ep"], stages=stages)


class Held(NamedTuple):
    """A weight and what a rank holds of it: of `whole` such tensors in the model, `times` of this `shape`. The layout's
    `together` ranks have `numbers` of it among them, copies included and padding left out."""

    tensor: TensorSpec
    whole: int
    times: int
    shape: tuple[int, ...]
    numbers: int


def together(layout: Layout) -> int:
    """The fewest neighbouring ranks that hold the model, equally often each part of the experts, and of the rest."""
    return math.lcm(layout.tp, layout.ep * layout.expert_tp)


def counted_in(spec: ModelSpec, stages: Sequence[Stage] | None) -> Iterator[tuple[int, TensorSpec]]:
    """`spec.counted`, of these stages; of the whole model if None. A last one has a tied embedding too."""
    if stages is None:
        yield from spec.counted()
        return
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    before, behind = spec.first_tensors(), spec.last_tensors() if last else []
    yield from ((1, tensor) for tensor in (*(before if first else before[: last and spec.tied]), *behind))
    for layers, kind in spec.kinds():
        there = sum(layer in layers for stage in stages for layer in stage.layers)
        yield from ((there * times, tensor) for times, tensor in kind if there)


def held_by_each(spec: ModelSpec, layout: Layout, redundant: int = 0, stages: Sequence[Stage] | None = None
                 ) -> Iterator[Held]:
    """Every different weight of `spec`, or of these `stages` of it, and what each rank of `layout` holds of it where
    nothing is shared out by ZeRO. `redundant` experts of a layer are copies of others."""
    ranks = together(layout)
    for whole, tensor in counted_in(spec, stages):
        p = layout.expert_tp if tensor.group in ("experts", "shared") else layout.tp
        parts, there = 1, whole
        if tensor.group == "experts" and spec.experts:
            parts = layout.ep
            there = whole // spec.experts.routed * (spec.experts.routed + redundant)
        copies = ranks // (parts * p) * tensor.copies(p)
        yield Held(tensor, whole, there // parts, tensor.local_shape(p), there * tensor.size * copies)


def _held(spec: ModelSpec, own: Sequence[int], experts: range, tp: int, sp: bool, etp: int, spread: bool
          ) -> Iterator[Parameter]:
    """Those of these layers, the model's ends and these experts, none frozen. Layers of a kind are alike, so each kind
    is looked at once."""
    for tensor in spec.first_tensors():
        yield Parameter(tensor.name, None, *_of(tensor, tp, sp), True)
    for layers, _ in spec.kinds():
        if not (there := [layer for layer in own if layer in layers]):
            continue
        alike = [(tensor.name, _of_experts(tensor, tp, sp, etp), spread and tensor.group == "experts")
                 for tensor in spec.layer_tensors(layers[0])
                 if tensor.group != "experts" or int(tensor.name.split(".")[2]) in experts]
        for layer in there:
            for name, of, apart in alike:
                each = Parameter(f"layers.{layer}.{name}", layer, *of, True, apart)
                yield each._replace(trained=not each.whole)
    for tensor in spec.last_tensors():
        yield Parameter(tensor.name, None, *_of(tensor, tp, sp), True)


def _of_experts(tensor: TensorSpec, tp: int, sp: bool, etp: int) -> tuple[int, int, bool]:
    """`_of`, where the experts, router and shared ones among them, are cut over `etp` ranks; if these are not all of
    `tp`, each of them has tokens of its own."""
    if etp == tp or tensor.group not in ("router", "experts", "shared"):
        return _of(tensor, tp, sp)
    return tensor.size, tp, False


def _of(tensor: TensorSpec, tp: int, sp: bool) -> tuple[int, int, bool]:
    """Its numbers on a rank, how many hold the same with a part of the gradient, and whether it is cut."""
    partial = tensor.cut in ("kv_heads", "shared") or (sp and tensor.cut == "whole")
    cut = tp > 1 and tensor.cut not in ("shared", "whole")
    return math.prod(tensor.local_shape(tp)), tensor.copies(tp) if partial else 1, cut
