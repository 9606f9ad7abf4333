"""What tensor parallelism sends, and the times of reading weights and of prompts."""

from facts import EIGHT, GIB, KIB, MIB, MS, SEVENTY, SMALL, US

from shardlab.cost import activations, decode_floor, prefill_floor, traffic
from shardlab.specs import Layout, find_card, find_link

A100, H100 = find_card("a100"), find_card("h100")
TOKEN = traffic(SEVENTY, EIGHT, batch=1, seq=1, dtype="bf16", backward=False, head="logits")
STEP = traffic(SEVENTY, EIGHT, batch=1, seq=1)
LAYER = [c for c in TOKEN.collectives if c.what in ("attention out", "mlp out")]
SENT = sum(c.count * c.wire for c in LAYER)


def prefill(card, share, layout=EIGHT, spec=SEVENTY):
    """Milliseconds of a prompt of 8192 tokens."""
    return prefill_floor(spec, card, layout, tokens=8192, share=share) / MS


def heads_on_a_rank():
    q_proj = next(t for t in SEVENTY.layer_tensors() if "q_proj" in t.name)
    return q_proj.local_shape(EIGHT.tp)[0] / SEVENTY.head_dim


def a_layer_keeps(layout):
    """Bytes, of 8192 tokens, by GPU kernels."""
    return activations(SEVENTY, layout, batch=1, seq=8192, dtype="bf16", device="cuda").per_layer


def sent_forward(layout):
    return traffic(SEVENTY, layout, batch=1, seq=8192, dtype="bf16").wire(phase="forward")


COMPUTED = {
    "A000-tp-syncs": lambda: sum(c.count for c in LAYER) / SEVENTY.layers,
    "A002-vec": lambda: LAYER[0].payload / KIB,
    "A002-syncs": lambda: sum(c.count for c in LAYER),
    "A002-ring": lambda: LAYER[0].wire / KIB,
    "A002-layer": lambda: sum(c.wire for c in LAYER) / KIB,
    "A002-80layers": lambda: SENT / MIB,
    "A002-6us": lambda: 5 * MIB / find_link("nvlink4").headline / US,
    "A002-6us-right": lambda: SENT / find_link("nvlink4").per_direction / US,
    "A002-6us-a100": lambda: SENT / find_link("nvlink3").per_direction / US,
    "A002-ring-steps": lambda: LAYER[0].hops,
    "A002-heads": heads_on_a_rank,
    "A002-8ms": lambda: 16 * GIB / A100.hbm / MS,
    "A002-8ms-h100": lambda: 16 * GIB / H100.hbm / MS,
    "A002-prefill-h100": lambda: prefill(H100, 0.5),
    "A002-prefill-a100": lambda: prefill(A100, 0.5),
    "A002-prefill-peak": lambda: prefill(H100, 1.0),
    "A002-prefill-8b": lambda: prefill(H100, 0.5, None, SMALL),
    "A002-latency-tp": lambda: decode_floor(SEVENTY, A100) / (decode_floor(SEVENTY, A100, EIGHT) + 2 * MS),
    "A5-tp-activations": lambda: a_layer_keeps(EIGHT) / a_layer_keeps(Layout()),
    "A5-sp-bytes": lambda: sent_forward(Layout(tp=8, sp="keep")) / sent_forward(EIGHT),
    "B7-tp-train": lambda: sum(c.count for c in STEP.collectives if c.count == SEVENTY.layers) / SEVENTY.layers,
}
