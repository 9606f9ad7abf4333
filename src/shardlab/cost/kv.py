"""What the KV cache takes: for a token, for a request, and how many requests a memory holds.

By kind of attention: a key and a value for each KV head (MHA, GQA, MQA); one latent and one rotated key for all heads
(MLA); one entry for several tokens (DeepSeek-V4); nothing beyond the window in windowed layers.
"""

from __future__ import annotations

from ..specs import Layout, ModelSpec, dtype_of, padded
from ..specs.attention import Latent
from ..specs.check import whole
from ..specs.layout import staged

SCALE = 2  # bytes of int8's scale

def kv_per_token(spec: ModelSpec, layout: Layout | None = None, dtype: str = "bf16"
                 ) -> int | float:
    """Bytes by which each rank's cache grows with a token. `dtype`: a plain one, "fp8" (a
    byte a number) or "int8" (a byte, and 2 for the scale of what a head keeps of a token:
    (head_dim + 2) / (2 · head_dim) of bf16, 0.508 at 128). Where cp cuts the sequences,
    ranks have their part of the tokens, and this is the mean over them (no run of ours is
    behind it).

    A rank has at least one KV head, so a tp beyond the KV heads saves nothing more; a
    latent is whole on every rank. MLA in fp8 is DeepSeek's layout: the latent in fp8 with
    an fp32 scale for each 128 numbers, the rotated key in bf16 (FlashMLA). Compressed
    attention has one published format, whatever `dtype` says, and grows by less than an
    entry a token. Windowed layers don't grow. Raises ValueError on an unknown dtype and
    like `memory`.
    """
    layout = staged(layout)
    layout.check(spec)
    grows = _growth(spec, layout, dtype)
    return grows if layout.cp == 1 else grows / layout.cp


def kv_cache(spec: ModelSpec, tokens: int, layout: Layout | None = None, dtype: str = "bf16") -> int:
    """Bytes that each rank caches for one request of `tokens` tokens, prompt and answer.

    Of a sequence that cp cuts, its two of 2cp chunks, padding included.
    What compressed attention keeps of its last tokens, under 5 MB a request in DeepSeek-V4, is not in it. Raises like
    `kv_per_token`.
    """
    whole("tokens", tokens)
    layout = staged(layout)
    layout.check(spec)
    if layout.cp > 1:
        if spec.compressed or spec.window:
            raise ValueError(f"cp = {layout.cp}: {spec.name} attends to entries or windows, and how a cut sequence "
                             "caches them is not known here")
        tokens = padded(tokens, 2 * layout.cp) // layout.cp
    if spec.compressed:
        return sum(layers * (tokens // ratio) * _entry(ratio) for ratio, layers in spec.compressed.ratios)
    kept = min(tokens, spec.window or 0) * spec.windowed_layers
    return int(_growth(spec, layout, dtype) * tokens) + kept * _heads(spec, layout, dtype)


def requests_that_fit(free: int, spec: ModelSpec, tokens: int, layout: Layout | None = None, dtype: str = "bf16"
                      ) -> int:
    """How many requests of `tokens` tokens each rank has room for in `free` bytes: whole ones, 0 if not one fits.

    All ranks hold a part of every request, so the whole group holds as many as one rank does. Raises like `kv_cache`.
    """
    return max(0, free) // kv_cache(spec, tokens, layout, dtype)


def _growth(spec: ModelSpec, layout: Layout, dtype: str) -> int | float:
    """Bytes of a token in all layers, of a rank that has it."""
    stored(1, dtype)  # an unknown one is refused, whatever the attention
    if spec.compressed:
        return sum(layers / ratio * _entry(ratio) for ratio, layers in spec.compressed.ratios)
    if spec.latent:
        return spec.layers * _latent(spec.latent, dtype)
    return (spec.layers - spec.windowed_layers) * _heads(spec, layout, dtype)


def _heads(spec: ModelSpec, layout: Layout, dtype: str) -> int:
    """Bytes of a token in one layer, on one rank: a key and a value for each KV head."""
    return 2 * max(1, spec.kv_heads // layout.tp) * stored(spec.head_dim, dtype)


def _latent(latent: Latent, dtype: str) -> int:
    if dtype == "fp8":
        return latent.kv_rank + 4 * -(-latent.kv_rank // 128) + 2 * latent.rope_dim
    return stored(latent.kv_rank, dtype) + stored(latent.rope_dim, dtype)


def _entry(ratio: int) -> int:
    """Bytes of one compressed entry (DeepSeek-V4): 448 numbers in fp8, 64 in bf16, 8 bytes of scales; layers that share
    an entry among 4 tokens also keep an indexer's key for it, 128 numbers in fp4 and a 4-byte scale."""
    indexer = 128 // 2 + 4 if ratio == 4 else 0
    return 448 + 64 * 2 + 8 + indexer


def stored(numbers: int, dtype: str) -> int:
    """Bytes of what one head keeps of a token: `numbers` of them, in "int8" with their scale."""
    try:
        return numbers + SCALE if dtype == "int8" else numbers * width_of(dtype)
    except ValueError as error:
        raise ValueError(f"{error}, or int8") from None


def width_of(dtype: str) -> int:
    """Bytes of a number in a plain dtype, or in "fp8"."""
    try:
        return 1 if dtype == "fp8" else dtype_of(dtype).bytes
    except ValueError as error:
        raise ValueError(f"{error}, or fp8") from None
