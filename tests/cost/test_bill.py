"""How a bill prints itself."""

import json
from html.parser import HTMLParser
from pathlib import Path

from shardlab import cost
from shardlab.specs import Layout, ModelSpec, find_model

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
SMOLLM = ModelSpec.from_config(CONFIGS / "smollm2-135m.json")

MEMORY = """\
smollm2-135m, on each of 3 ranks (tp = 3), trained with adamw
  embedding   28,311,552 → 9,437,184 × 4 B (fp32)            37.749 MB       36 MiB
  attention   26,542,080 → 8,847,360 × 4 B (fp32)            35.389 MB    33.75 MiB
  mlp         79,626,240 → 26,542,080 × 4 B (fp32)           106.17 MB   101.25 MiB
  norms       35,136 → 35,136 × 4 B (fp32)                   140.54 kB   137.25 KiB
weights       134,515,008 → 44,861,760 params × 4 B (fp32)   179.45 MB   171.13 MiB
gradients     44,861,760 × 4 B (fp32)                        179.45 MB   171.13 MiB
moments       44,861,760 × 2 × 4 B (fp32)                    358.89 MB   342.27 MiB
steps         272 tensors × 4 B (fp32)                        1.088 kB   1.0625 KiB
each rank     weights + gradients + moments + steps          717.79 MB   684.54 MiB
Every rank holds the same. In all 70,272 numbers are copies of what another rank holds too, 0 are padding."""

TOKEN = """\
smollm2-135m, tp = 3, 1 × 1 tokens, fp32: handed to collectives by each rank
forward, embedding       1 all_reduce × 1 token × 576 × 4 B                2.304 kB     2.25 KiB   wire 3 KiB
forward, attention out   30 all_reduce × 1 token × 576 × 4 B               69.12 kB     67.5 KiB   wire 90 KiB
forward, mlp out         30 all_reduce × 1 token × 576 × 4 B               69.12 kB     67.5 KiB   wire 90 KiB
forward, logits          1 all_gather × 1 token × 16,384 × 4 B            65.536 kB       64 KiB   wire 128 KiB
total                    62 collectives, 246 messages one after another   206.08 kB   201.25 KiB   wire 311 KiB
wire: what each rank sends if a ring does it; derived"""


def test_a_memory_bill_prints_its_derivation():
    assert str(cost.memory(SMOLLM, Layout(tp=3), training=True)) == MEMORY


def test_a_traffic_bill_prints_its_derivation():
    bill = cost.traffic(SMOLLM, Layout(tp=3), batch=1, seq=1, backward=False, head="logits")
    assert str(bill) == repr(bill) == TOKEN


def test_a_bill_of_experts_in_fp8_tells_scales_and_what_a_token_uses():
    lines = str(cost.memory(find_model("deepseek-v3"), dtype="fp8")).splitlines()
    experts = "  experts     653.91e9 × 1 B (fp8) + 39,911,424 scales × 4 B   654.07 GB   609.15 GiB   active 20.440 GB"
    assert experts in lines
    assert "  router      106,445,312 × 2 B (bf16)                         212.89 MB   203.03 MiB" in lines
    assert lines[-2].startswith("weights       671.03e9 params × 1.0032 B (fp8)                 673.15 GB   626.92 GiB")


def test_one_rank_has_the_shortest_bill():
    assert str(cost.memory(SMOLLM)).splitlines()[0] == "smollm2-135m, on one rank, weights only"
    assert str(cost.memory(SMOLLM)).splitlines()[-1].split() == [
        "each", "rank", "weights", "538.06", "MB", "513.13", "MiB"]
    assert str(cost.traffic(SMOLLM, Layout(), 1, 1)).splitlines()[1:] == [
        "total   0 collectives, 0 messages one after another   0 B   0 B   wire 0 B"]


class Cells(HTMLParser):
    """The text of every cell, and that every tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.cells = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] == "td":
            self.cells[-1] += data


def test_the_html_form_has_the_same_cells_and_escapes_what_it_is_given():
    named = ModelSpec(name="<b>mine", hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=101)
    bill = cost.memory(named, Layout(tp=2))
    page = Cells()
    page.feed(bill._repr_html_())
    assert page.open == []
    assert page.cells == [text for row in bill.rows for text in row.cells()]
    assert "<b>" not in bill._repr_html_()


def test_plain_data_survives_json_and_adds_up():
    for bill in (cost.memory(SMOLLM, Layout(tp=3), training=True), cost.traffic(SMOLLM, Layout(tp=3), 2, 8)):
        data = bill.to_dict()
        assert json.loads(json.dumps(data)) == data
        assert [row["value"] for row in data["rows"]] == [row.value for row in bill.rows]
    memory, traffic = cost.memory(SMOLLM, training=True).to_dict(), cost.traffic(SMOLLM, Layout(tp=3), 2, 8).to_dict()
    assert memory["per_rank"] == sum(memory["groups"].values()) == memory["rows"][-1]["value"]
    assert traffic["payload"] == sum(c["count"] * c["payload"] for c in traffic["collectives"])


def test_a_row_of_something_other_than_bytes():
    assert cost.Row("cards", "1342.1 GB ÷ 80 GB", 17, "cards").cells() == (
        "cards", "1342.1 GB ÷ 80 GB", "17 cards", "", "")
