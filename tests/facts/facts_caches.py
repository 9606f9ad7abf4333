"""KV caches: bytes a token, bytes a request, and the requests that a card's memory holds beside the weights."""

from facts import DATA, EIGHT, GB, GIB, KIB, MIB, SEVENTY, SMALL, V3, V4, model, shown, stored

from shardlab.cost import kv_cache, kv_per_token
from shardlab.specs import Layout, ModelSpec, find_card
from shardlab.specs.quantity import quantity

A100 = find_card("a100")
OSS = model("gpt-oss-120b")
SIZES = dict(layers=40, heads=40, kv_heads=40, head_dim=128, hidden=5120, ffn=4 * 5120, vocab=50272, layer_norm=True,
             learned_positions=True, gated=False)
OPT_13B, OPT_66B = ModelSpec(**SIZES), ModelSpec(**SIZES | dict(layers=64, heads=72, kv_heads=72, hidden=72 * 128))
# 64 layers, 16 of which cache KV: a cache that stops growing at once stands in for the others' fixed state
HYBRID = model("llama-3.1-8b", layers=64, kv_heads=4, head_dim=256, window=1, windowed_layers=48)


def of(name):
    return kv_per_token(ModelSpec.from_config(DATA / "configs" / f"{name}.json"))


def beside_weights(of_memory=1.0):
    """Bytes of an A100 that a model of 70e9 parameters over eight of them leaves free, of a share of its memory."""
    return of_memory * A100.physical - stored(70e9, "bf16") / EIGHT.tp


def uncompressed():
    """V3's cache a token if it held keys and values of each head: as long as queries, and as what o_proj reads."""
    shape = {tensor.name: tensor.shape for tensor in V3.layer_tensors()}
    keys, values = shape["self_attn.q_b_proj.weight"][0], shape["self_attn.o_proj.weight"][1]
    return V3.layers * stored(keys + values, "bf16")


COMPUTED = {
    "A002-kvtok": lambda: kv_per_token(SEVENTY, dtype="fp16") / KIB,
    "A002-8k": lambda: kv_cache(SEVENTY, 8192) / GIB,
    "A002-8k-1gib": lambda: kv_cache(SEVENTY, 8192) / GIB,
    "A002-8k-8b": lambda: kv_cache(SMALL, 8192) / GIB,
    "A002-640": lambda: 8 * A100.physical / GIB,
    "A002-free-card": lambda: beside_weights() / GIB,
    "A002-free-node": lambda: EIGHT.tp * beside_weights() / GIB,
    "A002-conc": lambda: beside_weights() / kv_cache(SEVENTY, 8192, EIGHT),
    "A002-conc-09": lambda: beside_weights(0.9) / kv_cache(SEVENTY, 8192, EIGHT),
    "A002-per-req-card": lambda: kv_cache(SEVENTY, 8192, EIGHT) / GIB,
    "A002-kv-fp8": lambda: kv_cache(SEVENTY, 8192, dtype="fp8") / GIB,
    "B6-l2-7b": lambda: of("llama-2-7b"),
    "B6-l2-13b": lambda: of("llama-2-13b"),
    "B6-l31-405b": lambda: of("llama-3.1-405b"),
    "B6-mixtral": lambda: of("mixtral-8x7b"),
    "B6-qwen3-235b": lambda: of("qwen3-235b-a22b"),
    "B6-qwen25-0.5b": lambda: of("qwen2.5-0.5b"),
    "B6-qwen25-72b": lambda: of("qwen2.5-72b"),
    "B6-gpt2": lambda: of("gpt2"),
    "B6-opt-13b": lambda: kv_per_token(OPT_13B),
    "B6-gptoss-all": lambda: kv_per_token(model("gpt-oss-120b", window=None, windowed_layers=0)),
    "B6-gptoss-grow": lambda: of("gpt-oss-120b"),
    "B6-gptoss-window": lambda: kv_cache(OSS, 8192) - 8192 * kv_per_token(OSS),
    "B6-v3-mla": lambda: of("deepseek-v3"),
    "B6-v3-mla-fp8": lambda: kv_per_token(V3, dtype="fp8"),
    "B6-v3-mha": uncompressed,
    "B6-v3-mha-ratio": lambda: uncompressed() / kv_per_token(V3),
    "B6-ratio-72b": lambda: of("qwen2.5-72b") / kv_per_token(V3),
    "B6-l2-70b-mha": lambda: kv_per_token(model("llama-2-70b", kv_heads=64)),
    "B6-tp-replicate": lambda: kv_per_token(SEVENTY, Layout(tp=16)),
    "B9-opt66b": lambda: kv_cache(OPT_66B, 512) / GIB,
    "B9-opt66b-gb": lambda: kv_cache(OPT_66B, 512) / GB,
    "B9-opt66b-90": lambda: 10 * 8 * kv_cache(OPT_66B, 512) / GIB,
    "B9-opt66b-96": lambda: shown(10 * kv_cache(OPT_66B, 512), "Gbit/s"),
    "B9-opt13b": lambda: kv_per_token(OPT_13B) / KIB,
    "B9-opt13b-2k": lambda: kv_cache(OPT_13B, 2048) / GIB,
    "B9-13b-65pct": lambda: stored(13e9, "fp16") / float(quantity("printed", "40 GB", "B")),
    "B9-mooncake-40": lambda: kv_cache(SEVENTY, 131072) / GIB,
    "B9-hfblog-8b": lambda: kv_cache(SMALL, 16000) / GIB,
    "C-v4-kv": lambda: kv_per_token(V4),
    # V3.2 adds to V3's cache an indexer's key a layer: 128 numbers in fp8, a 4-byte scale
    "C-v4-kv-ratio": lambda: kv_per_token(V4) / (kv_per_token(V3, dtype="fp8") + V3.layers * (128 + 4)),
    "D-cookbook-kv-70b": lambda: kv_cache(model("llama-2-70b"), 4096 + 1) / GIB,
    "D-llmviewer-12": lambda: kv_cache(model("llama-2-70b"), 4096) / model("llama-2-70b").layers,
    "D-lmcache-688": lambda: of("deepseek-v3"),
    "D-vllmfit-2": lambda: of("llama-2-7b"),
    "D-omlx-2725": lambda: 64 * kv_per_token(HYBRID) / MIB,
    "D-blog-7b": lambda: kv_cache(model("llama-2-7b"), 32768) / GIB,
}
