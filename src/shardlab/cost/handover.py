"""A request's cache on its way from where its prompt was computed to where its answer is made.

    bytes        each rank's cache × the ranks that send one; of a latent one rank's, since all have the same
    B*           bytes ÷ seconds of the prefill: a link that is faster moves a cache in less time than it took to make
    in bulk      α + bytes/β, all of it waited for
    by layers    a layer leaves while the next is computed: the last one's part is waited for, or what lags behind
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..specs import Layout, LinkSpec, ModelSpec
from ..specs.check import number, whole
from ..specs.layout import served
from ..specs.units import decimal, seconds
from .bill import Bill, Row
from .kv import kv_cache
from .serve_parts import unspread


def kv_handed(spec: ModelSpec, tokens: int, layout: Layout | None = None, dtype: str = "bf16") -> int:
    """Bytes that a group of `layout` sends on for a request of `tokens` tokens: what each rank caches, so that KV heads
    of which several ranks have copies are sent as often (tokens · layers · 2 · max(KV heads, tp) · head_dim · bytes). A
    latent, which every rank has whole, is sent by one. Raises ValueError like `kv_cache`."""
    layout = served(unspread(layout or Layout()))
    return kv_cache(spec, tokens, layout, dtype) * (1 if spec.latent or spec.compressed else layout.tp)


@dataclass(frozen=True, repr=False, eq=False)
class Handover(Bill):
    """`nbytes` of cache, made in `prefill` seconds, sent over `ports` links of one kind at once."""

    spec: ModelSpec
    tokens: int
    nbytes: int
    prefill: float
    link: LinkSpec
    ports: int
    dtype: str

    @property
    def rate(self) -> float:
        """Bytes a second of all ports together."""
        return self.ports * self.link.per_direction

    @property
    def seconds(self) -> float:
        """Of the cache in one piece."""
        return (self.link.alpha or 0.0) + self.nbytes / self.rate

    @property
    def break_even(self) -> float:
        """B*, bytes a second at which the transfer takes as long as the prefill."""
        return self.nbytes / self.prefill

    @property
    def by_layers(self) -> float:
        """Seconds that nothing hides where each layer leaves as soon as it is computed: one layer's part, or what the
        link is behind when the prefill ends. Layers are taken to be alike, and each costs the link's α."""
        one, layers = (self.link.alpha or 0.0) + self.nbytes / self.rate / self.spec.layers, self.spec.layers
        return max(one, layers * one - self.prefill * (1 - 1 / layers))

    @property
    def title(self) -> str:
        return (f"{self.spec.name}: the cache of {self.tokens:,} tokens, made in {seconds(self.prefill)}, over "
                f"{self.ports} × {self.link.name}")

    @property
    def rows(self) -> list[Row]:
        return [Row("cache", f"{self.tokens:,} tokens in {self.dtype}, copies of heads included", self.nbytes),
                Row("B*", f"cache ÷ {seconds(self.prefill)}; the ports have {decimal(self.rate)}/s",
                    round(self.break_even / 1e9, 4), "GB/s"),
                Row("in bulk", "α + cache ÷ rate", round(1000 * self.seconds, 4), "ms",
                    f"{self.seconds / self.prefill:.1%} of the prefill"),
                Row("by layers", "what nothing hides", round(1000 * self.by_layers, 4), "ms",
                    f"{self.by_layers / self.seconds:.1%} of it")]

    def to_dict(self) -> dict[str, Any]:
        """The account as plain data: bytes, seconds, rates, rows."""
        kinds = ("tokens", "nbytes", "prefill", "ports", "rate", "seconds", "break_even", "by_layers")
        return {"model": self.spec.name, "link": self.link.name, "dtype": self.dtype,
                **{kind: getattr(self, kind) for kind in kinds}, **super().to_dict()}


def handover(spec: ModelSpec, tokens: int, layout: Layout | None = None, *, prefill: float, link: LinkSpec,
             ports: int | None = None, held: int = 0, dtype: str = "bf16") -> Handover:
    """The cache of a prompt of `tokens` tokens, computed on `layout` in `prefill` seconds and sent over `ports` links,
    one for each of its cards if None.

    Of a prompt that the prefill side finds in its own cache in part, `prefill` is what the rest took: the bytes stay as
    many, and B* grows. `held` tokens are with the receiver already, and not sent. Raises ValueError like `kv_cache`,
    and on as many held as there are.
    """
    layout = layout or Layout()
    if whole("held", held, 0) >= whole("tokens", tokens):
        raise ValueError(f"held = {held:,} of {tokens:,} tokens: the last one at least is computed, and sent")
    nbytes = kv_handed(spec, tokens, layout, dtype) - (kv_handed(spec, held, layout, dtype) if held else 0)
    return Handover(spec, tokens, nbytes, number("prefill", prefill), link,
                    whole("ports", ports) if ports is not None else layout.tp * layout.pp, dtype)
