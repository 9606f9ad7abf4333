"""What a run was like for those who asked: waits from when each request was due, rates a card, and a check on both.

TTFT (time to first token) counts from the scheduled arrival, not from when somebody took the request: what is waited in
front of the door is waited too. TPOT (time per output token) is the mean gap after the first token, ITL each gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import accumulate, pairwise

import numpy as np

from ..specs.check import number, whole
from ..specs.units import seconds as in_words
from .arrivals import mean_rate
from .request import Answer

PERCENTILES = (50, 90, 99)
ROLES = {"in": "prefill", "out": "decode"}  # whose cards make which tokens


def ttft(answer: Answer) -> float:
    """Seconds from the scheduled arrival to the first token."""
    return answer.times[0] - answer.request.arrival


def end_to_end(answer: Answer) -> float:
    """Seconds from the scheduled arrival to the last token."""
    return answer.times[-1] - answer.request.arrival


def tpot(answer: Answer) -> float | None:
    """Seconds a token after the first: (end to end − TTFT) ÷ (tokens − 1); None where one token was made."""
    return (end_to_end(answer) - ttft(answer)) / (len(answer.times) - 1) if len(answer.times) > 1 else None


def finished(answer: Answer) -> bool:
    """Whether all is made that was asked for, or a stop token before."""
    made, request = answer.tokens, answer.request
    return len(made) == request.new_tokens or (bool(made) and made[-1] == request.stop)


@dataclass(frozen=True, repr=False)
class Metrics:
    """The measures of a run's `answers`, refused and unfinished ones among them. Prints itself.

    `ttft_limit` and `tpot_limit`, in seconds, are what a request must keep, both, to count in the goodput; one of a
    single token has no TPOT and must keep the first alone. `cards` is how many there are, or {"prefill": 4, "decode":
    8}: each rate is divided by the cards that make it. `seen`, [(seconds, requests in the system from then on), …] in
    order, is what somebody else counted, to be held against λ·W. Raises ValueError on answers whose times can't be.
    """

    answers: Sequence[Answer]
    ttft_limit: float | None = None
    tpot_limit: float | None = None
    cards: int | Mapping[str, int] | None = None
    seen: Sequence[tuple[float, int]] | None = None

    def __post_init__(self) -> None:
        for answer in self.answers:
            _check(answer)
        for name in ("ttft_limit", "tpot_limit"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name))
        if isinstance(self.cards, Mapping) and set(self.cards) != set(ROLES.values()):
            raise ValueError(f"cards of {', '.join(self.cards) or 'nobody'}: give one number, or prefill and decode")
        for role, count in self.cards.items() if isinstance(self.cards, Mapping) else [("cards", self.cards)]:
            if count is not None:
                whole(role, count)

    @cached_property
    def done(self) -> list[Answer]:
        """The answers that are finished; all that follows is of these, but for what was offered."""
        return [answer for answer in self.answers if finished(answer)]

    @property
    def refused(self) -> int:
        return sum(bool(answer.refused) for answer in self.answers)

    @property
    def preempted(self) -> int:
        """How often a request had to give up its cache."""
        return sum(answer.preempted for answer in self.answers)

    @cached_property
    def waits(self) -> dict[str, list[float]]:
        """Seconds by name: TTFT, TPOT and end to end, one a request; ITL, one a token after the first."""
        return {"TTFT": [ttft(a) for a in self.done],
                "TPOT": [each for a in self.done if (each := tpot(a)) is not None],
                "ITL": [gap for a in self.done for gap in np.diff(a.times).tolist()],
                "end to end": [end_to_end(a) for a in self.done]}

    def percentile(self, name: str, percent: float) -> float:
        """Of the `waits` of that name, in seconds, interpolated between neighbours; nan where there are none."""
        return float(np.percentile(self.waits[name], percent)) if self.waits[name] else float("nan")

    @cached_property
    def limits(self) -> dict[str, float]:
        """The limits that were given, in seconds, under the names of `waits`."""
        return {name: limit for name, limit in (("TTFT", self.ttft_limit), ("TPOT", self.tpot_limit))
                if limit is not None}

    @cached_property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(a.times[-1] for a in self.done) - min(a.request.arrival for a in self.done) if self.done else 0.0

    @property
    def offered(self) -> float:
        """Requests a second that were to come; nan where no two came at different times."""
        arrivals = [answer.request.arrival for answer in self.answers]
        return mean_rate(arrivals) if len(set(arrivals)) > 1 else float("nan")

    @property
    def achieved(self) -> float:
        """Requests a second that were finished."""
        return self._rate(len(self.done))

    @cached_property
    def good(self) -> list[Answer]:
        """Those that kept both limits."""
        ttft_limit, tpot_limit = (self.limits.get(name, float("inf")) for name in ("TTFT", "TPOT"))
        return [a for a in self.done if ttft(a) <= ttft_limit and (tpot(a) or 0.0) <= tpot_limit]

    @property
    def goodput(self) -> float:
        """Requests a second that kept both limits."""
        return self._rate(len(self.good))

    @property
    def good_share(self) -> float:
        """Their share of all that were asked, the refused among them."""
        return len(self.good) / len(self.answers) if self.answers else float("nan")

    @property
    def tokens(self) -> dict[str, float]:
        """Tokens a second: `in`, prompts, what a cache had of them too; `out`, those made; `total`, both."""
        ins, outs = sum(len(a.request.prompt) for a in self.done), sum(len(a.tokens) for a in self.done)
        return {"in": self._rate(ins), "out": self._rate(outs), "total": self._rate(ins + outs)}

    def cards_for(self, kind: str) -> int | None:
        """The cards that make the tokens `in`, `out` or in `total`."""
        if not isinstance(self.cards, Mapping):
            return self.cards
        return self.cards[ROLES[kind]] if kind in ROLES else sum(self.cards.values())

    @cached_property
    def in_system(self) -> tuple[float, float]:
        """Requests in the system, mean over `seconds`: L as counted, and λ·W, which must be the same (Little,
        Operations Research 9(3), 1961). W is put together from TTFT and TPOT, which so are held against the clock."""
        if not self.seconds:
            return float("nan"), float("nan")
        start, end = min(a.request.arrival for a in self.done), max(a.times[-1] for a in self.done)
        log = self._counted() if self.seen is None else self.seen
        times = [min(max(t, start), end) for t, _ in log] + [end]
        total = sum(count * (after - t) for (_, count), (t, after) in zip(log, pairwise(times), strict=True))
        spent = sum(ttft(a) + (tpot(a) or 0.0) * (len(a.times) - 1) for a in self.done)
        return total / self.seconds, self.achieved * spent / len(self.done)

    def _counted(self) -> list[tuple[float, int]]:
        """(seconds, requests in the system from then on), from arrivals and last tokens."""
        steps = sorted([(a.request.arrival, 1) for a in self.done] + [(a.times[-1], -1) for a in self.done])
        return list(zip((t for t, _ in steps), accumulate(change for _, change in steps), strict=True))

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """What the table says: a name, a value, how it comes about."""
        one = sum(len(a.tokens) == 1 for a in self.done)
        said = {"TTFT": "from when a request was due to its first token",
                "TPOT": "(end to end − TTFT) ÷ (tokens − 1)" + (f"; none for {one:,} of one token" if one else ""),
                "ITL": "between a token and the next, all of them",
                "end to end": "from when a request was due to its last token"}
        rows = [("offered", f"{_digits(self.offered)} requests/s", "from the first arrival to the last"),
                ("achieved", f"{_digits(self.achieved)} requests/s",
                 f"{len(self.done):,} finished in {in_words(self.seconds)}")]
        rows += [(name, "  ".join(f"p{p} {_time(self.percentile(name, p)):>7}" for p in PERCENTILES), note)
                 for name, note in said.items()]
        if self.limits:
            kept = " and ".join(f"{name} ≤ {in_words(limit)}" for name, limit in self.limits.items())
            rows.append(("goodput", f"{_digits(self.goodput)} requests/s",
                         f"{self.good_share:.1%} of those asked kept {kept}" + (", one token TTFT alone" if one else "")
                         + self._a_card("total", self.goodput)))
        cached = sum(a.cached for a in self.done) / max(1, sum(len(a.request.prompt) for a in self.done))
        notes = {"in": f"prompts, {cached:.1%} of them from a cache", "out": "new tokens", "total": "in and out"}
        rows += [(kind, f"{_digits(rate)} tokens/s", notes[kind] + self._a_card(kind, rate))
                 for kind, rate in self.tokens.items()]
        counted, expected = self.in_system
        rows.append(("in the system", f"{_digits(counted)} requests", f"L, counted; λ·W = {_digits(expected)}"
                     + (": they differ by more than 1%" if abs(counted - expected) > 0.01 * expected else "")))
        return rows

    def __str__(self) -> str:
        width = [max(len(row[i]) for row in self.rows) for i in range(2)]
        return "\n".join([self.title, *(f"{name:<{width[0]}}   {value:<{width[1]}}   {how}".rstrip()
                                        for name, value, how in self.rows)])

    __repr__ = __str__

    @property
    def title(self) -> str:
        left = len(self.answers) - len(self.done) - self.refused
        return (f"{len(self.answers):,} requests: {len(self.done):,} finished, {self.refused:,} refused"
                + (f", {left:,} not finished" if left else "") + f"; {self.preempted:,} preemptions")

    def _repr_html_(self) -> str:
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f'<table class="bill"><caption>{escape(self.title)}</caption><tbody>{body}</tbody></table>'

    def _rate(self, count: float) -> float:
        return count / self.seconds if self.seconds else float("nan")

    def _a_card(self, kind: str, rate: float) -> str:
        if (cards := self.cards_for(kind)) is None:
            return ""
        role = f" {ROLES[kind]}" if kind in ROLES and isinstance(self.cards, Mapping) else ""
        return f"; ÷ {cards:,}{role} cards = {_digits(rate / cards)} a card"


def _check(answer: Answer) -> None:
    times, number = answer.times, answer.request.number
    if len(times) != len(answer.tokens):
        raise ValueError(f"request {number} has {len(answer.tokens)} tokens and {len(times)} times: one for each")
    if times and (times[0] < answer.request.arrival or any(b < a for a, b in pairwise(times))):
        raise ValueError(f"request {number}, due at {answer.request.arrival} s, has tokens at {times[:4]} s: times go "
                         "up from the arrival, on one clock")


def _digits(value: float) -> str:
    """Three digits or more, and thousands apart."""
    return "–" if value != value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(value: float) -> str:
    return "–" if value != value else in_words(value)
