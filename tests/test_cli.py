"""The command line: what it prints is the plan, what it refuses is one line, and it starts without torch."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.cost import Serve, Train, ladder
from shardlab.specs import find_card, find_model

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
SEVENTY = ["plan", "llama-3.1-70b", "--card", "h100", "--cards", "8"]


def run(*arguments, **env):
    """The result of the command line in a terminal of 100 columns that knows no colours, unless `env` says more."""
    clean = {"COLUMNS": "100", "NO_COLOR": None, "FORCE_COLOR": None, "TERM": None}
    return CliRunner(env=clean | env).invoke(app, [str(argument) for argument in arguments])


def words(text):
    """The text without its line breaks: tables wrap."""
    return " ".join(text.split())


def test_a_plan_shows_its_steps_its_answer_and_its_bill():
    plan = ladder(find_model("llama-3.1-70b"), find_card("h100"), Serve(), 8)
    result = run(*SEVENTY)
    assert (result.exit_code, result.stderr) == (0, "")
    for text in (plan.title, "70.554e9 parameters", plan.footnotes[0], plan.bill.title,
                 *(step.name for step in plan.steps), *(row.label for row in plan.bill.rows)):
        assert words(text) in words(result.stdout)
    assert "used by each token" not in result.stdout
    assert "37.552e9 of them used by each token" in words(run("plan", "deepseek-v3").stdout)


def test_json_is_the_plan_as_data():
    task = Serve(context=4096, concurrency=32, dtype="fp8", kv_dtype="fp8", latency=0.05, reserve="2 GiB")
    result = run(*SEVENTY, "--serve", "--context", 4096, "--concurrency", 32, "--dtype", "fp8", "--kv-dtype", "fp8",
                 "--latency", 0.05, "--reserve", "2 GiB", "--json")
    plan = json.loads(result.stdout)
    assert plan == json.loads(json.dumps(ladder(find_model("llama-3.1-70b"), find_card("h100"), task, 8).to_dict()))
    assert (plan["model"], plan["card"], plan["cards"], plan["context"]) == ("llama-3.1-70b", "h100", 8, 4096)
    assert plan["parameters"] == {"resident": 70553706496, "active": 70553706496}
    assert plan["steps"] and plan["bill"]["per_rank"] > 0


@pytest.mark.parametrize(("dtype", "master"), [("bf16", "fp32"), ("fp32", None)])
def test_training_keeps_master_weights_where_the_weights_are_narrower(dtype, master):
    task = Train(batch=2, seq=512, dtype=dtype, master=master, optimizer="sgd", recompute="full")
    result = run("plan", "gpt2", "--train", "--dtype", dtype, "--batch", 2, "--seq", 512, "--optimizer", "sgd",
                 "--recompute", "full", "--json")
    plan = ladder(find_model("gpt2"), find_card("h100"), task)
    assert json.loads(result.stdout) == json.loads(json.dumps(plan.to_dict()))
    assert (plan.bill.master_weights > 0) == (master is not None)


@pytest.mark.parametrize("columns", [40, 60, 79, 80, 120])
def test_no_line_is_wider_than_the_terminal(columns):
    for arguments in (SEVENTY, ["plan", "deepseek-v3", "--card", "h800", "--cards", 16]):
        lines = run(*arguments, COLUMNS=str(columns)).stdout.splitlines()
        assert max(map(len, lines)) <= columns
        assert not any("…" in line for line in lines)  # rich's sign for what it left out


def test_colours_are_for_terminals():
    assert "\x1b[" not in run(*SEVENTY).stdout
    coloured = run(*SEVENTY, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "\x1b[1;32myes" in coloured and "\x1b[31mno" in coloured


def test_your_own_model_and_card(tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "llama-3.1-8b.json").read_text())
    (tmp_path / "mine.toml").write_text('printed = "24 GB"\nhbm = "1008 GB/s"\nflops = { bf16 = "165 TFLOP/s" }\n')
    plans = [json.loads(run("plan", model, "--card", tmp_path / "mine.toml", "--json").stdout)
             for model in (tmp_path, tmp_path / "config.json")]
    assert [plan["parameters"]["resident"] for plan in plans] == [find_model("llama-3.1-8b").total] * 2
    assert plans[0]["card"] == "mine" and plans[0]["memory"] == 24 * 10**9


def test_a_bundled_name_is_not_taken_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert run("plan", "gpt2").exit_code == 0


def test_a_length_left_out_is_no_longer_than_the_model_was_made_for():
    served, trained = (json.loads(run("plan", "gpt2", *more, "--json").stdout) for more in ([], ["--train"]))
    assert (served["context"], trained["seq"]) == (1024, 1024)
    assert json.loads(run("plan", "llama-3.1-8b", "--json").stdout)["context"] == 8192
    assert "too few for 2,048 tokens" in run("plan", "gpt2", "--context", 2048).stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (["lama-3-70b"], "no bundled model 'lama-3-70b': did you mean llama-3.1-70b or"),
    (["gpt2", "--card", "h10"], "no bundled card 'h10': did you mean h100 or"),
    (["gpt2", "--card", "gone.toml"], "No such file or directory: gone.toml"),
    (["gone/config.json"], "No such file or directory: gone/config.json"),
    (["gpt2", "--cards", "0"], "cards must be a whole number of at least 1, not 0"),
    (["gpt2", "--cards", "-8"], "cards must be a whole number of at least 1, not -8"),
    (["gpt2", "--dtype", "bf17"], "unknown dtype 'bf17': use one of fp64"),
    (["gpt2", "--train", "--dtype", "int8"], "weights stored as int8 are served, not trained here"),
    (["gpt2", "--concurrency", "0"], "concurrency must be a whole number of at least 1, not 0"),
    (["gpt2", "--latency", "0"], "latency must be a number above 0, not 0.0"),
    (["gpt2", "--train", "--recompute", "some"], "recompute must be None, 'selective' or 'full', not 'some'"),
    (["gpt2", "--reserve", "2"], "'2' is no size: write a number and one of B, kB"),
    (["gpt2", "--batch", "3"], "--batch 3 goes with --train: leave it out or add --train"),
    (["gpt2", "--train", "--kv-dtype", "fp8"], "--kv-dtype fp8 goes with --serve"),
])
def test_what_is_refused_is_one_line_that_says_what_to_change(arguments, said):
    result = run("plan", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("shardlab: ") and result.stderr.count("\n") == 1
    assert said in result.stderr


def test_a_config_that_lacks_a_key_is_refused_by_its_name(tmp_path):
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    del config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "the config lacks the key 'num_hidden_layers'" in run("plan", tmp_path).stderr
    (tmp_path / "config.json").write_text(json.dumps(config)[:80])
    assert "is not a whole JSON file" in run("plan", tmp_path).stderr


def shell(*arguments):
    """The command line as a process of its own, its output piped."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_it_runs_as_a_command():
    done = shell("-m", "shardlab.cli", "plan", "llama-3.1-8b", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["parameters"]["resident"] == find_model("llama-3.1-8b").total
    for wrong, said in ((["plan", "gpt2", "--crad", "h100"], "No such option: --crad"), ([], "Missing command"),
                        (["plan", "gpt2", "--context", "many"], "'--context'"), (["plna"], "No such command 'plna'")):
        done = shell("-m", "shardlab.cli", *wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("shardlab: ") and said in done.stderr and "--help" in done.stderr


def test_it_starts_without_torch():
    done = shell("-c", "import sys, shardlab.cli; print({'torch', 'numpy', 'matplotlib'} & set(sys.modules))")
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def test_installing_makes_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"shardlab": "shardlab.cli:main"}


def test_bench_links_fits_alpha_and_beta_and_says_how_well():
    shown = run("bench", "links", "--repeats", 1)
    assert shown.exit_code == 0, shown.stderr
    assert "α = " in shown.stdout and "GB/s in one direction" in shown.stdout and "not fitted to" in shown.stdout
    assert shown.stdout.count("check") == 5 and shown.stdout.count("fitted to") >= 6
    data = json.loads(run("bench", "links", "--repeats", 1, "--json").stdout)
    assert [nbytes for nbytes, _ in data["samples"]] == [64 * 4**k for k in range(11)]
    errors = sorted(abs((data["alpha"] + nbytes / data["beta"]) / seconds - 1)
                    for nbytes, seconds in data["samples"][1::2])
    assert data["median_error"] == pytest.approx(errors[2])


@pytest.mark.parametrize(("wrong", "words"), [(("--repeats", 0), "--repeats must be 1 or more, not 0"),
                                              (("--transport", "tcp"), "--transport must be backend or shm, not tcp")])
def test_bench_links_refuses_in_one_line(wrong, words):
    done = run("bench", "links", *wrong)
    assert done.exit_code == 2 and done.stderr.strip() == f"shardlab: {words}"
