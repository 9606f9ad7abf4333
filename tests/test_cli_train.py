"""`shardlab train`: layouts and models as words, jobs that do not fit together, and runs that are the plain run."""

import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.cli.layout import layout_from
from shardlab.cli.train import spec_from, summary
from shardlab.model import checkpoint
from shardlab.specs import Layout
from shardlab.train import Step, log
from shardlab.train.job import Job, run

TINY = dict(batch=8, seq=32, lr=1e-2, warmup=3, dtype="fp64", dropout=0.0)


def command(*arguments):
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, ["train", *map(str, arguments)])


@pytest.mark.parametrize(("text", "layout"), [
    ("", Layout()),
    ("tp=2", Layout(tp=2)),
    (" dp=2, tp=2 ,pp=2,schedule=1f1b,microbatches=4,", Layout(dp=2, tp=2, pp=2, schedule="1f1b", microbatches=4)),
    ("dp=2,tp=2,sp=keep,zero=3,order=tp-dp-pp", Layout(dp=2, tp=2, sp="keep", zero=3, order="tp-dp-pp")),
    ("tp=2,sp=false,etp=1", Layout(tp=2, etp=1)),
])
def test_a_layout_is_one_word(text, layout):
    assert layout_from(text) == layout


@pytest.mark.parametrize(("text", "said"), [
    ("dq=2", "a layout has no 'dq': did you mean dp? It is written as tp=…, dp=…, pp=…"),
    ("dp", "'dp' of the layout has no value: dp=2"),
    ("schedule=", "'schedule=' of the layout has no value: schedule=1f1b"),
    ("dp=2,dp=4", "the layout has dp twice: dp=2 and dp=4"),
    ("tp=two", "tp of the layout must be a whole number, not 'two': tp=2"),
    ("tp=0", "tp must be a whole number of at least 1, not 0"),
    ("pp=2,schedule=2f2b", "schedule = '2f2b' is none of"),
    ("dp=2,sp=keep", "sp = 'keep' cuts the sequence over the ranks of the tensor axis"),
])
def test_a_layout_that_is_none_is_refused_in_one_line(text, said):
    result = command("--layout", text)
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr.count("\n") == 1
    assert said in result.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (["--model", "big"], "no bundled model 'big'"),
    (["--model", "hidden=96,size=4"], "'size=4' is no size of a model: write name=number, of hidden, layers"),
    (["--model", "hidden=96,heads=12,ffn=9"], "a model needs layers"),
    (["--layout", "tp=5"], "tp = 5 does not cut the 12 heads"),
    (["--layout", "pp=5,microbatches=5"], "pp = 5 makes 5 stages, and small has 4 layers"),
    (["--layout", "dp=3", "--batch", 32], "batch = 32 sequences do not divide into dp × microbatches = 3 × 1: take 33"),
    (["--model", "hidden=8,layers=1,heads=2,ffn=8,vocab=128"], "vocabulary of 128, and the text is bytes"),
    (["--seq", 4096], "seq = 4096 is longer than the 2048 positions"),
    (["--steps", 10, "--warmup", 10], "warm-up (and decay) of 10 of 10 steps"),
    (["--dtype", "fp12"], "unknown dtype 'fp12'"),
    (["--resume"], "needs the folder of the checkpoints"),
    (["--device", "tpu"], "give auto, cpu or cuda"),
    (["--text", "gone.txt"], "No such file or directory: gone.txt"),
    (["--lr", 0], "a rate above 0"),
    (["--backend", "mpi"], "backend must be one of auto, gloo, nccl"),
])
def test_what_does_not_fit_is_refused_before_anything_starts(arguments, said):
    result = command(*arguments)
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr.count("\n") == 1, result.stderr
    assert said in result.stderr


def test_a_model_is_a_preset_its_sizes_or_a_file(tmp_path):
    small = spec_from("small")
    assert (small.total * 2 < 4e6) and all(small.heads % p == small.kv_heads % p == 0 for p in (2, 3, 4))
    own = spec_from("hidden=32,layers=3,heads=4,kv_heads=2,ffn=64,tied=0,vocab=300")
    assert (own.hidden, own.layers, own.kv_heads, own.head_dim, own.tied, own.vocab) == (32, 3, 2, 8, False, 300)
    checkpoint.save(Job(spec=spec_from("tiny")).make(), tmp_path / "model")
    assert spec_from(str(tmp_path / "model")).total == spec_from("tiny").total


# runs


def plain(tmp_path, **more):
    """The run in this process, without ranks: its steps, and its weights."""
    path = tmp_path / "plain.jsonl"
    job = Job(spec=spec_from("tiny"), steps=6, log=str(path), export=str(tmp_path / "plain"), **(TINY | more))
    return job, run(None, job), checkpoint.from_folder(tmp_path / "plain", torch.float64)


