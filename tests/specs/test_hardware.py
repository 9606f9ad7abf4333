"""Cards, links and clusters: the bundled ones are what was published, and what makes no sense is refused by name."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from shardlab.specs import CardSpec, ClusterSpec, LinkSpec, bundled_cards, bundled_links, find_card, find_link
from shardlab.specs.quantity import quantity

CARDS, LINKS = bundled_cards(), bundled_links()
GB, MIB, GIB, TERA = 10**9, 2**20, 2**30, 10**12
WANTED = {"a100", "h100", "h800", "h200", "b200", "gb200", "b300", "gb300", "mi300x", "mi355x", "rubin"}

# rows B8-<card>-mem, -bw, -bf16, -fp8, -nvlink of the facts: GB as printed, GB/s, TFLOP/s dense, GB/s one way
PUBLISHED = {
    "a100": (80, 2039, 312, None, 300), "h100": (80, 3350, 989, 1979, 450), "h800": (80, 3350, 989, 1979, 200),
    "h200": (141, 4800, 989, 1979, 450), "b200": (180, 8000, 2250, 4500, 900), "b300": (288, 8000, 2250, 4500, 900),
    "gb200": (186, 8000, 2500, 5000, 900), "gb300": (288, 8000, 2500, 5000, 900),
    "mi300x": (192, 5300, 1307.4, 2614.9, 448), "mi355x": (288, 8000, 2500, 5000, None),
    "rubin": (288, 22000, 4000, 17500, 1800),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_card_is_what_was_published(name):
    card, (memory, hbm, bf16, fp8, link) = CARDS[name], PUBLISHED[name]
    assert card.printed == memory * GB
    assert card.hbm == hbm * GB
    assert card.flop_rate("bf16") == bf16 * TERA
    assert card.flops.get("fp8") == (fp8 and fp8 * TERA)
    assert link is None or find_link(card.link).per_direction == link * GB


@pytest.mark.parametrize(("name", "mib", "gb", "gib"), [  # rows B8-<card>-real-gb and -real-gib
    ("h100", 81559, 85.52, 79.65), ("h200", 143771, 150.75, 140.4), ("b200", 183359, 192.27, 179.06),
    ("gb200", 189471, 198.67, 185.03), ("b300", 275040, 288.4, 268.59), ("gb300", 284208, 298.01, 277.55),
])
def test_what_a_driver_reports(name, mib, gb, gib):
    card = CARDS[name]
    assert card.usable == card.memory == mib * MIB
    assert card.memory / GB == pytest.approx(gb, rel=1e-3)
    assert card.memory / GIB == pytest.approx(gib, rel=1e-3)


def test_every_card_is_there_with_its_source_and_date():
    assert set(CARDS) == WANTED
    for card in CARDS.values():
        assert len(card.source) > 3 and card.note
        assert card.date > "2020-01"
        assert card.link in LINKS and card.host_link in (None, *LINKS)
        assert card.usable is None or 0.9 < card.usable / card.physical <= 1


def test_physical_printed_and_usable_of_b200_are_three_numbers():
    """Numbers that books got wrong, 18, and B8-b200-real-gib: 192 fits the stacks in GiB and the driver's bytes in GB,
    180 the driver's in GiB. B300's driver reports the same share of its stacks, which speaks for the first."""
    b200, b300 = CARDS["b200"], CARDS["b300"]
    assert b200.physical == 8 * 24 * GIB and b300.physical == 8 * 36 * GIB
    assert (b200.printed / GB, round(b200.usable / GIB), round(b200.usable / GB)) == (180, 179, 192)
    assert [round(card.usable / card.physical, 4) for card in (b200, b300)] == [0.9326, 0.9326]
    assert [round(CARDS[name].usable / CARDS[name].physical, 4) for name in ("gb200", "gb300")] == [0.9637, 0.9637]
    assert "192" in b200.note and "does not say which" in b200.note


def test_dense_is_not_the_headline():
    """Numbers that books got wrong, 13: 312 TFLOP/s is A100; 1,979 is H100 with sparsity, dense it is 989."""
    assert CARDS["a100"].flop_rate("bf16") == 312e12
    assert CARDS["h100"].flop_rate("bf16") == 989e12
    assert CARDS["h100"].headline("bf16") == pytest.approx(1979e12, rel=1e-3)
    assert CARDS["h100"].headline("fp8") == pytest.approx(3958e12)
    assert CARDS["rubin"].headline("bf16") is None


def test_units_are_those_of_the_source():
    """Numbers that books got wrong, 16 and 17: A100 80GB reads 2.0 TB/s (HBM2e), not 1.6; NVLink of an H100 adds up to
    900 GB/s, not Gbit/s; DGX H100 has 8 × 400 Gbit/s, 0.4 TB/s one way (B8-h100-node-nics)."""
    assert CARDS["a100"].hbm == pytest.approx(2.0e12, rel=0.02)
    assert LINKS["nvlink4"].headline == 0.9e12
    assert ClusterSpec.of("h100", 16).injection == 8 * 400e9 / 8 == 0.4e12


def test_ridge_points():  # rows B8-h100-ridge, B8-a100-ridge
    assert CARDS["h100"].ridge("bf16") == pytest.approx(295.2, rel=1e-3)
    assert CARDS["a100"].ridge("bf16") == pytest.approx(153.0, rel=1e-3)


def test_sources_that_disagree_are_named():
    """B8-b300-fp4: sources differ by 19%, and the entry says so, with the figures."""
    assert CARDS["b300"].flop_rate("fp4") == pytest.approx(14000e12, rel=0.11)
    assert all(figure in CARDS["b300"].note for figure in ("12,600", "13,125", "14,000", "15,000"))


def test_the_card_race():
    """A000-b300-ratio, -real, C-b300-mem, C-rubin-rack, C-rubin-nvlink-rack, C-rubin-bw-gain."""
    b300, h800, rubin = CARDS["b300"], CARDS["h800"], CARDS["rubin"]
    assert b300.printed / h800.printed == 3.6
    assert b300.memory / h800.memory == pytest.approx(3.372, rel=1e-3)
    assert b300.memory / GB == pytest.approx(288, rel=2e-3)
    rack = ClusterSpec.of("rubin", 72)
    assert rack.domains == 1 and rack.cards * rubin.printed == 20.736e12
    assert rack.cards * rack.inside.headline == pytest.approx(259.2e12)
    assert rubin.hbm / b300.hbm == 2.75 and rubin.printed == b300.printed


@pytest.mark.parametrize(("name", "per_direction"), [  # rows B8-nvlink3 to 6, B8-ndr, B8-xdr, B8-mi300x-nvlink
    ("nvlink3", 300), ("nvlink4", 450), ("nvlink4-h800", 200), ("nvlink5", 900), ("nvlink6", 1800), ("ib-ndr", 50),
    ("ib-xdr", 100), ("infinity-fabric", 448), ("pcie4", 31.5), ("pcie5", 63), ("ethernet-10", 1.25),
    ("ethernet-25", 3.125), ("ethernet-100", 12.5),
])
def test_a_link_in_one_direction(name, per_direction):
    assert find_link(name).per_direction == per_direction * GB


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_a_rate_is_its_lanes(link):
    parts = [part.strip() for part in link.lanes.split("×")]
    rates = [quantity("lane", part, "B/s") for part in parts if part.endswith("/s")]
    counts = [float(re.match(r"\d+", part)[0]) for part in parts if re.fullmatch(r"\d+ (links?|lanes?)", part)]
    coding = [128 / 130 for part in parts if part == "128/130"]
    assert len(rates) == 1 and len(rates + counts + coding) == len(parts)
    assert link.per_direction == pytest.approx(float(rates[0]) * math.prod(counts + coding), rel=1e-3)
    assert link.source and link.date
    if link.headline and not link.name.startswith("pcie"):
        assert link.headline == 2 * link.per_direction


def test_900_gb_a_second_is_no_single_link():
    """B8-nvlink5-link, a common false claim: one link of NVLink 5 carries 50 GB/s one way, the GPU's 18 carry 900."""
    assert find_link("nvlink5").per_direction / 18 == 50e9


