"""Serving: a cache's way from one card to another, queues, and DeepSeek's published service from tokens to dollars."""

from math import ceil

from facts import EIGHT, GB, MIB, MS, SEVENTY, SMALL, US
from facts_caches import beside_weights
from facts_cutting import H100

from shardlab.cost import (
    Pools,
    Role,
    best_split,
    handover,
    kv_cache,
    kv_per_token,
    little,
    md1_wait,
    prefill_floor,
    traffic,
)
from shardlab.specs import find_link
from shardlab.specs.quantity import quantity

DAY = 86_400
IN, OUT = 608e9 / DAY, 168e9 / DAY  # tokens a second of the service
SERVICE = Pools(Role(IN, 73_700, 8), Role(OUT, 14_800, 8), hits=342 / 608)
REPORTED = 226.75 - SERVICE.decode.instances  # nodes of prefill that leave the day's mean of all


def in_bulk(spec, ports=1):
    """Milliseconds of 8,192 tokens' cache over ports of 400 Gbit/s, their α left out."""
    moved = handover(spec, 8192, EIGHT if spec is SEVENTY else None, prefill=1, link=find_link("ib-ndr"), ports=ports)
    return (moved.seconds - moved.link.alpha) / MS


def saved():
    """Milliseconds that int8 saves a reader who waits for a cache's last layer."""
    seconds = prefill_floor(SEVENTY, H100, EIGHT, tokens=8192, share=0.5)
    whole, small = (handover(SEVENTY, 8192, EIGHT, prefill=seconds, link=find_link("ib-ndr"), ports=1, dtype=dtype)
                    for dtype in ("bf16", "int8"))
    return (whole.by_layers - small.by_layers) / MS


def break_even():
    """GB/s at which a prefill at half of the peak takes as long as its cache."""
    seconds = prefill_floor(SEVENTY, H100, EIGHT, tokens=8192, share=0.5)
    return handover(SEVENTY, 8192, EIGHT, prefill=seconds, link=find_link("ib-ndr")).break_even / GB


def nodes():
    """Of 8 A100, for 200 requests of 8,192 tokens at once."""
    at_once = beside_weights(0.9) / kv_cache(SEVENTY, 8192, EIGHT)
    return ceil(Role(little(10, 20), at_once, 8).instances)


def sums(tokens, seconds):
    """Milliseconds of the sums in all layers of a step of so many tokens, each `seconds(its bytes)`."""
    bill = traffic(SEVENTY, EIGHT, 1, tokens, "bf16", backward=False, head="logits")
    return sum(c.count * seconds(c.payload) for c in bill.where("all_reduce") if c.count == SEVENTY.layers) / MS


COMPUTED = {
    "A10-int8-half": lambda: kv_per_token(SEVENTY, dtype="int8") / kv_per_token(SEVENTY),
    "A10-sums-token": lambda: sums(1, lambda nbytes: 29 * US),  # measured at 16 KiB
    "A10-sums-prompt": lambda: sums(8192, lambda nbytes: nbytes / (64 * MIB) * 322 * US),  # at 64 MiB
    "A11-int8-wire": saved,
    "A11-out-of-balance": lambda: best_split(1 / 0.026, 1 / (1 - 0.026), 2)[1] / 2,
    "A12-fuse": lambda: sums(1, lambda nbytes: MS),  # a millisecond each, to count them
    "A002-20ms": lambda: in_bulk(SMALL),
    "A002-25gib-1nic": lambda: in_bulk(SEVENTY),
    "A002-25gib-8nic": lambda: in_bulk(SEVENTY, 8),
    "A002-breakeven": break_even,
    "B9-svc-prefill-nodes": lambda: SERVICE.prefill.instances,
    "B9-svc-nodes": lambda: SERVICE.cards / 8,
    "B9-svc-conc": lambda: little(OUT, 1 / 21),
    "B9-svc-hit": lambda: 1 - SERVICE.per_million("in") / SERVICE.per_million("uncached"),
    "B9-svc-cost": lambda: Pools(Role(REPORTED, 1, 8), Role(SERVICE.decode.instances, 1, 8)).per_day,
    "B9-distserve-eq": lambda: best_split(5.6, 10, 3)[1] / 3,
    "B9-mooncake-util4": lambda: 87 * GB / (4 * float(quantity("a port", "200 Gbit/s", "B/s"))),
    "B9-little": lambda: little(10, 20),
    "B9-little-70b": nodes,
    "B9-md1-pp": lambda: 0.1 + md1_wait(5, 0.1 / 2),
}
