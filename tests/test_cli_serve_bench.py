"""`shardlab serve-bench`: traces and drawn requests, the simulator and the real engine, and what is refused."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.cli.fleet import Fleet
from shardlab.cli.serve_bench import asked
from shardlab.serve.arrivals import mean_rate
from shardlab.specs import find_card

DATA = Path(__file__).parent / "data"


def command(*arguments):
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["serve-bench", *map(str, arguments)])


@pytest.mark.parametrize("file", ["azure_sample.csv", "mooncake_sample.jsonl"])
def test_a_trace_is_replayed_and_measured_and_drawn(file, tmp_path):
    found = command("--trace", DATA / file, "--plot", tmp_path / "waits.svg", "--ttft", 2, "--tpot", 0.05)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0] == "llama-3.1-8b, simulated: 1 replica, each 1 × h100"
    assert "finished, 0 refused" in lines[1]
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "offered", "achieved", "TTFT", "TPOT", "ITL", "end to end", "goodput", "in", "out", "total", "in the system"]
    assert "TTFT ≤ 2 s and TPOT ≤ 50 ms" in found.output
    assert (tmp_path / "waits.svg").read_text().count("TTFT") and "<svg" in (tmp_path / "waits.svg").read_text()


def test_pools_have_rates_of_their_own_cards_and_a_seed_repeats():
    arguments = ("--requests", 40, "--prefill", 1, "--decode", 2, "--tp", 2, "--rate", 20, "--seed", 3)
    found = command(*arguments)
    assert found.exit_code == 0, found.output
    assert "1 prefill + 2 decode, each 2 × h100" in found.output
    assert "÷ 2 prefill cards" in found.output and "÷ 4 decode cards" in found.output
    assert command(*arguments).output == found.output != command(*arguments[:-1], 4).output


def test_a_trace_is_cut_and_stretched():
    whole, some = (asked(DATA / "azure_sample.csv", count, None, 1.0, 1, 1, 0, 100) for count in (1000, 5))
    assert some == whole[:5] and len(whole) == 12
    fast = asked(DATA / "azure_sample.csv", 5, 30.0, 1.0, 1, 1, 0, 100)
    assert mean_rate([each.arrival for each in fast]) == pytest.approx(30)


def test_a_cache_is_as_large_as_the_card_leaves_it():
    # memory less 8.03 G weights × 2 B, and a few GB beside, ÷ 131,072 B a token
    blocks = Fleet.of("llama-3.1-8b", "h100", 1, 0, 0, 0, "ib-ndr", 512, None).blocks
    assert 0.9 < blocks * 16 / ((find_card("h100").memory - 16.06e9) / 131_072) < 1


def test_the_real_engine_answers():
    found = command("--real", "small", "--requests", 6, "--rate", 50, "--prompt", 12, "--answer", 4)
    assert found.exit_code == 0, found.output
    assert "the real engine on 1 rank" in found.output and "6 requests: 6 finished, 0 refused" in found.output


def test_the_real_engine_answers_on_two_ranks():
    found = command("--real", "small", "--tp", 2, "--requests", 4, "--rate", 50, "--prompt", 12, "--answer", 4)
    assert found.exit_code == 0, found.output
    assert "the real engine on 2 ranks" in found.output and "4 requests: 4 finished, 0 refused" in found.output


@pytest.mark.parametrize(("arguments", "said"), [
    (["--trace", "nowhere.csv"], "No such file or directory: nowhere.csv"),
    (["--trace", "trace.txt"], "--trace trace.txt: a trace is .csv, in Azure's format, or .jsonl, in Mooncake's"),
    (["--trace", DATA / "facts.yaml"], "facts.yaml: a trace is .csv"),
    (["--requests", 0], "--requests must be 1 or more, not 0"),
    (["--prefill", 1], "--prefill 1 and --decode 0: a cache goes from one to the other, so give both, or neither"),
    (["--replicas", -1], "both must be a whole number of at least 0, not -1"),
    (["--model", "llama-3.1-70b"], "does not fit 1 × h100: give a larger --tp, or a smaller model"),
    (["--model", "llama-9"], "llama-9"),
    (["--card", "h9"], "h9"),
    (["--link", "string"], "string"),
    (["--tp", 3], "3"),
    (["--rate", -1], "rate"),
    (["--rate", 0], "rate must be a number above 0, not 0.0"),
    (["--real", "small", "--blocks", 0], "blocks must be a whole number of at least 1, not 0"),
    (["--prompt", "inf"], "--prompt inf: give a number above 0, up to 1,000,000"),
    (["--prompt", "nan"], "--prompt nan: give a number above 0, up to 1,000,000"),
    (["--answer", 0], "--answer 0: give a number above 0"),
    (["--cv", 1e200], "cv = 1e+200: give 0 for even gaps, or a number from 0.001 to 1000"),
    (["--cv", 1e-200], "cv = 1e-200: give 0 for even gaps"),
    (["--plot", "x.png"], "--plot x.png: give a file that ends in .svg, in a folder that is there"),
    (["--real", "nobody"], "--real nobody is neither small nor smollm2, nor a folder with a config.json"),
    (["--real", "small", "--replicas", 2], "--real is one replica, of --tp ranks: leave --replicas"),
    (["--blocks", 1, "--requests", 3], "all 3 requests are refused; the first: "),
    (["--ttft", -1, "--requests", 3], "ttft_limit"),
])
def test_what_can_not_be_is_refused_in_one_line(arguments, said):
    found = command(*arguments)
    assert found.exit_code == 2 and said in found.stderr
    assert found.stderr.startswith("shardlab: ") and found.stderr.count("\n") == 1 and not found.stdout
