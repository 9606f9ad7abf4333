"""What a cluster is: domains of cards behind a fast link, and the slower link between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .card import CardSpec, find_card
from .check import whole
from .link import LinkSpec, find_link
from .topology import Topology


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """`domains` scale-up domains (a server of 8, a rack of 72) of `per_domain` cards of one kind.

    Cards of a domain talk over `inside`, cards of different domains over `between`: what one card has of either.
    Raises ValueError on a cluster without cards.
    """

    name: str
    card: CardSpec
    per_domain: int
    domains: int
    inside: LinkSpec
    between: LinkSpec

    def __post_init__(self):
        whole("per_domain", self.per_domain)
        whole("domains", self.domains)

    @classmethod
    def of(cls, card: CardSpec | str | Path, cards: int, between: LinkSpec | str | Path = "ib-ndr") -> ClusterSpec:
        """The usual cluster of that many cards: whole domains of `card.domain`, or one domain that isn't full.

        Inside a domain is the card's own link, or its link to the host if it has no other. `between` stands for one
        port a card. Raises ValueError on 0 cards, on cards that would leave a domain partly empty, and on a card
        whose link isn't known.
        """
        card = card if isinstance(card, CardSpec) else find_card(card)
        whole("cards", cards)
        per_domain = min(cards, card.domain)
        if cards % per_domain:
            below = cards - cards % per_domain
            raise ValueError(f"{cards} cards don't fill domains of {per_domain} {card.name}: take {below} or "
                             f"{below + per_domain}, or say how with ClusterSpec(per_domain=…, domains=…)")
        inside = card.link or card.host_link
        if inside is None:
            raise ValueError(f"{card.name} names no link: give it one (link = \"pcie5\"), or say which with "
                             "ClusterSpec(inside=…)")
        return cls(name=f"{cards} × {card.name}", card=card, per_domain=per_domain, domains=cards // per_domain,
                   inside=find_link(inside), between=between if isinstance(between, LinkSpec) else find_link(between))

    @property
    def cards(self) -> int:
        """How many cards there are."""
        return self.per_domain * self.domains

    @property
    def injection(self) -> float:
        """Bytes a second that one whole domain can send to the others. Not to be mistaken for one card's share."""
        return self.per_domain * self.between.per_direction

    @property
    def topology(self) -> Topology:
        """Its cards as ranks: a node for each domain, a NIC for each card."""
        return Topology(nodes=self.domains, per_node=self.per_domain, between=self.between, inside=self.inside,
                        nic="rank")
