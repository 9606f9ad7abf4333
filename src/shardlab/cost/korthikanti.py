"""What one layer of the GPT-3 kind keeps for backward, as published (Korthikanti et al., arXiv:2205.05198, table 2).

Such a layer has as many KV heads as heads, a GeLU block four times as wide as the stream, dropout, 2-byte numbers and
1-byte masks, and it stores the scores of attention, for which 5 · heads · seq / hidden stands: 80 of GPT-3's 114.

`activations` accounts for another layer. Attention is of the flash kind, so the 80 are gone (there are 0.03 for the
log-sum-exp), and with them what selective recomputation is for; no dropout, so 2 of the 34 are gone too. GeLU's input
and output (16) become four tensors of a gated block, 8 · ffn / hidden: 28 in Llama-3.1-70B. A key and a value (2 each)
shrink with the KV heads: to a quarter each there. That makes 40.5 on a GPU in bf16, at every seq, where this formula
has 354 at 8,192 tokens; and 52.5 on a CPU, which composes its norms of fp32 steps.
"""

from __future__ import annotations

from ..specs.check import whole


def korthikanti(seq: int, batch: int, hidden: int, heads: int, tp: int = 1, mode: str = "none",
                ffn: int | None = None) -> float:
    """Bytes that one layer keeps on each rank. `mode`: "none" (whole on one rank), "tp", "tp_sp" (and sequence
    parallel), either with selective recomputation, "tp_sel" and "tp_sp_sel", or "full" recomputation.

    `ffn` is the block's width, 4 · hidden if None; of a mixture's layer, the width of all experts that a token uses,
    which is not the config's `intermediate_size` (Megatron-LM issue 1784). Raises ValueError on another mode and on
    sizes below 1.
    """
    for name, size in (("seq", seq), ("batch", batch), ("hidden", hidden), ("heads", heads), ("tp", tp)):
        whole(name, size)
    cut = 18 + 4 * (4 if ffn is None else whole("ffn", ffn) / hidden)  # of which tensor parallelism leaves 10 whole
    scores = 5 * heads * seq / hidden
    modes = {"none": cut + scores, "tp": 10 + (cut - 10 + scores) / tp, "tp_sp": (cut + scores) / tp,
             "tp_sel": 10 + (cut - 10) / tp, "tp_sp_sel": cut / tp, "full": 2.0}
    if mode not in modes:
        raise ValueError(f"unknown mode {mode!r}: use one of {', '.join(modes)}")
    return seq * batch * hidden * modes[mode]


def selective_flops(seq: int, hidden: int) -> float:
    """The share of FLOPs that selective recomputation adds, counted: one more forward attention core, 4 · seq² · hidden
    of 72 · seq · hidden² · (1 + seq / 6 hidden) that forward and backward of the layer are (appendix A there).

    The paper reports three times as much: it adds 12 · seq² · hidden.
    """
    return whole("seq", seq) / (18 * whole("hidden", hidden)) / (1 + seq / (6 * hidden))
