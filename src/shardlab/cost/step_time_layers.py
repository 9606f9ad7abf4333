"""What one layer, or an end of the model, takes of a rank for one micro-batch: seconds, bytes sent, parameters held.

Each matrix is a roofline of its own (its FLOP, or its bytes and those of what goes in and out), each of the two
products of backward as long as forward's. Attention adds its square, half masked, and in backward two and a half times
as much, since a flash kernel computes the scores again (Dao, arXiv:2307.08691, §3.1). All else is taken to be bound by
memory: what is kept for backward is written and read once forward, and read once and has a gradient written backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..specs import ClusterSpec, Layout, ModelSpec, TensorSpec, dtype_of, padded
from .kv import width_of
from .saved import Saved, Term
from .step_time_axes import Group, Sent, groups_of, handed_out, round_the_ring, sent
from .step_time_pass import Kinds, Pass
from .step_time_speeds import Speeds
from .time import attention_flops

AXES = ("tp", "cp", "ep")


@dataclass(frozen=True)
class Layers:
    """The passes of `layout`'s ranks, on micro-batches of `batch` × `seq` tokens. `arithmetic` is what matrices are
    multiplied in, `handed` what tokens go to experts in; they come back in `dtype`, and attention is computed in it."""

    spec: ModelSpec
    layout: Layout
    cluster: ClusterSpec
    speeds: Speeds
    batch: int
    seq: int
    dtype: str
    arithmetic: str
    handed: str
    recompute: str | None
    saved: Saved = field(init=False)
    groups: dict[str, Group] = field(init=False)
    width: int = field(init=False)

    def __post_init__(self):
        width = dtype_of(self.dtype).bytes
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "saved", Saved(self.spec, self.layout, self.batch, self.seq, width, "cuda"))
        object.__setattr__(self, "groups", groups_of(self.layout, self.cluster))

    def of(self, layout: Layout) -> Layers:
        """The same for a layout that differs in what layers do not see: copies, stages, micro-batches."""
        return replace(self, layout=layout)

    def kinds(self) -> Kinds:
        """All that stages are made of; a model without experts has one kind of layer."""
        mixture = self.layer(True) if self.spec.experts else Pass()
        dense = self.layer(False) if not self.spec.experts or self.spec.experts.first_dense else Pass()
        return Kinds(dense, mixture, self.first(), self.last(), self.table)

    def layer(self, mixture: bool) -> Pass:
        """One layer: dense, or with experts."""
        tensors = self.spec.kinds()[-1 if mixture else 0][1]
        flop, seconds, rest, spread = self._matrices(tensors)
        core, core_seconds = self._core()
        kept = self._touched(self.saved.layer(mixture))
        again = {"full": seconds + core_seconds + kept, "selective": core_seconds,
                 "light": self._from_latent(tensors) + kept / 2}.get(self.recompute or "", 0.0)
        tp, tp_back = self._tensor(mixture)
        cp, cp_back = self._context()
        ep = self._experts() if mixture else Sent()
        ways = 2 if self.recompute == "full" else 1  # backward sends them again before it sends gradients
        hidden = self.speeds.overlap * core_seconds
        repeat = self.recompute in ("selective", "full")  # attention again, with its ring
        seconds_of = {"tp": self.seconds(tp), "tp_back": self.seconds(tp_back),
                      "cp": max(0.0, self.seconds(cp) - hidden),
                      "cp_back": max(0.0, self.seconds(cp_back) - 2.5 * hidden) + repeat * max(
                          0.0, self.seconds(cp) - hidden),
                      "ep": self._together(ep), "ep_back": ways * self._together(ep)}
        both = {"tp": tp.plus(tp_back), "cp": cp.times(1 + repeat).plus(cp_back), "ep": ep.times(1 + ways)}
        sent_of = {f"{axis}_{way}": getattr(both[axis], way) for axis in AXES for way in ("inside", "between")}
        extra = self.speeds.overhead
        return Pass(flop + core, seconds + core_seconds + kept + extra, seconds + 2.5 * core_seconds + kept + extra,
                    seconds + extra, again, rest=rest, spread=spread, **seconds_of, **sent_of)

    def first(self) -> Pass:
        """The embedding: rows are read, and gradients written; no arithmetic."""
        tensors = self.spec.first_tensors()
        moved = 2 * self.saved.gathered * self.spec.hidden * self.width / self.memory
        out = self._out(1)
        back = sent("all_gather", self._slice, self.groups["tp"]) if self.layout.sp else Sent()
        held = sum(_numbers(tensor, self.layout.tp) for tensor in tensors)
        return Pass(forward=moved, weight=moved, tp=self.seconds(out), tp_back=self.seconds(back), rest=held,
                    tp_inside=out.inside + back.inside, tp_between=out.between + back.between)

    def last(self) -> Pass:
        """Norm, head and loss."""
        part = padded(self.spec.vocab, self.layout.tp) // self.layout.tp
        flop, seconds = self._product(self.saved.gathered, part, self.spec.hidden)
        loss = self.saved.logits().nbytes / self.memory
        into = sent("all_gather", self._slice, self.groups["tp"]) if self.layout.sp else Sent()
        back = self._out(1).plus(into if self.layout.sp == "again" else Sent())
        both = into.plus(back)
        held = sum(_numbers(tensor, self.layout.tp) for tensor in self.spec.last_tensors())
        return Pass(flop, seconds + loss, seconds + loss, seconds, tp=self.seconds(into), tp_back=self.seconds(back),
                    tp_inside=both.inside, tp_between=both.between, rest=held)

    def hop(self) -> Sent:
        """One message to the next stage."""
        stream = self.saved.stream().nbytes
        return round_the_ring(stream, 1, self.groups["pp"])

    @property
    def memory(self) -> float:
        """Bytes a second of the card's memory."""
        return self.cluster.card.hbm * self.speeds.memory

    @property
    def table(self) -> int:
        """Numbers of the embedding that a rank has."""
        return _numbers(self.spec.first_tensors()[0], self.layout.tp)

    @property
    def _slice(self) -> float:
        return self._stream / self.layout.tp

    @property
    def _stream(self) -> float:
        return self.saved.gathered * self.spec.hidden * self.width

    def _matrices(self, tensors: list[tuple[int, TensorSpec]]) -> tuple[float, float, float, float]:
        """FLOP and seconds of all products of a layer, one forward pass; parameters held, spread experts apart."""
        mixture, flop, seconds, rest, spread = self.spec.experts, 0.0, 0.0, 0.0, 0.0
        own = self._sent_tokens
        for times, tensor in tensors:
            in_experts = tensor.group in ("experts", "shared")
            numbers = _numbers(tensor, self.layout.expert_tp if in_experts else self.layout.tp)
            if tensor.group == "experts" and mixture:
                times //= self.layout.ep
                spread += times * numbers if self.layout.spreads else 0
                rest += 0 if self.layout.spreads else times * numbers
                rows = own * mixture.active * self.layout.ep / mixture.routed * self.speeds.skew
            else:
                rest += times * numbers
                rows = own if tensor.group in ("shared", "router") else self.saved.gathered
            if len(tensor.shape) == 2 and tensor.group != "norms":
                n, k = tensor.local_shape(self.layout.expert_tp if in_experts else self.layout.tp)
                one, took = self._product(rows, n, k)
                flop, seconds = flop + times * one / (self.speeds.skew if tensor.group == "experts" else 1), (
                    seconds + times * took)
        return flop, seconds, rest, spread

    @property
    def _sent_tokens(self) -> float:
        """Tokens that a rank routes: all of its own, or where experts are whole a part of the tensor axis's."""
        return self.saved.tokens if self.layout.expert_tp == self.layout.tp else self.saved.tokens / self.layout.tp

    def _product(self, rows: float, n: int, k: int) -> tuple[float, float]:
        flop = 2 * rows * n * k
        moved = (rows * k + n * k + rows * n) * self.width
        rate = self.cluster.card.flop_rate(self.arithmetic) * self.speeds.share
        return flop, max(flop / rate, moved / self.memory)

    def _from_latent(self, tensors: list[tuple[int, TensorSpec]]) -> float:
        """Seconds of the products that make queries, keys and values of a latent."""
        sides = [tensor.local_shape(self.layout.tp) for _, tensor in tensors if "_b_proj.weight" in tensor.name]
        return sum(self._product(self.saved.gathered, n, k)[1] for n, k in sides) if self.spec.latent else 0.0

    def _core(self) -> tuple[float, float]:
        """FLOP and seconds of attention itself, a layer's on average."""
        cut = self.layout.cp * self.layout.tp * self.spec.layers
        flop = self.batch * attention_flops(self.spec, self.seq) / cut
        return flop, flop / (self.cluster.card.flop_rate(self.dtype) * self.speeds.share)

    def _touched(self, terms: list[Term]) -> float:
        return 2 * sum(term.nbytes for term in terms) / self.memory

    def _tensor(self, mixture: bool) -> tuple[Sent, Sent]:
        """Two sums a layer each way, or of whole experts one and a gather of what the ranks have of the tokens."""
        if self.layout.tp == 1:
            return Sent(), Sent()
        gather = sent("all_gather", self._slice, self.groups["tp"])
        whole = mixture and self.layout.expert_tp != self.layout.tp
        blocks = 1 if whole else 2
        slices = gather if whole and not self.layout.sp else Sent()
        into = gather.times(blocks) if self.layout.sp else Sent()
        forward = into.plus(self._out(blocks)).plus(slices)
        back = forward.plus(into if self.layout.sp == "again" else Sent())
        if self.recompute == "full":  # all but the last sum, before which it stops
            back = back.plus(into).plus(self._out(1))
        return forward, back

    def _out(self, times: int) -> Sent:
        """Sums of the stream, whole or to each rank its slice."""
        op = "reduce_scatter" if self.layout.sp else "all_reduce"
        return sent(op, self._stream, self.groups["tp"]).times(times) if self.layout.tp > 1 else Sent()

    def _context(self) -> tuple[Sent, Sent]:
        """Keys and values round the ring; backward these again and their gradients in fp32."""
        cp, latent = self.layout.cp, self.spec.latent
        heads = self.spec.heads // self.layout.tp
        keys = heads * (latent.nope_dim + latent.rope_dim + latent.value_dim) if latent else (
            2 * self.saved.key_heads * self.spec.head_dim)
        numbers, messages = (cp - 1) * self.saved.tokens * keys, 2 * (cp - 1)
        return (round_the_ring(numbers * self.width, messages, self.groups["cp"]),
                round_the_ring(numbers * (self.width + max(4, self.width)), 2 * messages, self.groups["cp"]))

    def _experts(self) -> Sent:
        """There and back, once each way."""
        mixture, group = self.spec.experts, self.groups["ep"]
        if mixture is None or group.ranks == 1:
            return Sent()
        reach = mixture.top_groups if mixture.groups > 1 and group.domains <= mixture.groups else None
        there, back = (handed_out(self._sent_tokens, self.spec.hidden * width, mixture.active, reach, group)
                       for width in (width_of(self.handed), self.width))
        both = there.plus(back)
        return both._replace(inside=both.inside * self.speeds.skew, between=both.between * self.speeds.skew)

    def seconds(self, what: Sent) -> float:
        """Of these messages, one after the other."""
        return what.seconds(self.cluster, self.speeds)

    def _together(self, what: Sent) -> float:
        """Inside and between at the same time, as DeepSeek-V3's kernels send (arXiv:2412.19437, §3.2.2)."""
        return max(what.apart(self.cluster, self.speeds))


def _numbers(tensor: TensorSpec, p: int) -> int:
    numbers = 1
    for side in tensor.local_shape(p):
        numbers *= side
    return numbers
