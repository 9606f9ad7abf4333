"""Cards and links as the library's tables have them, and what follows from them."""

from facts import EIGHT, GB, GIB, TB

from shardlab.specs import ClusterSpec, find_card, find_link

NAMES = ("a100", "h100", "h800", "h200", "b200", "b300", "gb200", "gb300", "mi300x", "mi355x", "rubin")
CARDS = {name: find_card(name) for name in NAMES}
RACK = ClusterSpec.of("rubin", 72)
TERA = 10**12


def one_way(name):
    return find_link(name).per_direction / GB


PRINTED = {f"B8-{name}-mem": lambda card=card: card.printed / GB for name, card in CARDS.items()}
HBM = {f"B8-{name}-bw": lambda card=card: card.hbm / GB for name, card in CARDS.items()}
BF16 = {f"B8-{name}-bf16": lambda card=card: card.flop_rate("bf16") / TERA for name, card in CARDS.items()}
FP8 = {f"B8-{name}-fp8": lambda card=card: card.flop_rate("fp8") / TERA
       for name, card in CARDS.items() if "fp8" in card.flops}
LINKS = {f"B8-{name}-nvlink": lambda card=card: one_way(card.link) for name, card in CARDS.items() if name != "mi355x"}
REPORTED = {f"B8-{name}-real-{unit}": lambda name=name, one=one: CARDS[name].usable / one
            for name in ("h100", "h200", "b200", "gb200", "b300", "gb300") for unit, one in (("gb", GB), ("gib", GIB))}
COMPUTED = PRINTED | HBM | BF16 | FP8 | LINKS | REPORTED | {
    "B8-nvlink3": lambda: one_way("nvlink3"),
    "B8-nvlink4": lambda: one_way("nvlink4"),
    "B8-nvlink5": lambda: one_way("nvlink5"),
    "B8-nvlink6": lambda: one_way("nvlink6"),
    "B8-nvlink5-link": lambda: one_way("nvlink5") / 18,
    "B8-ndr": lambda: one_way("ib-ndr"),
    "B8-xdr": lambda: one_way("ib-xdr"),
    "B8-h100-node-nics": lambda: ClusterSpec.of("h100", 2 * EIGHT.tp).injection / GB,
    "B8-b300-fp4": lambda: CARDS["b300"].flop_rate("fp4") / TERA,
    "B8-h100-ridge": lambda: CARDS["h100"].ridge("bf16"),
    "B8-a100-ridge": lambda: CARDS["a100"].ridge("bf16"),
    "A002-ib": lambda: one_way("ib-ndr"),
    "A002-bw-ratio": lambda: one_way("nvlink4") / one_way("ib-ndr"),
    "C-b300-mem": lambda: CARDS["b300"].memory / GB,
    "C-rubin-rack": lambda: RACK.cards * RACK.card.printed / TB,
    "C-rubin-nvlink-rack": lambda: RACK.cards * RACK.inside.headline / TB,
    "C-rubin-bw-gain": lambda: CARDS["rubin"].hbm / CARDS["b300"].hbm,
    "D-llmanalysis-bw": lambda: one_way("ib-ndr"),
}