LAYOUTS = ["dp=2,tp=2,sp=again,microbatches=2", "dp=2,pp=2,microbatches=4,zero=1", "cp=2,tp=2"]
MORE = ["dp=4,zero=3", "tp=4", "pp=2,tp=2,microbatches=2,schedule=zero_bubble", "dp=2,cp=2,zero=2"]


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.more)], ids=["some", "more"])
def test_a_job_is_the_plain_run_under_every_layout(pool, tmp_path, layouts):
    job, steps, model = plain(tmp_path)
    for i, each in enumerate(map(layout_from, layouts)):
        export = tmp_path / str(i)
        ours = Job(spec=job.spec, layout=each, steps=6, export=str(export), **TINY)
        for told in pool(4).run(run, ours):
            for mine, known in zip(told, steps, strict=True):
                assert math.isclose(mine.loss, known.loss, rel_tol=1e-9), layouts[i]
                assert math.isclose(mine.norm, known.norm, rel_tol=1e-8) and mine.tokens == known.tokens
        whole = checkpoint.from_folder(export, torch.float64)
        for (name, mine), known in zip(whole.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, known, rtol=0, atol=1e-8, msg=f"{layouts[i]}: {name}")


def test_the_command_starts_ranks_trains_logs_and_exports(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 123)) * 200)
    done = command("--layout", "tp=2", "--model", "tiny", "--text", text, "--steps", 8, "--batch", 4, "--seq", 26,
                   "--warmup", 2, "--lr", 0.02, "--held-out", 0.1, "--log", tmp_path / "log", "--export",
                   tmp_path / "out")
    assert done.exit_code == 0, done.output
    lines = log.read(tmp_path / "log")
    assert [line["step"] for line in lines] == list(range(8)) and lines[-1]["loss"] < lines[0]["loss"]
    assert done.stdout == (f"8 steps of tp = 2, 832 tokens: loss {lines[0]['loss']:.4f} → {lines[-1]['loss']:.4f} "
                           f"(nats a byte)\nweights: {tmp_path / 'out'}\n")
    assert "8/8" in done.stderr or "step" not in done.stderr  # no bar where nobody looks
    assert sum(p.numel() for p in checkpoint.from_folder(tmp_path / "out").parameters()) == spec_from("tiny").total


def apart(group, job, texts):
    try:
        run(group, replace(job, text=str(texts[group.rank() == 1])))
    except ValueError as error:
        return str(error)


def test_ranks_with_different_texts_are_told(pool, tmp_path):
    texts = tmp_path / "one", tmp_path / "other"
    for path in texts:
        path.write_text(path.name * 100)
    job = Job(spec=spec_from("tiny"), layout=layout_from("dp=2"), steps=1, batch=2, seq=8, warmup=0)
    assert all("rank 1 was told another run than rank 0, or reads another text" in said
               for said in pool(2).run(apart, job, texts))


def test_a_rank_that_fails_is_shown_with_its_own_traceback(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    done = command("--model", "tiny", "--steps", 1, "--warmup", 0, "--batch", 1, "--seq", 8, "--export",
                   tmp_path / "out")
    assert done.exit_code == 1 and "exists already: name another folder" in done.stderr
    assert "rank 0 of 1 raised FileExistsError" in done.stderr and (tmp_path / "out" / "mine").exists()


def test_the_summary_says_what_was_skipped_and_when_nothing_was_left_to_do():
    job = Job(spec=spec_from("tiny"), export="there")
    steps = [Step(5.5, 1.0, 10), Step(math.nan, math.nan, 10), Step(4.5, 1.0, 10)]
    assert summary(job, steps).splitlines() == [
        "3 steps of tp = 1, 30 tokens: loss 5.5000 → 4.5000 (nats a byte)",
        "1 of them changed nothing: their gradients were not finite", "weights: there"]
    assert summary(job, []) == "nothing to do: the checkpoint is of step 100, the last"


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_a_run_goes_on_from_its_checkpoint_under_another_layout(pool, tmp_path, dtype):
    shared = TINY | dict(spec=spec_from("tiny"), steps=6, every=2, warmup=0, dtype=dtype, dropout=0.0)
    first, then = (layout_from(each) for each in ("dp=2,tp=2,microbatches=2", "tp=2,pp=2,microbatches=2"))
    whole = pool(4).run(run, Job(layout=first, checkpoints=str(tmp_path / "a"), **shared))[0]
    assert sorted(each.name for each in (tmp_path / "a").iterdir()) == [
        "step-00000004", "step-00000006"]  # the last two
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "step-00000004").rename(tmp_path / "b" / "step-00000004")
    path = tmp_path / "log"
    more = Job(layout=then, checkpoints=str(tmp_path / "b"), resume=True, log=str(path), **shared)
    told = pool(4).run(run, more)
    assert {len(steps) for steps in told} == {2} and [line["step"] for line in log.read(path)] == [4, 5]
    exact = 1e-9 if dtype == "fp64" else 2e-2
    for mine, known in zip(told[0], whole[4:], strict=True):
        assert math.isclose(mine.loss, known.loss, rel_tol=exact)
        assert math.isclose(mine.norm, known.norm, rel_tol=10 * exact)
    assert pool(4).run(run, more) == [[]] * 4  # nothing is left to do
    with pytest.raises(Exception, match="has checkpoints up to step-00000006: go on from there"):
        pool(4).run(run, Job(layout=then, checkpoints=str(tmp_path / "b"), **shared))
