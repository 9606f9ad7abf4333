"""What a rank holds of activations: in training what autograd keeps for backward, in inference what is alive at once.

The account is of our own model: attention is computed by a kernel of the flash kind, which keeps the log-sum-exp of
its scores and never the scores (FlashAttention, arXiv:2205.14135), nothing is dropped out, the feed-forward block is
gated. So no term grows with seq², and selective recomputation, which was made against that term, has but the
log-sum-exp left to save. `korthikanti` is the published formula, for the older kind of layer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..specs import Dtype, Layout, ModelSpec, dtype_of, padded
from ..specs.check import recompute_mode, whole
from ..specs.layout import served, staged
from .bill import Bill, Row
from .saved import Device, Saved, Term


@dataclass(frozen=True, repr=False)
class Activations(Bill):
    """Bytes that one rank keeps for its backward pass; all ranks keep as much.

    `kinds` holds (how many layers, what one of them keeps): dense ones, ones with experts. `again` is what one layer
    holds besides while backward computes it, or its attention core, again.
    """

    saved: Saved
    dtype: Dtype
    recompute: str | None
    kinds: tuple[tuple[int, list[Term]], ...]
    again: list[Term]

    @property
    def per_layer(self) -> int:
        """Bytes that one layer keeps (of the last kind, where there are two)."""
        return _sum(self.kinds[-1][1])

    @cached_property
    def layers(self) -> int:
        """Bytes that all layers keep."""
        return sum(times * _sum(terms) for times, terms in self.kinds)

    @cached_property
    def ends(self) -> int:
        """Bytes kept outside the layers and the loss: for embedding, rotation, last norm and head."""
        return _sum(self.saved.ends())

    @cached_property
    def loss(self) -> int:
        """Bytes that the loss keeps."""
        return _sum(self.saved.loss())

    @property
    def logits(self) -> int:
        """Bytes of the largest moment of the loss, what it keeps included."""
        return self.saved.logits().nbytes

    @property
    def total(self) -> int:
        """All bytes that autograd keeps at the end of the forward pass."""
        return self.layers + self.ends + self.loss

    @cached_property
    def recomputed(self) -> int:
        """Bytes that one layer holds besides while it is computed again."""
        return _sum(self.again)

    @property
    def peak(self) -> int:
        """Bytes of the largest moment: at the loss, or where the last layer is computed again, the loss being done.

        Gradients on their way back are not in it, but for those of the logits.
        """
        return self.layers + self.ends + max(self.logits, self.recomputed)

    @property
    def title(self) -> str:
        s = self.saved
        n = s.layout.world_size
        ranks = f"on each of {n} ranks ({s.layout.degrees})" if n > 1 else "on one rank"
        return (f"{s.spec.name}, {ranks}, {s.batch} × {s.seq} tokens, {self.dtype.name}, "
                f"{self.recompute or 'no'} recomputation: kept for backward")

    @property
    def rows(self) -> list[Row]:
        rows, names = [], ["dense layer", "layer with experts"] if len(self.kinds) > 1 else ["layer"]
        for name, (_, terms) in zip(names, self.kinds, strict=True):
            rows += [*_detail(terms), Row(f"a {name}", "sum of these", _sum(terms))]
        text = " + ".join(f"{times} × a {name}" for name, (times, _) in zip(names, self.kinds, strict=True))
        rows += [Row("layers", text, self.layers), *_detail(self.saved.ends()), Row("ends", "sum of these", self.ends),
                 *_detail(self.saved.loss()), Row("loss", "sum of these", self.loss),
                 Row("kept", "layers + ends + loss", self.total)]
        if self.again:
            rows += [*_detail(self.again), Row("a layer again", "sum of these", self.recomputed)]
        most = "logits" if self.logits >= self.recomputed else "a layer again"
        return [*rows, Row("logits", self.saved.logits().derivation, self.logits, note=self.saved.logits().what),
                Row("at most", f"layers + ends + {most}", self.peak)]

    @property
    def footnotes(self) -> list[str]:
        ours = self.saved.device == "cpu" and not self.saved.spec.beyond_llama and self.saved.layout.cp == 1
        return [f"each storage once, parameters left out; saved by kernels of {self.saved.device}"
                + ("" if ours else ": from shapes, no run of ours is behind it")]

    def to_dict(self) -> dict[str, Any]:
        """The account as plain data: inputs, bytes by part, rows."""
        s = self.saved
        inputs = {"model": s.spec.name, **asdict(s.layout), "batch": s.batch, "seq": s.seq, "dtype": self.dtype.name,
                  "recompute": self.recompute, "device": s.device}
        parts = ("per_layer", "layers", "ends", "loss", "total", "recomputed", "logits", "peak")
        return {**inputs, **{part: getattr(self, part) for part in parts}, **super().to_dict()}


def activations(spec: ModelSpec, layout: Layout | None = None, *, batch: int, seq: int, dtype: str = "fp32",
                recompute: str | None = None, device: Device = "cpu") -> Activations:
    """What each rank of `layout` (one rank if None) keeps for the backward pass of `batch` × `seq` tokens, of which it
    has its part where cp cuts the sequences.

    Weights and activations are in `dtype`, the loss in fp32 at least. `recompute` is the model's: None, "selective" or
    "full", which keeps the blocks' inputs alone. `device` says whose kernels: "cpu" is what the tests measure, to the
    byte; on "cuda" RMSNorm keeps its input and not three tensors, and attention is of the flash kind in bf16 and fp16
    only: no run of ours is behind it, nor behind models that are no Llama or sequences that are cut. Over a cut
    vocabulary the loss keeps 8 B less where it is given `valid`. Raises ValueError on sizes below 1, on an unknown
    dtype, mode or device, on a layout that `spec` doesn't allow and on compressed attention.
    """
    layout, kept = staged(layout), dtype_of(dtype)
    layout.check(spec)
    if spec.compressed:
        raise ValueError(f"{spec.name} has compressed attention: what it keeps for backward is not known here")
    saved = Saved(spec, layout, whole("batch", batch), whole("seq", seq), kept.bytes, _device(device))
    dense = spec.experts.first_dense if spec.experts else spec.layers
    kinds = [(times, saved.layer(mixture))
             for times, mixture in ((dense, False), (spec.layers - dense, True)) if times]
    again: list[Term] = []
    mode = recompute_mode(recompute)
    if mode == "selective":
        again = [term for term in saved.heads() if term.what in ("queries", "keys", "attention out", "log-sum-exp")]
        kinds = [(times, saved.without_core(terms)) for times, terms in kinds]
    elif mode == "full":
        # where the first norm saves its input as it is, that is the block's, which is there already
        again = max((terms[terms[0].width == kept.bytes :] for _, terms in kinds), key=_sum)
        kinds = [(times, [saved.stream()]) for times, _ in kinds]
    return Activations(saved, kept, mode, tuple(kinds), again)


def _sum(terms: list[Term]) -> int:
    return sum(rows * numbers * width for _, rows, numbers, width, _ in terms)


def _detail(terms: list[Term]) -> list[Row]:
    return [Row(f"  {term.what}", term.derivation, term.nbytes) for term in terms]


def forward_peak(spec: ModelSpec, layout: Layout | None = None, *, tokens: int, sequences: int = 1,
                 dtype: str = "bf16", logits: int | None = None, device: Device = "cpu") -> int:
    """The most bytes that one forward pass without gradients has alive on a rank, weights and KV cache left out.

    `tokens` are those of all `sequences` together, of which the logits of `logits` positions are taken: of all if None,
    as `Transformer.forward` does; serving engines, and `generate`, take those of each sequence's last. It is the
    largest of four moments: in a feed-forward block, in attention, in a norm, at the logits. What a kernel takes inside
    itself is not in it. `device`, and what has no run behind it, as in `activations`. Raises ValueError on sizes below
    1, an unknown dtype or device, a layout that `spec` doesn't allow and one with ZeRO or sequence parallelism.
    """
    layout, width = served(layout), dtype_of(dtype).bytes
    layout.check(spec)
    seq = -(-whole("tokens", tokens) // whole("sequences", sequences))
    # positions, and cos and sin of each
    table = seq * (8 + 2 * (spec.latent.rope_dim if spec.latent else spec.head_dim) * width)
    blocks = max(_in_feed_forward(spec, layout), sum(_heads(spec, layout.tp))) * width
    if _device(device) == "cpu":
        blocks = max(blocks, _in_norm(spec, layout.tp, width))
    part = padded(spec.vocab, layout.tp) // layout.tp
    each = spec.vocab if layout.tp == 1 else (1 + 2 * layout.tp) * part  # own ones, all gathered, and put in order
    positions = tokens if logits is None else whole("logits", logits)
    return max(tokens * blocks + table, (tokens * spec.hidden + positions * each) * width)


def _in_feed_forward(spec: ModelSpec, layout: Layout) -> int:
    """Numbers a token: the block's input, the stream and its normed copy, then what is inside, or the output with it.

    Of a mixture's experts a token has its active ones, each with a copy of the token and an output; as many on a rank
    where experts on other ranks are asked for alike.
    """
    copies, ffn, p = 1, padded(spec.ffn, layout.tp) // layout.tp, layout.expert_tp
    if spec.experts:
        copies = spec.experts.active
        mixture = copies * padded(spec.experts.ffn, p) // p
        ffn = max(ffn, mixture) if spec.experts.first_dense else mixture
    inside = ffn * (3 if spec.gated else 2)
    out = ffn + spec.hidden * copies
    return 3 * spec.hidden + (copies - 1) * spec.hidden + max(inside, out)


def _heads(spec: ModelSpec, tp: int) -> tuple[int, int]:
    """Numbers a token in attention: the stream, its normed copy, q, k and v; rotation in three steps, or the output."""
    heads, latent = spec.heads // tp, spec.latent
    q = heads * (latent.nope_dim + latent.rope_dim if latent else spec.head_dim)
    k = q if latent else max(1, spec.kv_heads // tp) * spec.head_dim
    v = heads * latent.value_dim if latent else k
    return 2 * spec.hidden + q + k + v, max(3 * q, q + 3 * k, 2 * q + k + heads)


def _in_norm(spec: ModelSpec, tp: int, width: int) -> int:
    """Bytes a token where a CPU composes a norm: input, normed and weighed numbers in fp32, beside what is there."""
    three = 3 * 4 if width < 4 else 2 * width  # an fp32 input is there already
    block = 2 * spec.hidden * width + three * spec.hidden
    heads = _heads(spec, tp)[0] * width + three * spec.heads // tp * spec.head_dim
    return max(block, heads) if spec.qk_norm else block


def _device(name: Device) -> Device:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}: use cpu or cuda")
    return name
