"""The ladder for serving: what to try, in which order, before a model is cut to be served, and then the cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..specs import CardSpec, Layout, ModelSpec, find_link, format_of
from ..specs.units import decimal, seconds
from .memory import memory
from .serve_way import Serve, Way
from .step import Step, bigger, none_bigger, tensor_degrees
from .time import experts_met


def serve_rungs(spec: ModelSpec, card: CardSpec, task: Serve, cards: int) -> Iterator[Step]:
    """The rungs in order, without an end: the caller stops at the first that does."""
    stored = format_of(task.dtype or spec.stored or "bf16").name
    plain = Way(spec, task, card, stored, task.kv_dtype, cards=cards)
    yield plain.step(f"one card, {stored}")
    yield from _fewer_bits(plain)
    if plain.bill.per_rank > card.memory:
        yield _offload(plain)
    yield _bigger_card(plain)
    yield from _cut(plain)


def _fewer_bits(plain: Way) -> Iterator[Step]:
    """The cache in fp8; then weights of 8, then of 4 bits, if that is less than there is, with the cache as it is, then
    in fp8.

    Eight bits rarely cost quality; four may, so that rung says "would".
    """
    measured = "; measure the error first"
    small = replace(plain, kv_dtype="fp8")
    step = small.step(f"fewer bits, {small.stored}", more=measured)
    if small != plain and step.does == "yes":
        yield step
    for dtype in (_eight(plain.card), "int4"):
        if memory(plain.spec, dtype=dtype).weights >= memory(plain.spec, dtype=plain.dtype).weights:
            continue
        wide = next((wide for wide in ("bf16", "fp16", "fp32") if wide in plain.card.flops), "bf16")
        gain = "prefill gains too, the card computes in fp8" if dtype == "fp8" else f"prefill still computes in {wide}"
        for kv_dtype in dict.fromkeys((plain.kv_dtype, "fp8")):
            way = replace(plain, dtype=dtype, kv_dtype=kv_dtype)
            step = way.step(f"fewer bits, {way.stored}", "would" if dtype == "int4" else "yes",
                            f"; decoding reads less, {gain}{measured}")
            if step.does != "no":
                break
        yield step


def _eight(card: CardSpec) -> str:
    """The format of 8 bits for a card: fp8 where it computes in it."""
    return "fp8" if "fp8" in card.flops else "int8"


def _offload(plain: Way) -> Step:
    """What the card has no room for stays with the host, and what a step needs of it is streamed for each, through
    rooms for two layers: one is computed from while the next arrives."""
    bill, card = plain.bill, plain.card
    excess = bill.per_rank + 2 * bill.weights // plain.spec.layers - card.memory
    if card.host_link is None or excess > bill.weights:
        why = (f"{decimal(card.memory - bill.weights + excess)} of caches, work and rooms for two layers are too much"
               if excess > bill.weights else "its link to the host isn't known")
        return Step("offload", "no", card.memory, why, bill)
    link = find_link(card.host_link)
    unmet = bill.stored["experts"] * (1 - experts_met(plain.spec, plain.task.concurrency))
    wait = max(plain.floor, excess * (1 - unmet / bill.weights) / link.per_direction)
    slower = plain.task.latency < wait
    why = (f"{decimal(excess)} stay with the host; over {link.name}, {decimal(link.per_direction)}/s, a token waits "
           f"{seconds(wait)}" + (f", and may take {seconds(plain.task.latency)}" if slower else ""))
    return Step("offload", "no" if slower else "yes", card.memory, why, bill)


def _bigger_card(plain: Way) -> Step:
    """The smallest card that does it alone, as it is, or in 8 bits. It sends nothing, so it comes before the cut."""
    for eight in (False, True):
        for other in bigger(plain.card):
            way = replace(plain, card=other, cards=1)
            if eight:
                way = replace(way, dtype=_eight(other), kv_dtype="fp8")
            if way.dtype == "fp8" and "fp8" not in other.flops:
                continue
            kept = "" if way.dtype == plain.dtype else f", {way.stored}"
            step = way.step(f"a bigger card, {other.name}{kept}", "would", ", and no collective")
            if step.does == "would":
                return step
    return none_bigger(plain.card, plain.bill.per_rank)


def _cut(plain: Way) -> Iterator[Step]:
    """Tensor parallelism inside a domain, as it is, then in fewer bits; beyond it, what division says until the bills
    of later chapters do."""
    spec, card, cards = plain.spec, plain.card, plain.cards
    first = (f"; the experts, {spec.parameters['experts'] / spec.total:.0%} of the weights, are the first axis "
             "(chapter 7)") if spec.experts else ""
    eight, further = replace(plain, dtype=_eight(card), kv_dtype="fp8"), _further(plain)
    ways = [plain, replace(plain, kv_dtype="fp8"), eight]
    if further.does == "no":  # four bits where whole ones won't do on all cards either
        ways.append(replace(eight, dtype="int4"))
    for way in dict.fromkeys(ways):
        step = None
        for tp in tensor_degrees(spec, card, cards):
            step = replace(way, layout=Layout(tp)).step(f"cut, tensor parallel over {tp}, {way.stored}",
                                                        "would" if way.dtype == "int4" != plain.dtype else "yes", first)
            if step.does != "no":
                break
        if step:
            yield step
    yield further


def _further(plain: Way) -> Step:
    bill, card, cards = plain.bill, plain.card, plain.cards
    one = plain.holding(1)
    shared = bill.weights + bill.part("KV cache")
    each = card.memory - one.part("activations") - one.part("buffers")
    axis = ("experts first (chapter 7)" if plain.spec.experts
            else "tensor inside a domain, pipeline across (chapters 5, 6)")
    degrees = (1, *tensor_degrees(plain.spec, card, cards))
    if any(replace(plain, layout=Layout(tp)).copies(cards // tp) for tp in degrees):
        why = ("it fits, and is too slow for what is asked: faster cards, or more of them, for a token; more requests "
               "at once for more tokens a second")
        return Step("cut further", "no", shared // cards, why)
    if each * cards < shared:
        needed = f"about {math.ceil(shared / each)} cards" if each > 0 else "cards with room for the work on a prompt"
        why = f"{decimal(shared)} of weights and caches ask for {needed}: {axis}"
        return Step("cut further", "no", shared // cards, why)
    return Step("cut further", "would", shared // cards,
                f"{decimal(shared // cards)} of weights and caches a card if they divide evenly: {axis}")
