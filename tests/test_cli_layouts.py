"""`shardlab plan --train --tokens`: after the ladder, the best layouts and the time of their steps."""

import json

import pytest
from test_cli import run, words

from shardlab.cost import plan_training
from shardlab.specs import ClusterSpec, find_model

EIGHT = ["plan", "llama-3.1-8b", "--train", "--card", "h100", "--cards", 8]


def planned():
    return plan_training(find_model("llama-3.1-8b"), ClusterSpec.of("h100", 8), tokens=2**18, seq=4096, few=5)


def test_layouts_stand_behind_the_ladder():
    result, plan = run(*EIGHT, "--tokens", 2**18), planned()
    assert (result.exit_code, result.stderr) == (0, "")
    said = words(result.stdout)
    assert said.index("Answer: ") < said.index(plan.title)
    for i, choice in enumerate(plan.choices):
        assert words(f"{choice.name} {plan.why(i)}") in said and f"{100 * choice.bill.utilisation:.1f}%" in said
    assert "share 0.6 (assumed)" in said
    narrow = run(*EIGHT, "--tokens", 2**18, COLUMNS="60").stdout.splitlines()
    assert max(map(len, narrow)) <= 60


def test_json_has_the_layouts_beside_the_plan():
    plain, without = (json.loads(run(*EIGHT, *more, "--json").stdout) for more in (["--tokens", 2**18], []))
    layouts = plain.pop("layouts")
    assert plain == without
    assert layouts == json.loads(json.dumps(planned().to_dict()))


@pytest.mark.parametrize(("arguments", "said"), [
    (["--train", "--cards", 8, "--tokens", 5000], "take 4,096 or 8,192"),
    (["--train", "--cards", 12, "--tokens", 2**18], "12 cards don't fill domains of 8"),
    (["--cards", 8, "--tokens", 2**18], "--tokens 262144 goes with --train"),
])
def test_what_is_refused(arguments, said):
    result = run("plan", "llama-3.1-8b", *arguments)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1


def test_a_recomputation_that_is_asked_for_is_in_every_layout():
    layouts = json.loads(run(*EIGHT, "--tokens", 2**18, "--recompute", "full", "--json").stdout)["layouts"]
    assert {choice["recompute"] for choice in layouts["choices"]} == {"full"}
