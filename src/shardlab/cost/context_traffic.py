"""What a step sends over the context axis: keys and values, which go round in a ring; or heads, for which it is priced.

Exact in payload, call by call, for `parallel.ring` (Liu et al., arXiv:2310.01889): forward a rank sends its k and v
p − 1 times, or those of the others that came by; backward again, and as often their gradients, in fp32 at least. The
other way to cut attention is `heads`: an all-to-all turns a rank's tokens of all heads into all tokens of its heads,
for each of q, k, v and, back, the output (Ulysses, arXiv:2309.14509, §3.1). Nothing here runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..specs import Dtype, Layout, ModelSpec, padded
from .collective import Collective, Phase
from .parameters import Parameters, Stage


@dataclass(frozen=True)
class ContextAxis:
    """The calls of one rank over its context axis, in one pass of `batch` sequences of `seq` tokens through the model,
    whose `parameters` these are, or through a stage of it, whose input backward comes to always."""

    spec: ModelSpec
    parameters: Parameters
    layout: Layout
    batch: int
    seq: int
    dtype: Dtype
    stage: Stage | None = None

    @property
    def _layers(self) -> range:
        return self.stage.layers if self.stage else range(self.spec.layers)

    @property
    def tokens(self) -> int:
        """A rank's tokens, padding included: of each sequence two of 2cp chunks, of an uncut one all."""
        cp = self.layout.cp
        return self.batch * (padded(self.seq, 2 * cp) // cp if cp > 1 else self.seq)

    def forward(self) -> Iterator[Collective]:
        """Round goes each rank's k and v."""
        yield from self._round("forward", "keys and values", len(self._layers), self.dtype.bytes)

    def logits(self) -> Iterator[Collective]:
        """Each rank's tokens, to every rank."""
        numbers, width = self.tokens * self.spec.vocab, self.dtype.bytes
        yield Collective("cp", "all_gather", "forward", "logits", 1, numbers * width, self.layout.cp,
                         f"{self.tokens:,} tokens × {self.spec.vocab:,} × {width} B")

    def backward(self, recompute: str | None) -> Iterator[Collective]:
        """k and v again, and their gradients, where something at or before them is trained; and once more where the
        layer, or its attention core, is computed again."""
        reached = sum(self._reached(layer, attention=True) for layer in self._layers)
        again = {None: 0, "selective": reached, "full": sum(self._reached(layer) for layer in self._layers)}[recompute]
        yield from self._round("backward", "keys and values, computed again", again, self.dtype.bytes)
        yield from self._round("backward", "keys and values", reached, self.dtype.bytes)
        yield from self._round("backward", "their gradients", reached, max(4, self.dtype.bytes))

    def heads(self, phase: Phase) -> Iterator[Collective]:
        """What Ulysses would send instead: q, k and v there and the output back, or their gradients."""
        query, key, value, out = self._widths(self.spec.heads // self.layout.tp)
        for what, numbers in (("queries", query), ("keys", key), ("values", value), ("output", out)):
            payload = self.tokens * numbers * self.dtype.bytes
            yield Collective("cp", "all_to_all", phase, what, self.spec.layers, payload, self.layout.cp,
                             self._text(numbers, self.dtype.bytes), payload // self.layout.cp)

    def check_heads(self) -> None:
        """Raise ValueError where the ranks don't share out the heads that a rank of the tensor axis has."""
        heads, keys = (max(1, n // self.layout.tp) for n in (self.spec.heads, self._key_heads))
        fit = [str(cp) for cp in range(1, heads + 1) if heads % cp == 0 and keys % cp == 0]
        if str(self.layout.cp) not in fit:
            raise ValueError(f"cp = {self.layout.cp} does not share out {heads} heads and {keys} KV heads of "
                             f"{self.spec.name}, as an all-to-all of heads has to: cp can be {', '.join(fit)}")

    @property
    def _key_heads(self) -> int:
        return self.spec.heads if self.spec.latent else self.spec.kv_heads  # a latent's keys are there for each head

    def _widths(self, heads: int) -> tuple[int, int, int, int]:
        """Numbers of a token in queries, keys, values and output, of so many heads."""
        if latent := self.spec.latent:
            query = heads * (latent.nope_dim + latent.rope_dim)
            return query, query, heads * latent.value_dim, heads * latent.value_dim
        query, key = heads * self.spec.head_dim, max(1, self.spec.kv_heads // self.layout.tp) * self.spec.head_dim
        return query, key, key, query

    def _round(self, phase: Phase, what: str, layers: int, width: int) -> Iterator[Collective]:
        _, key, value, _ = self._widths(self.spec.heads // self.layout.tp)
        for numbers in (key, value):
            for op in ("send", "recv"):
                yield Collective("cp", op, phase, what, layers * (self.layout.cp - 1), self.tokens * numbers * width,
                                 self.layout.cp, self._text(numbers, width))

    def _text(self, numbers: int, width: int) -> str:
        return f"{self.tokens:,} tokens × {numbers:,} × {width} B"

    def _reached(self, layer: int, attention: bool = False) -> bool:
        """Whether something is trained in that layer or before; of the layer itself, with `attention`, only what is
        before its heads attend."""
        if self.stage and not self.stage.first:
            return True
        behind = (f"layers.{layer}.post_", f"layers.{layer}.mlp", f"layers.{layer}.self_attn.o_proj")
        before = (each for each in self.parameters.trained
                  if (each.name.startswith("embed_") if each.layer is None else each.layer <= layer))
        return any(not (attention and each.name.startswith(behind)) for each in before)
