"""Parameters, bytes of weights, and how many cards hold them."""

import re
from functools import cache
from pathlib import Path

from facts import DATA, EIGHT, GB, GIB, MIB, SEVENTY, TB, V3, V4, model, stored

from shardlab.cost import checkpoint, memory
from shardlab.specs import ModelSpec, bundled_models, find_card, format_of
from shardlab.specs.quantity import quantity

A100, H800, B200, B300 = (find_card(name) for name in ("a100", "h800", "b200", "b300"))
OSS, QWEN = model("gpt-oss-120b"), model("qwen3-235b-a22b")
OSS_NORMS = OSS.layers * OSS.hidden  # on its model card a layer's first norm is attention's, its second the MLP's
V3_FILES, V4_FILES = checkpoint(V3, copies=1), checkpoint(V4)  # V3: README_WEIGHTS.md
BIBLIOGRAPHY = Path(__file__).parents[2] / "book" / "references.bib"
# what the cookbook's calculator takes Qwen1.5-72B for: MHA, 1024 learned positions, an ungated block of 3 × hidden
COOKBOOK = ModelSpec(hidden=8192, layers=80, heads=64, kv_heads=64, head_dim=128, ffn=3 * 8192, vocab=152064,
                     max_positions=1024, learned_positions=True, layer_norm=True, gated=False)


