"""The tensors that autograd saves on one rank, by shape: of a layer, of the ends of the model, of the loss.

A linear layer saves its input, a norm its input and one number a row, a product both factors, an activation its input,
the attention kernel its queries, keys and values, its output and the log-sum-exp of its scores. A sum saves nothing,
and neither do the collectives of a cut. Sequence parallelism leaves each rank its rows of the tokens between the cut
layers; what these take in is gathered, and kept so or as the slice that it is gathered from. Context parallelism leaves
each rank its tokens of every sequence, whose length is padded to a multiple of 2cp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..specs import Latent, Layout, ModelSpec, padded

Device = Literal["cpu", "cuda"]


class Term(NamedTuple):
    """Tensors of rows × numbers elements in all, `width` bytes each."""

    what: str
    rows: int
    numbers: int
    width: int
    row: str = "token"

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.rows * self.numbers * self.width

    @property
    def derivation(self) -> str:
        """The product in words: "8,192 tokens × 4,096 × 2 B"."""
        return f"{self.rows:,} {self.row}{'s' * (self.rows > 1)} × {self.numbers:,} × {self.width} B"


@dataclass(frozen=True)
class Saved:
    """What one rank of `layout` saves of `batch` × `seq` tokens, in numbers `width` bytes wide.

    On "cpu" PyTorch composes an RMSNorm of small steps in fp32, which save three tensors of numbers; on "cuda" one
    kernel saves its input alone. Latent attention, experts and GPT-2's kind of layer are reckoned from their shapes,
    for a plain implementation: no run is behind them.
    """

    spec: ModelSpec
    layout: Layout
    batch: int
    seq: int
    width: int
    device: Device

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def own(self) -> int:
        """A rank's tokens of a sequence: all, or of a cut one two of its 2cp chunks, padding included."""
        cp = self.layout.cp
        return padded(self.seq, 2 * cp) // cp if cp > 1 else self.seq

    @property
    def tokens(self) -> int:
        return self.batch * self.own

    @property
    def gathered(self) -> int:
        """Tokens that a cut layer takes in: with sequence parallelism those that pad the slices too."""
        return padded(self.tokens, self.tp) if self.layout.sp else self.tokens

    @property
    def between(self) -> int:
        """Tokens that a rank has between the cut layers: all, or its slice."""
        return self.gathered // self.tp if self.layout.sp else self.tokens

    @property
    def precise(self) -> int:
        """Bytes of a number in what is computed in fp32 at least."""
        return max(4, self.width)

    def layer(self, mixture: bool) -> list[Term]:
        """A block, dense or with experts. The first term is its input, or a copy of it."""
        feed_forward = self.experts() if mixture else self.gated("gate, silu, up, product", self.spec.ffn)
        return [*self.stream_norm("attention norm"), self._in("q, k, v in"), *self.heads(),
                *self.stream_norm("mlp norm"), self._in("mlp in"), *feed_forward]

    def stream(self) -> Term:
        """A block's input."""
        return Term("block in", self.between, self.spec.hidden, self.width)

    def stream_norm(self, what: str) -> list[Term]:
        """A norm of the stream between the cut layers."""
        return self.norm(what, self.spec.hidden, self.between)

    def norm(self, what: str, numbers: int, rows: int, row: str = "token", kept: int | None = None) -> list[Term]:
        """A norm of `rows` rows of so many numbers each, of `kept` that lie in memory together, all if None; LayerNorm
        keeps a mean beside the deviation."""
        kept = rows if kept is None else kept
        statistics = Term(f"{what}, 1/rms", rows, 2 if self.spec.layer_norm else 1, self.precise, row)
        if self.device == "cuda" or self.spec.layer_norm:
            return [Term(f"{what}, in", kept, numbers, self.width, row), statistics]
        copied = self.width < self.precise
        return [Term(f"{what}, in" + " as fp32" * copied, rows if copied else kept, numbers, self.precise, row),
                Term(f"{what}, before its weight", rows, numbers, self.precise, row), statistics]

    def heads(self) -> list[Term]:
        """From q, k and v to the attention's output, which o_proj reads."""
        if self.spec.latent:
            return self._latent(self.spec.latent)
        d, queries, keys = self.spec.head_dim, self.query_heads, self.key_heads
        out = []
        if self.spec.qk_norm:
            for what, heads in (("q norm", queries), ("k norm", keys)):
                out += self.norm(what, d, heads * self.tokens, "head", heads * self.gathered)
        return [*out, self._each("queries", queries * d), self._each("keys", keys * d),
                Term("values", self.gathered, keys * d, self.width),
                self._each("attention out", queries * d), self._each("log-sum-exp", queries, self.precise)]

    def without_core(self, layer: list[Term]) -> list[Term]:
        """What is left of a layer's terms where its attention core is computed again: queries and keys as they go in,
        not turned yet, and no log-sum-exp."""
        rows = self.tokens if self.spec.qk_norm else self.gathered
        return [term._replace(rows=rows) if term.what in ("queries", "keys") else term
                for term in layer if term.what != "log-sum-exp"]

    def gated(self, what: str, ffn: int) -> list[Term]:
        """The inside of a feed-forward block, which a rank has its (padded) part of."""
        part = padded(ffn, self.tp) // self.tp
        what, numbers = (what, 4 * part) if self.spec.gated else ("up, activated", 2 * part)
        return [Term(what, self.gathered, numbers, self.width)]

    def experts(self) -> list[Term]:
        """Routing, and the blocks that the tokens are sent to: each token is copied for each of its experts. Experts on
        other ranks are taken to be asked for alike: then as much comes as goes. Whole ones (etp = 1) have a rank's part
        of the tokens each, as the shared ones do."""
        mixture = self.spec.experts
        assert mixture is not None  # or there would be no such layer
        sent, etp = mixture.active * self.spec.hidden, self.layout.expert_tp
        rows = self.tokens if etp == self.tp else padded(self.tokens, self.tp) // self.tp
        shared = 4 * padded(mixture.shared * mixture.ffn, etp) // etp
        part = padded(mixture.ffn, etp) // etp

        def each(what: str, numbers: int, width: int = self.width) -> Term:
            return Term(what, rows, numbers, width)

        return [each("router scores", mixture.routed, self.precise), each("chosen experts", mixture.active, 8),
                each("their weights", mixture.active), each("sent to experts", sent),
                each("experts", 4 * mixture.active * part), each("experts out", sent),
                *([each("shared experts", shared)] if shared else [])]

    def ends(self) -> list[Term]:
        """What is kept outside the layers, but for the loss: for embedding, rotation and head."""
        return [*self.embedding(), *self.rotation(), *self.head()]

    def embedding(self) -> list[Term]:
        """What the embedding keeps: which rows it has looked up."""
        out = [Term("token ids", self.gathered, 1, 8)]
        if self.tp > 1:
            out.append(Term("own tokens", self.gathered, 1, 1))
        if self.spec.learned_positions:
            out.append(Term("positions", self.own, 1, 8, "position"))
        return out

    def rotation(self) -> list[Term]:
        """What all layers that are together turn queries and keys by."""
        if self.spec.learned_positions:
            return []
        turned = self.spec.latent.rope_dim if self.spec.latent else self.spec.head_dim
        return [Term("cos and sin", self.own, 2 * turned, self.width, "position")]

    def head(self) -> list[Term]:
        """What is kept between the last layer and the logits."""
        return [*self.stream_norm("last norm"), self._in("head in")]

    def loss(self, valid: bool = False) -> list[Term]:
        """What the cross-entropy keeps: log-probabilities, or over a cut vocabulary this rank's logits. `valid` says
        whether it is given the number of labels, which a cut one then has not to keep."""
        if self.tp == 1:
            return [self._each("log-softmax", self.spec.vocab, self.precise), self._each("labels", 1, 8),
                    Term("number of labels", 1, 1, self.precise, "sum")]
        number = [] if valid else [Term("number of labels", 1, 1, 8, "sum")]
        return [Term("logits", self.gathered, self.columns, self.width),
                self._each("largest logit, sum, target", 3, self.precise), self._each("own labels", 1, 8 + 1),
                self._each("which have a label", 1, 1), *number]

    def logits(self) -> Term:
        """The largest moment of the loss. Backward has log-probabilities and two gradients like them at once; over a
        cut vocabulary, logits and their gradient, and exponentials of a few tokens at a time, which are left out."""
        if self.tp == 1:
            return self._each("log-softmax and two gradients", 3 * self.spec.vocab, self.precise)
        return self._each("logits and their gradient", self.columns, 2 * self.width)

    @property
    def query_heads(self) -> int:
        return self.spec.heads // self.tp

    @property
    def key_heads(self) -> int:
        """At least one: several ranks may hold the same."""
        return max(1, self.spec.kv_heads // self.tp)

    @property
    def columns(self) -> int:
        """This rank's part of the vocabulary, padding included."""
        return padded(self.spec.vocab, self.tp) // self.tp

    def _latent(self, latent: Latent) -> list[Term]:
        heads, out = self.query_heads, []
        if latent.q_rank:
            out += [*self.norm("q latent norm", latent.q_rank, self.tokens), self._each("q latent", latent.q_rank)]
        inner = heads * (latent.nope_dim + latent.rope_dim)
        return [*out, *self.norm("kv latent norm", latent.kv_rank, self.tokens),
                self._each("kv latent", latent.kv_rank),
                self._each("queries", inner), self._each("keys", inner),
                self._each("values", heads * (latent.nope_dim + latent.value_dim)),
                self._each("attention out", heads * latent.value_dim),
                self._each("log-sum-exp", heads, self.precise)]

    def _in(self, what: str) -> Term:
        """What cut layers take in: gathered, or the slice that backward will gather again."""
        return Term(what, self.between if self.layout.sp == "again" else self.gathered, self.spec.hidden, self.width)

    def _each(self, what: str, numbers: int, width: int | None = None) -> Term:
        """So many numbers for each token."""
        return Term(what, self.tokens, numbers, width or self.width)