def test_a_servers_400_gb_a_second_are_not_one_cards():
    """D-llmanalysis-bw, a wrong answer: 400 GB/s between nodes is a server's eight ports; a card's share is 50."""
    cluster = ClusterSpec.of("h100", 16)
    assert cluster.between.per_direction == 50e9 != 400e9 == cluster.injection


@pytest.mark.parametrize(("name", "cards", "per_domain", "domains"), [
    ("h100", 1, 1, 1), ("h100", 4, 4, 1), ("h100", 8, 8, 1), ("h800", 2048, 8, 256), ("gb200", 72, 72, 1),
    ("gb300", 144, 72, 2),
])
def test_the_usual_cluster(name, cards, per_domain, domains):
    cluster = ClusterSpec.of(name, cards)
    assert (cluster.per_domain, cluster.domains, cluster.cards) == (per_domain, domains, cards)
    assert cluster.inside == find_link(CARDS[name].link) and cluster.between == find_link("ib-ndr")


def test_a_cluster_of_parts():
    card = replace(CARDS["h100"], link=None)
    assert ClusterSpec.of(card, 2, between="ethernet-25").inside.name == "pcie5"
    with pytest.raises(ValueError, match="names no link"):
        ClusterSpec.of(replace(card, host_link=None), 2)


@pytest.mark.parametrize(("cards", "said"), [
    (0, "cards must be a whole number of at least 1, not 0"), (-8, "not -8"), (8.0, r"not 8\.0"),
    (12, "12 cards don't fill domains of 8 h100: take 8 or 16"),
])
def test_a_cluster_without_cards_is_refused(cards, said):
    with pytest.raises(ValueError, match=said):
        ClusterSpec.of("h100", cards)
    with pytest.raises(ValueError, match="domains must be a whole number of at least 1"):
        replace(ClusterSpec.of("h100", 8), domains=0)


