"""Two roles: DeepSeek's published service, from its tokens to its dollars."""

import pytest

from shardlab.cost import Pools, Role, balance, little
from shardlab.specs import Layout

DAY = 86_400
SERVICE = Pools(Role(608e9 / DAY, 73_700, 8), Role(168e9 / DAY, 14_800, 8), price=2.0, hits=342 / 608)


def test_the_published_service_closes():
    """608e9 tokens in, 342e9 of them hits, 168e9 out in a day; 226.75 nodes reported (open-infra-index, day 6)."""
    assert SERVICE.prefill.instances == pytest.approx(95.48, abs=5e-3)
    assert SERVICE.decode.instances == pytest.approx(131.38, abs=5e-3)
    assert SERVICE.cards / 8 == pytest.approx(226.86, abs=5e-3) == pytest.approx(226.75, rel=1e-3)
    assert SERVICE.ratio == pytest.approx(0.727, abs=5e-4)
    assert SERVICE.per_day == pytest.approx(87_072, rel=1e-3)
    streams = little(168e9 / DAY, 1 / 21)
    assert streams == pytest.approx(92_600, rel=1e-3)
    assert streams / SERVICE.decode.instances == pytest.approx(705, rel=1e-3)


def test_what_its_tokens_cost():
    prices = {what: SERVICE.per_million(what) for what in ("in", "uncached", "out", "total")}
    assert prices["in"] == pytest.approx(0.060, abs=5e-4) and prices["out"] == pytest.approx(0.300, abs=5e-4)
    assert prices["uncached"] == pytest.approx(0.138, abs=5e-4)
    assert prices["total"] == pytest.approx(SERVICE.per_day / (608e3 + 168e3))
    spent = prices["in"] * 608e3 + prices["out"] * 168e3
    assert spent == pytest.approx(SERVICE.per_day)
    with pytest.raises(ValueError, match="'all' is none of in, uncached, out, total"):
        SERVICE.per_million("all")


def test_the_balance_is_where_both_are_as_busy():
    """S_p = 0.2 s, 100 tokens of 40 ms in batches of 50: a decode instance takes 12.5 requests/s, a prefill one 5."""
    assert balance(0.2, 100, 0.04, 50) == pytest.approx(12.5 / 5)
    pools = Pools(Role(10, 5, 1), Role(10, 12.5, 1))  # in requests a second
    assert pools.ratio == pytest.approx(balance(0.2, 100, 0.04, 50))


def test_the_account_shows_both_roles():
    text, data = str(SERVICE), SERVICE.to_dict()
    assert "95.48 instances" in text and "at least 96" in text and "tokens/s out" in text
    assert data["per_million"]["out"] == SERVICE.per_million("out") and data["ratio"] == SERVICE.ratio


def test_what_is_refused():
    for wrong in (lambda: Role(0, 1, 8), lambda: Role(1, -1, 8), lambda: Role(1, 1, 0),
                  lambda: Pools(Role(1, 1, 1), Role(1, 1, 1), price=0),
                  lambda: Pools(Role(1, 1, 1), Role(1, 1, 1), hits=1.0), lambda: balance(1, 0, 1, 1)):
        with pytest.raises(ValueError, match=r"must be|is a share"):
            wrong()
    assert Role.of(1, 1, Layout(2, dp=4, ep=4)).cards == 8