def cards(nbytes, each):
    """Whole cards for so many bytes of weights."""
    return -(-nbytes // each)


def ends(spec):
    return spec.parameters["embedding"] + spec.parameters["head"]


def year(key):
    """The year in which a paper of the book's references was first public: what its arXiv number begins with."""
    entry = re.search(rf"@\w+{{{key},(.*?)\n}}", BIBLIOGRAPHY.read_text(encoding="utf-8"), re.S)[1]
    return 2000 + int(re.search(r"arXiv:(\d\d)\d\d\.", entry)[1])


@cache
def bert():
    """Parameters of bert-base-cased with its pooler, by transformers: it is no decoder, so no spec of ours."""
    import torch
    from transformers import BertConfig, BertModel

    with torch.device("meta"):
        return sum(p.numel() for p in BertModel(BertConfig(vocab_size=28996)).parameters())


def mtp_active():
    """Parameters of V3's MTP module that a token uses: of its routed experts, those that it is sent to."""
    return sum(times * tensor.size * (V3.experts.active / V3.experts.routed if tensor.group == "experts" else 1)
               for times, tensor in V3.mtp_counted())


def attention(spec):
    """Parameters of one layer's attention, the norms of latents included."""
    return sum(t.size for t in spec.layer_tensors() if t.name.startswith("self_attn"))


COMPUTED = {
    "A000-params": lambda: V3.total,
    "A000-bf16": lambda: stored(671e9, "bf16") / TB,
    "A000-17cards": lambda: cards(memory(V3, dtype="bf16").weights, H800.printed),
    "A000-17cards-real": lambda: cards(memory(V3, dtype="bf16").weights, H800.memory),
    "A000-fp8": lambda: 671e9 * format_of("fp8").matrix.bits / 8 / GB,
    "A000-fp8-real": lambda: memory(V3, dtype="fp8").weights / GB,
    "A000-ckpt": lambda: V3_FILES / GB,
    "A000-9cards": lambda: cards(memory(V3, dtype="fp8").weights, H800.printed),
    "A000-8cards-real": lambda: cards(memory(V3, dtype="fp8").weights, H800.memory),
    "A000-9cards-ckpt": lambda: cards(V3_FILES, H800.memory),
    "A000-ratio-hi": lambda: stored(671e9, "bf16") / H800.printed,
    "A000-ratio-lo": lambda: 671e9 * format_of("fp8").matrix.bits / 8 / H800.printed,
    "A000-b300-ratio": lambda: B300.printed / H800.printed,
    "A000-b300-ratio-real": lambda: B300.usable / H800.usable,
    "A000-v4-ratio": lambda: V4.total / V3.total,
    "A000-v4-bytes-ratio": lambda: V4_FILES / V3_FILES,
    "A000-cards-v3": lambda: 671e9 * format_of("fp8").matrix.bits / 8 / H800.printed,
    "A000-cards-v4": lambda: V4_FILES / B300.printed,
    "A000-active": lambda: V3.active,
    "A000-active-noemb": lambda: V3.active - V3.parameters["embedding"],
    "A000-routed-share": lambda: V3.parameters["experts"] / V3.total,
    "A000-experts": lambda: V3.experts.active + V3.experts.shared,
    "A000-year-megatron": lambda: year("shoeybi2019megatron"),
    "A000-year-v3": lambda: year("deepseek2024v3"),
    "A002-70b-gib": lambda: stored(70e9, "bf16") / GIB,
    "A002-70b-l3": lambda: memory(SEVENTY, dtype="bf16").weights / GIB,
    "A002-16gib": lambda: stored(70e9, "bf16") / EIGHT.tp / GIB,
    "A002-235b": lambda: stored(235e9, "bf16") / GIB,
    "A002-235b-exact": lambda: memory(QWEN, dtype="bf16").weights / GIB,
    "A003-350": lambda: stored(175e9, "fp16") / GB,
    "A003-350gib": lambda: stored(175e9, "fp16") / GIB,
    "A003-2x80": lambda: 2 * A100.printed / GB,
    "A003-4x48": lambda: 4 * float(quantity("printed", "48 GB", "B")) / GB,
    "B5-l2-7b": lambda: config("llama-2-7b").total,
    "B5-l2-70b": lambda: config("llama-2-70b").total,
    "B5-l3-70b": lambda: config("llama-3.1-70b").total,
    "B5-l31-405b": lambda: config("llama-3.1-405b").total,
    "B5-l31-405b-16kv": lambda: model("llama-3.1-405b", kv_heads=16).total,
    "B5-qwen25-0.5b": lambda: config("qwen2.5-0.5b").total,
    "B5-qwen25-1.5b": lambda: config("qwen2.5-1.5b").total,
    "B5-qwen25-3b": lambda: config("qwen2.5-3b").total,
    "B5-qwen25-7b": lambda: config("qwen2.5-7b").total,
    "B5-qwen25-14b": lambda: config("qwen2.5-14b").total,
    "B5-qwen3-235b-nonemb": lambda: config("qwen3-235b-a22b").total - ends(QWEN),
    "B5-v3": lambda: config("deepseek-v3").total,
    "B5-v3-mtp": lambda: V3.mtp_total,
    "B5-v3-attn": lambda: attention(V3),
    "B5-gptoss": lambda: config("gpt-oss-120b").total,
    "B5-gptoss-act": lambda: OSS.active - OSS.parameters["embedding"],
    "B5-gptoss-mlp": lambda: OSS.parameters["experts"] + OSS.parameters["router"] + OSS_NORMS,
    "B5-gptoss-attn": lambda: OSS.parameters["attention"] + OSS_NORMS,
    "B5-gptoss-emb": lambda: ends(OSS),
    "B5-gptoss-ckpt": lambda: memory(OSS, dtype=OSS.stored).weights / GIB,
    "B5-gpt2": lambda: config("gpt2").total,
    "B5-gpt2-xl": lambda: model("gpt2", layers=48, hidden=1600, heads=25, kv_heads=25, ffn=6400).total,
    "B5-gpt3": lambda: config("gpt-3-175b").total,
    "B5-bert": bert,
    "C-v4-total": lambda: V4.total + V4.mtp_total,
    "C-v4-active": lambda: V4.active,
    "C-v4-ckpt": lambda: V4_FILES / GB,
    "C-v4-date": lambda: int(bundled_models()["deepseek-v4-pro"]["date"].replace("-", "")),
    "C-v4-8xb200": lambda: V4_FILES / (8 * B200.usable),
    "C-v4-base-8xb200": lambda: (memory(V4, dtype="fp8").weights + V4.mtp_total) / (8 * B200.usable),
    "D-accel-bert": lambda: stored(bert(), "fp32") / MIB,
    "D-cookbook-36-tool": lambda: COOKBOOK.total / 1e9,
    "D-gpupoor-params": lambda: model("llama-2-70b").total,
    "D-megatron-mtp": lambda: (V3.active + mtp_active()) / 1e9,
    "D-rasbt-922": lambda: config("llama-3.1-8b").kv_heads,
}


def config(name):
    """A model from its config.json."""
    return ModelSpec.from_config(DATA / "configs" / f"{name}.json")