def test_dtypes_by_our_names_and_pytorchs():
    h100 = CARDS["h100"]
    assert h100.flop_rate(torch.bfloat16) == h100.flop_rate("bfloat16") == h100.flop_rate("bf16")
    with pytest.raises(ValueError, match="a100 has no arithmetic in 'fp8' that is known here: fp32, tf32, bf16"):
        CARDS["a100"].flop_rate("fp8")


def test_memory_falls_back_to_what_is_printed_and_says_so():
    assert CARDS["rubin"].memory == 288 * GB and "not known" in CARDS["rubin"].memory_is
    assert CARDS["h100"].memory_is == "as its driver reports"


def test_a_name_is_found_in_any_case_or_met_with_the_nearest():
    assert find_card("H100") == find_card("h100") and hash(find_card("H100"))
    assert find_link("NVLink4").name == "nvlink4"
    with pytest.raises(ValueError, match="no bundled card 'h10': did you mean h100 or"):
        find_card("h10")
    with pytest.raises(ValueError, match="no bundled link 'nvlink': did you mean nvlink"):
        find_link("nvlink")


OWN = {"printed": "24 GB", "usable": "24564 MiB", "hbm": "1008 GB/s", "flops": {"bf16": "165.2 TFLOP/s"},
       "link": "pcie4"}
TOML = """
printed = "24 GB"
usable = "24564 MiB"
hbm = "1008 GB/s"
flops = { bf16 = "165.2 TFLOP/s" }
link = "pcie4"
"""


