"""What training holds and computes: states, activations by Korthikanti's formula, FLOP, and the time they take."""

from facts import GB, MIB, SEVENTY, TB, V3, model, shown
from facts_sizes import bert

from shardlab.cost import korthikanti, memory, selective_flops, training_flops, utilisation
from shardlab.specs import ModelSpec, find_card

GPT3, MTNLG = dict(seq=2048, batch=1, hidden=12288, heads=96), dict(seq=2048, batch=1, hidden=20480, heads=128)
BF16 = find_card("h800").flop_rate("bf16")
DAY = 86400


def each(**how):
    """Bytes of a model's states for each parameter, but for AdamW's few step counters."""
    bill = memory(SEVENTY, dtype="bf16", training=True, master="fp32", **how)
    return (bill.per_rank - bill.steps) / SEVENTY.total


def sbh(sizes, mode="none", tp=8):
    """Bytes that a layer keeps, over tokens × hidden."""
    return korthikanti(**sizes, tp=tp, mode=mode) / (sizes["seq"] * sizes["batch"] * sizes["hidden"])


def megatron(hidden, layers):
    """A model of the family in Narayanan 2021, table 1: of GPT's kind, 51,200 words, 2048 learned positions."""
    return ModelSpec(hidden=hidden, layers=layers, heads=hidden // 64, kv_heads=hidden // 64, head_dim=64,
                     ffn=4 * hidden, vocab=51200, max_positions=2048, tied=True, attention_bias=True, output_bias=True,
                     mlp_bias=True, learned_positions=True, layer_norm=True, gated=False)


def days(parameters, tokens, cards, rate):
    """Days of training at `rate` a card where blocks are computed again in full: a third more work."""
    return training_flops(parameters, tokens) * 4 / 3 / (cards * rate) / DAY


COMPUTED = {
    "A003-train": lambda: 175e9 * each() / TB,
    "B1-baseline": each,
    "B1-fp32grad": lambda: each(gradients="fp32"),
    "B1-gpt2-24gb": lambda: 1.5e9 * each() / GB,
    "B3-mtnlg-5as": lambda: sbh(MTNLG, tp=1) - sbh(MTNLG, "tp_sp_sel", tp=1),
    "B3-gpt3-none": lambda: sbh(GPT3),
    "B3-gpt3-tp": lambda: sbh(GPT3, "tp"),
    "B3-gpt3-tp_sp": lambda: sbh(GPT3, "tp_sp"),
    "B3-gpt3-tp_sel": lambda: sbh(GPT3, "tp_sel"),
    "B3-gpt3-full": lambda: sbh(GPT3, "full"),
    "B3-gpt3-none-bytes": lambda: korthikanti(**GPT3),
    "B3-gpt3-sel-save": lambda: 1 - sbh(GPT3, "tp_sp_sel", tp=1) / sbh(GPT3, tp=1),
    "B3-mtnlg-sel-save": lambda: 1 - sbh(MTNLG, "tp_sp_sel", tp=1) / sbh(MTNLG, tp=1),
    "B3-gpt3-sel-flops-count": lambda: selective_flops(2048, 12288),
    "B3-gpt3-sel-flops": lambda: 3 * selective_flops(2048, 12288),  # the paper's count: see the row above, and its note
    "B3-mtnlg-sel-flops": lambda: 3 * selective_flops(2048, 20480),
    "B4-gpt3": lambda: training_flops(model("gpt-3-175b").total, 300e9),
    "B4-chinchilla": lambda: training_flops(70e9, 1.4e12),
    "B4-v3-flops": lambda: training_flops(37e9, 14.8e12),
    "B4-v3-days": lambda: shown(180e3 * 3600 / 2048, "days"),
    "B4-v3-mfu": lambda: utilisation(training_flops(37e9, 14.8e12), 2.664e6 * 3600, 1, BF16),
    "B4-megatron-34d": lambda: days(175e9, 300e9, 1024, 140e12),
    "B4-megatron-84d": lambda: days(1008e9, 450e9, 3072, 163e12),
    "B4-P-1.7B": lambda: megatron(2304, 24).total / 1e9,
    "B4-P-3.6B": lambda: megatron(3072, 30).total / 1e9,
    "B4-P-18.4B": lambda: megatron(6144, 40).total / 1e9,
    "B4-P-39.1B": lambda: megatron(8192, 48).total / 1e9,
    "B4-P-145.6B": lambda: megatron(12288, 80).total / 1e9,
    "B4-P-310.1B": lambda: megatron(16384, 96).total / 1e9,
    "B4-P-529.6B": lambda: megatron(20480, 105).total / 1e9,
    "D-megatron-1784": lambda: sbh(MTNLG | dict(hidden=V3.hidden, heads=V3.heads, ffn=V3.ffn), "tp_sp_sel", tp=1),
    "D-accel-fp16": lambda: bert() * each() / MIB,
    "D-accel-7b": lambda: memory(model("llama-2-7b"), dtype="bf16", training=True, master="fp32").per_rank / GB,
}
