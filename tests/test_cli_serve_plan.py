"""`shardlab plan --requests --prompt --answer`: below the ladder, how many cards a load takes."""

import json
from functools import cache

import pytest
from test_cli import run, words

from shardlab.cost import Load, Serve, capacity, ladder
from shardlab.specs import find_card, find_model

EIGHT = ["plan", "llama-3.1-8b", "--card", "h100", "--cards", 2]
ASKED = ["--requests", 30, "--prompt", 1000, "--answer", 200, "--ttft", 0.5, "--tpot", 0.05]
LOAD = Load(rate=30, prompt=1000, answer=200, ttft=0.5, tpot=0.05)


@cache
def planned(**how):
    return capacity(find_model("llama-3.1-8b"), find_card("h100"), LOAD, cards=2, **how)


def test_cards_ratio_price_and_verdicts_stand_behind_the_ladder():
    result, plan = run(*EIGHT, *ASKED, "--price", 3), planned(price=3.0)
    assert (result.exit_code, result.stderr) == (0, "")
    said = words(result.stdout)
    assert said.index("Answer: one card is enough.") < said.index(plan.title)
    for note in plan.footnotes:
        assert words(note) in said
    for one in plan.options:
        assert words(f"{one.cards} {one.layout.degrees} {one.room.total:,} {one.rate.rate:.3g}") in said
    for part in ("More than one card? yes, peak throughput", "One pool or two? colocate", "At 3 an hour for a card",
                 "requests at once on each data rank keep pace", "Two would balance at"):
        assert part in said


def test_json_has_the_capacity_beside_the_plan():
    data = json.loads(run(*EIGHT, *ASKED, "--json").stdout)
    assert data.pop("capacity") == json.loads(json.dumps(planned().to_dict()))
    plain = ladder(find_model("llama-3.1-8b"), find_card("h100"), Serve(context=1200), 2)  # a request's own length
    assert data == json.loads(json.dumps(plain.to_dict()))
    assert json.loads(run(*EIGHT, *ASKED, "--context", 4096, "--json").stdout)["context"] == 4096
    assert "capacity" not in json.loads(run(*EIGHT, "--json").stdout)


def test_weights_and_caches_are_stored_as_asked():
    narrow = json.loads(run(*EIGHT, *ASKED, "--dtype", "fp8", "--kv-dtype", "int8", "--reserve", "2 GiB",
                            "--json").stdout)
    plan = planned(dtype="fp8", kv_dtype="int8", reserve="2 GiB")
    assert narrow["capacity"] == json.loads(json.dumps(plan.to_dict()))


@pytest.mark.parametrize("columns", [40, 80, 99, 100, 120])
def test_no_line_is_wider_than_the_terminal(columns):
    lines = run(*EIGHT, *ASKED, "--gap", 0.001, COLUMNS=str(columns)).stdout.splitlines()
    assert max(map(len, lines)) <= columns and not any("…" in line for line in lines)
    assert "no number of copies" in words(" ".join(lines))


def test_what_holds_no_request_has_no_table():
    result = run("plan", "llama-3.1-70b", "--card", "h100", *ASKED)
    said = words(result.stdout)
    assert result.exit_code == 0 and "Answer: no layout on 1 × h100 holds a request of 1,200 tokens" in said
    assert "first token 500" not in result.stdout and "a further one\n" not in result.stdout


@pytest.mark.parametrize(("arguments", "said"), [
    (["--requests", 1], "--requests belongs to a load, which is not whole: add --prompt (tokens of a prompt), --ans"),
    (["--prompt", 10, "--answer", 10], "--prompt belongs to a load, which is not whole: add --requests (so many"),
    (["--ttft", 1], "--ttft belongs to a load"), (["--price", 2], "--price belongs to a load"),
    (["--requests", 0, "--prompt", 1, "--answer", 1], "requests must be a number above 0, not 0.0"),
    (["--requests", 1, "--prompt", 0, "--answer", 1], "prompt must be a whole number of at least 1, not 0"),
    (["--requests", 1, "--prompt", 1, "--answer", 1, "--hits", 1], "hits = 1.0 is a share of the prompt"),
    (["--requests", 1, "--prompt", 1, "--answer", 1, "--tpot", -1], "tpot must be a number above 0, not -1.0"),
    (["--requests", 1, "--prompt", 1, "--answer", 1, "--price", 0], "price must be a number above 0, not 0.0"),
    (["--requests", 1, "--prompt", 1000, "--answer", 100], "gpt2 has learned 1,024 positions, too few for 1,100"),
    (["--train", "--requests", 1], "--requests 1.0 goes with --serve: leave it out or add --serve"),
    (["--train", "--price", 3], "--price 3.0 goes with --serve")])
def test_what_is_refused_is_one_line(arguments, said):
    result = run("plan", "gpt2", *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("shardlab: ") and said in result.stderr