def test_your_own_card_and_link_come_from_a_file(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(OWN))
    (tmp_path / "mine.toml").write_text(TOML)
    mine = find_card(tmp_path / "mine.toml")
    assert mine == find_card(str(tmp_path / "mine.json"))
    assert mine == CardSpec(name="mine", printed=24 * GB, usable=24564 * MIB, hbm=1008e9, flops={"bf16": 165.2e12},
                            link="pcie4")
    (tmp_path / "wire.toml").write_text('name = "garage"\nper_direction = "2.5 Gbit/s"\nalpha = "50 µs"\n')
    assert find_link(tmp_path / "wire.toml") == LinkSpec(name="garage", per_direction=312.5e6, alpha=50e-6)


@pytest.mark.parametrize(("change", "said"), [
    ({"hbm": None}, "the card 'mine' lacks the key 'hbm'"),
    ({"hmb": "1 GB/s"}, "has an unknown key 'hmb': did you mean hbm"),
    ({"printed": "24"}, 'printed = \'24\': write a number and its unit, as in "80 GB"'),
    ({"printed": 24}, "printed = 24: write a number and its unit"),
    ({"printed": "-24 GB"}, "printed must be a whole number of at least 1, not -24000000000"),
    ({"printed": "0.3 B"}, "printed must be a whole number"),
    ({"usable": "24 GB/s"}, "usable = '24 GB/s': write a number and its unit"),
    ({"hbm": "0 GB/s"}, "hbm must be a number above 0"),
    ({"hbm": "1008 GBps"}, "hbm = '1008 GBps'"),
    ({"physical": "20 GB"}, "usable = 25,757,220,864 B is more than physical = 20,000,000,000 B"),
    ({"flops": "165 TFLOP/s"}, "flops = '165 TFLOP/s': give a table of dtypes"),
    ({"flops": {}}, "flops is empty"),
    ({"flops": {"bf17": "1 TFLOP/s"}}, "unknown dtype 'bf17' in flops: use fp64, fp32"),
    ({"flops": {"bf16": "-1 TFLOP/s"}}, r"flops\['bf16'\] must be a number above 0"),
    ({"link": "nvlnk4"}, "no bundled link 'nvlnk4': did you mean nvlink4"),
    ({"domain": 0}, "domain must be a whole number of at least 1, not 0"),
    ({"sparse": 0}, "sparse must be a number above 0"),
    ({"date": "March 2022"}, 'date = \'March 2022\': give the year and the month, as in "2022-03"'),
])
def test_a_file_that_makes_no_sense_is_refused_by_its_key(tmp_path, change, said):
    data = {key: value for key, value in (OWN | change).items() if value is not None}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=said):
        find_card(tmp_path / "mine.json")


@pytest.mark.parametrize(("name", "text", "said"), [
    ("mine.toml", 'printed = "24', "is not a whole TOML file"),
    ("mine.json", '{"printed": ', "is not a whole JSON file"), ("mine.json", "[1]", "holds a list"),
])
def test_a_broken_file_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    for find in (find_card, find_link):
        with pytest.raises(ValueError, match=said):
            find(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        find_card(tmp_path / "gone.toml")


@pytest.mark.parametrize(("change", "said"), [
    ({"per_direction": -1.0}, "per_direction must be a number above 0, not -1.0"),
    ({"headline": 1.0}, "a headline adds directions up"), ({"alpha": 0}, "alpha must be a number above 0"),
])
def test_a_link_that_makes_no_sense_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        replace(LINKS["nvlink4"], **change)


@pytest.mark.parametrize(("text", "unit", "value"), [
    ("80 GB", "B", 80 * GB), ("81559 MiB", "B", 81559 * MIB), ("400 Gbit/s", "B/s", 50 * GB), ("0.6 µs", "s", 6e-7),
    ("1,979 TFLOP/s", "FLOP/s", 1979 * TERA), ("1.8 TB/s", "B/s", 1.8e12), ("3 us", "s", 3e-6),
])
def test_quantities(text, unit, value):
    assert float(quantity("x", text, unit)) == value
