"""What a step sends over the tensor axis: the sums that end each pair of cut layers, and what comes before them.

Exact in payload, call by call, for `parallel.tensor.cut` and `parallel.grads.finish`: two all-reduces a layer forward
and two backward (Megatron-LM, arXiv:1909.08053, §3), and those of embedding, head and loss. Sequence parallelism makes
each of them a reduce-scatter and an all-gather (arXiv:2205.05198, §4.2.2), and with "again" gathers in backward what it
has not kept. A block computed again repeats its collectives up to its feed-forward block's sum, before which PyTorch
stops since backward needs nothing behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..specs import Dtype, Layout, ModelSpec, padded
from .collective import Collective, Phase
from .parameters import Parameter, Parameters, Stage


@dataclass(frozen=True)
class TensorAxis:
    """The calls of one rank over its tensor axis, in one pass of `tokens` tokens through the model, or through a stage
    of it, whose input backward comes to always. `parameters` are the whole model's."""

    spec: ModelSpec
    parameters: Parameters
    layout: Layout
    tokens: int
    dtype: Dtype
    stage: Stage | None = None

    @property
    def _part(self) -> Stage:
        return self.stage or Stage(0, range(self.spec.layers), True, True)

    def forward(self) -> Iterator[Collective]:
        """Sums of what the ranks looked up or computed in part; with a cut sequence, slices are gathered before."""
        yield self._out("forward", "embedding", int(self._part.first))
        for block in ("attention", "mlp"):
            yield from self._in("forward", f"{block} in", len(self._part.layers))
            yield self._out("forward", f"{block} out", len(self._part.layers))
        yield from self._in("forward", "head in", int(self._part.last))

    def loss(self) -> Iterator[Collective]:
        """Cross-entropy over a cut vocabulary: the largest logit, then exponentials and the target's logit."""
        precise = max(4, self.dtype.bytes)  # the loss is taken in fp32 at least
        for what, numbers in (("loss, largest logit", 1), ("loss, sum and target", 2)):
            text = f"{self._counted(self.tokens)} × {numbers} × {precise} B"
            yield self._call("all_reduce", "forward", what, 1, self.tokens * numbers * precise, text)

    def logits(self) -> Iterator[Collective]:
        """Each rank's part of the vocabulary, to every rank."""
        part = padded(self.spec.vocab, self.layout.tp) // self.layout.tp
        text = f"{self._counted(self.tokens)} × {part:,} × {self.dtype.bytes} B"
        yield self._call("all_gather", "forward", "logits", 1, self.tokens * part * self.dtype.bytes, text)

    def backward(self, again: bool) -> Iterator[Collective]:
        """Sums of the gradients that the ranks have of what all of them read, as far down as something is trained; of
        blocks computed again, their own sums before that."""
        if again:
            count = self._layers("mlp.down_proj.weight")
            yield from self._in("backward", "attention in, again", count)
            yield self._out("backward", "attention out, again", count)
            yield from self._in("backward", "mlp in, again", count)
        head = self._part.last
        yield from self._back("head in", int(head and self._reached("norm.weight")), head and self._trains("lm_head"))
        for block, norm, last, first in (
                ("mlp", "post_attention_layernorm", "mlp.down_proj", ("mlp.gate_proj", "mlp.up_proj")),
                ("attention", "input_layernorm", "self_attn.o_proj",
                 ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))):
            if self.layout.sp:
                yield self._sliced("all_gather", "backward", f"{block} out", self._layers(f"{last}.weight"))
            wanted = sum(any(self._trains(f"layers.{i}.{name}") for name in first) for i in self._part.layers)
            yield from self._back(f"{block} in", self._layers(f"{norm}.weight"), wanted)
        if self.layout.sp:
            looked_up = int(self._part.first and self._reached("embed_tokens.weight"))
            yield self._sliced("all_gather", "backward", "embedding", looked_up)

    def finish(self, held: dict[str, int], width: int) -> Iterator[Collective]:
        """Gradients of weights that several ranks hold, each with a part of them: copied KV heads, norms of heads, with
        a cut sequence all that is whole. One call for each group of ranks, of the numbers `held`, `width` bytes each.
        """
        parts: dict[int, list[Parameter]] = defaultdict(list)
        for each in self.parameters.trained:
            if each.copies > 1 and held.get(each.name):
                parts[each.copies].append(each)
        for ranks, some in parts.items():
            kinds = dict.fromkeys(each.name.removesuffix(".weight").split(".", 2)[-1] for each in some)
            numbers = sum(held[each.name] for each in some)
            yield self._call("all_reduce", "finish", ", ".join(kinds), 1, numbers * width, f"{numbers:,} × {width} B",
                             ranks)

    def clip(self) -> Iterator[Collective]:
        """The sum of squares of what ranks have different parts of."""
        if self.layout.tp > 1 and any(each.cut for each in self.parameters.trained):
            yield self._call("all_reduce", "clip", "norm", 1, 8, "1 × 8 B")

    def _trains(self, module: str) -> bool:
        """Whether the module's weight is trained; a tied head's is the embedding's."""
        name = "embed_tokens" if module == "lm_head" and self.spec.tied else module
        return next(each.trained for each in self.parameters if each.name == f"{name}.weight")

    def _layers(self, name: str) -> int:
        """In how many layers backward comes to the output of that weight."""
        return sum(self._reached(f"layers.{i}.{name}") for i in self._part.layers)

    def _reached(self, name: str) -> bool:
        return not self._part.first or self.parameters.reached(name)

    def _in(self, phase: Phase, what: str, count: int) -> Iterator[Collective]:
        """Into cut layers: a whole stream is there, a cut one is gathered."""
        if self.layout.sp:
            yield self._sliced("all_gather", phase, what, count)

    def _out(self, phase: Phase, what: str, count: int) -> Collective:
        """Out of cut layers: the sum of the ranks' parts, to all or to each its slice."""
        return self._hidden("reduce_scatter" if self.layout.sp else "all_reduce", phase, what, count)

    def _back(self, what: str, count: int, wanted: int) -> Iterator[Collective]:
        """Gradients of the input of cut layers; `wanted` is how often backward wants the whole input too."""
        yield self._out("backward", what, count)
        if self.layout.sp == "again":
            yield self._sliced("all_gather", "backward", f"{what}, again", wanted)

    def _hidden(self, op: str, phase: Phase, what: str, count: int) -> Collective:
        tokens = padded(self.tokens, self.layout.tp) if self.layout.sp else self.tokens
        return self._stream(op, phase, what, count, tokens)

    def _sliced(self, op: str, phase: Phase, what: str, count: int) -> Collective:
        return self._stream(op, phase, what, count, padded(self.tokens, self.layout.tp) // self.layout.tp)

    def _stream(self, op: str, phase: Phase, what: str, count: int, tokens: int) -> Collective:
        h, width = self.spec.hidden, self.dtype.bytes
        return self._call(op, phase, what, count, tokens * h * width, f"{self._counted(tokens)} × {h:,} × {width} B")

    @staticmethod
    def _counted(tokens: int) -> str:
        return f"{tokens:,} token{'s' if tokens > 1 else ''}"

    def _call(self, op: str, phase: Phase, what: str, count: int, payload: int, derivation: str,
              ranks: int | None = None) -> Collective:
        return Collective("tp", op, phase, what, count, payload, ranks or self.layout.tp, derivation)
