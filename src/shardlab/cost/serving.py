"""What serving holds on each rank: weights, the requests' caches, the work of a prompt, and buffers."""

from __future__ import annotations

from dataclasses import replace

from ..specs import Layout, ModelSpec
from ..specs.check import whole
from ..specs.layout import served
from .activations import forward_peak
from .kv import kv_cache
from .memory import memory
from .memory_bill import MemoryBill, Part
from .training import RESERVE, reserved


def serving(spec: ModelSpec, layout: Layout | None = None, *, context: int, concurrency: int = 1,
            dtype: str = "bf16", kv_dtype: str = "bf16", chunk: int = 2048, host_kv: float = 0.0,
            reserve: str = RESERVE, redundant: int = 0) -> MemoryBill:
    """The bill of serving `concurrency` requests at once, each of up to `context` tokens, prompt and answer.

    Parts: "KV cache" (the share `host_kv` of it, 0 to 1, in the host's memory), "activations" (the most that a forward
    pass over `chunk` tokens of prompts has alive, logits of every request's last token included) and "buffers"
    (`reserve`, an assumption). The memory for caches so depends on the chunk and not on weights alone. `dtype` is any
    format of `format_of`; the arithmetic is in bf16 where weights have fewer bits. Each layer may have `redundant`
    copies of experts. Raises ValueError as `memory` and
    `kv_cache` do, on a share outside 0 to 1 and on a reserve that is no size.
    """
    if isinstance(host_kv, bool) or not isinstance(host_kv, int | float) or not 0 <= host_kv <= 1:
        raise ValueError(f"host_kv = {host_kv!r} is a share of the cache: 0 to 1")
    served(layout).check(spec, redundant)
    if spec.learned_positions and context > spec.max_positions:
        raise ValueError(f"{spec.name} has learned {spec.max_positions:,} positions, too few for {context:,} tokens")
    bill = memory(spec, layout, dtype, redundant=redundant)
    cut = replace(bill.layout, ep=1)  # caches and activations don't go by where experts are
    one = kv_cache(spec, whole("context", context), cut, kv_dtype)
    cache = whole("concurrency", concurrency) * one
    away = round(cache * host_kv)
    tokens = min(whole("chunk", chunk), concurrency * context)
    work = forward_peak(spec, cut, tokens=tokens, sequences=concurrency, dtype=bill.format.rest.name,
                        logits=concurrency, device="cuda")
    each = f"{concurrency:,} request{'s' if concurrency > 1 else ''} × {context:,} tokens of {one:,} B ({kv_dtype})"
    parts = [Part("KV cache", cache - away, each),
             Part("activations", work, f"a forward pass over {tokens:,} tokens of prompts"), reserved(reserve)]
    if away:
        parts.append(Part("KV cache", away, f"{host_kv:.0%} of it", "host"))
    task = f"serving {concurrency:,} × {context:,} tokens, weights in {bill.format.name}"
    return replace(bill, parts=tuple(parts), task=task)
