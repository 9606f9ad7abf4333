"""Faults of others' checkpoints (FAULTS T9, Z9, Z10), and what else ends a run that is to go on: each is a test here.

A save that not all ranks are in, a rank that resumes with another's random state, a folder that is half there after a
kill, a disk that is full, a checkpoint of another model that loads without a word. Z10, other layouts and worlds, is
tests/train/test_checkpoint_layouts.py.
"""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from resumed import all_of, apart, build, cut, go, stray, through

from shardlab.launch import RankExited, ranks
from shardlab.model import folders, stored
from shardlab.specs import Layout
from shardlab.train import checkpoint

SEEDS = int(os.environ.get("SHARDLAB_KILLS", "10"))
LIMIT = 20  # seconds


def dropping(group, folder, layouts):
    """Two steps, a checkpoint, two more, with dropout; and the latter two again from the checkpoint, by a model that
    was seeded otherwise. Equal to the bit, and what is dropped differs from step to step."""
    out = []
    for i, layout in enumerate(layouts):
        here = cut(layout, "tied", "adamw", dropout=0.3)
        go(here, layout, range(2))
        path = checkpoint.save(folder / str(i), here.model, here.optimizer, 2)
        through = go(here, layout, range(2, 4))
        torch.manual_seed(100 + group.rank())
        again = cut(layout, "tied", "adamw", seed=9, dropout=0.3)
        checkpoint.load(path, again.model, again.optimizer)
        same = go(again, layout, range(2, 4)) == through
        other = cut(layout, "tied", "adamw", seed=9, dropout=0.3)
        checkpoint.load(path, other.model, other.optimizer)
        out.append((same, apart(all_of(again), all_of(here)), go(other, layout, [5])[0].loss != through[0].loss))
    return out


def test_a_step_taken_up_drops_what_the_uninterrupted_one_dropped(pool, tmp_path):
    """FAULTS T9: on every rank, of replicas, of tensor ranks with the same and with their own tokens, of stages."""
    layouts = [Layout(dp=2, tp=2), Layout(tp=2, dp=2, sp="keep", zero=3), Layout(pp=2, cp=2, microbatches=2)]
    for told in pool(4).run(dropping, tmp_path, layouts):
        assert told == [(True, 0.0, True)] * 3


def full_disk(group, folder):
    """The first rank can't write more than a page; the others don't write."""
    layout = Layout(tp=2)
    here = cut(layout, "biases", "adamw")
    go(here, layout, range(1))
    first = checkpoint.save(folder, here.model, here.optimizer, 1)
    had = all_of(here)
    go(here, layout, range(1, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    began = time.monotonic()
    try:
        with pytest.raises(OSError) as told:
            checkpoint.save(folder, here.model, here.optimizer, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    took = time.monotonic() - began
    left = sorted(each.name for each in folder.iterdir())
    again = cut(layout, "biases", "adamw", seed=9)
    done = checkpoint.load(checkpoint.latest(folder), again.model, again.optimizer)
    moved = apart(all_of(again), had)
    return str(told.value), took, left, done, moved, checkpoint.save(folder, here.model, here.optimizer, 2) == first


def test_a_disk_that_is_full_on_one_rank_is_told_on_all_and_nothing_is_lost(pool, tmp_path):
    """FAULTS Z9: no rank waits for the one that writes."""
    for rank, (said, took, left, done, moved, same) in enumerate(pool(2).run(full_disk, tmp_path)):
        assert took < LIMIT and left == ["step-00000001"] and done == 1 and moved == 0 and not same
        assert ("rank 0 could not write" in said) is (rank == 1) and "can't be written" in said
    assert checkpoint.latest(tmp_path).name == "step-00000002"


def refusals(group, folder, layout):
    """What is said of each wrong checkpoint, that nothing was changed, and in how many seconds."""
    here = cut(layout, "biases", "adamw")
    go(here, layout, range(1))
    path = checkpoint.save(folder, here.model, here.optimizer, 1)
    other = cut(layout, "tied", "adamw")
    others = checkpoint.save(folder / "other", other.model, other.optimizer, 1)
    sgd = cut(layout, "biases", "sgd")
    low = cut(layout, "biases", "adamw", dtype=torch.bfloat16)
    copies = {name: folder / name for name in ("model cut short", "states cut short", "manifest cut short", "sizes")}
    if group.rank() == 0:
        for each in copies.values():
            shutil.copytree(path, each)
        for name, file in (("model", "model.safetensors"), ("states", "optimizer.safetensors"),
                           ("manifest", "manifest.json")):
            damaged = folder / f"{name} cut short" / file
            os.truncate(damaged, damaged.stat().st_size - 100)
        text = (path / "manifest.json").read_text(encoding="utf-8")
        (folder / "sizes" / "manifest.json").write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 5e5'))
    had, out = all_of(here), {}
    mine = path if group.rank() == 0 else folder / "elsewhere"  # not the folder that the others see
    for name, (where, run) in {
        "none": (folder / "nothing", here), "above": (folder, here), "other": (others, here), "kind": (path, sgd),
        "dtype": (path, low), **{name: (each, here) for name, each in copies.items()}, "one": (mine, here),
    }.items():
        began = time.monotonic()
        with pytest.raises(ValueError) as told:
            checkpoint.load(where, run.model, run.optimizer)
        out[name] = str(told.value), time.monotonic() - began
    with pytest.raises(FileExistsError) as told:
        checkpoint.save(folder, here.model, here.optimizer, 1)
    out["there"] = str(told.value), 0
    for wrong, kind in ((dict(step=-1), ValueError), (dict(step=2, keep=0), ValueError),
                        (dict(step=2, what=object()), TypeError)):
        with pytest.raises(kind):
            checkpoint.save(folder, here.model, here.optimizer, **wrong)
    return out, apart(all_of(here), had)


def test_a_wrong_checkpoint_is_told_on_all_ranks_before_anything_is_changed(pool, tmp_path):
    hints = {
        "none": "is no checkpoint: it has no manifest.json", "above": "latest(folder) is the last",
        "other": "is of another model: model.layers.0.self_attn.q_proj.bias is missing there and is (16,) here",
        "kind": "has the states of AdamW, and this run's optimizer is SGD",
        "dtype": "model.embed_tokens.weight is float64 in", "model cut short": "model.safetensors is cut short",
        "states cut short": "optimizer.safetensors is cut short", "manifest cut short": "manifest.json can't be read",
        "sizes": "its rope_theta is 500000.0, here it is 10000.0", "there": "step-00000001 exists already",
    }
    for rank, (said, moved) in enumerate(pool(2).run(refusals, tmp_path, Layout(dp=2, zero=3))):
        assert moved == 0 and max(took for _, took in said.values()) < LIMIT
        for name, hint in hints.items():
            assert hint in said[name][0], (name, said[name])
        assert ("rank 1 could not load" in said["one"][0]) is (rank == 0) and "no checkpoint" in said["one"][0]
        assert ("rank 0 could not write" in said["there"][0]) is (rank == 1)


def test_another_shape_is_named_with_both(tmp_path):
    here = cut(Layout(), "biases", "adamw")
    path = checkpoint.save(tmp_path, here.model, here.optimizer, 1)
    here.model.norm.weight = torch.nn.Parameter(torch.ones(18, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"model.norm.weight is \(16,\) there and is \(18,\) here"):
        checkpoint.load(path, here.model, torch.optim.AdamW(here.model.parameters()))


def test_other_groups_are_refused(tmp_path):
    here = cut(Layout(), "biases", "adamw")
    path = checkpoint.save(tmp_path, here.model, here.optimizer, 1)
    other = build("biases")
    first, *rest = other.parameters()
    with pytest.raises(ValueError, match=r"in number 0 in .*, and in number 1 here"):
        checkpoint.load(path, other, torch.optim.AdamW([{"params": [first]}, {"params": rest}]))


class Killed(BaseException):
    """What no code catches; and nothing is tidied up."""


def test_a_kill_at_any_point_of_a_save_leaves_the_last_checkpoint_or_the_next(tmp_path, monkeypatch):
    """Before and after every write, sync and rename of it, one after another, until a save comes through."""
    left = None
    monkeypatch.setattr(folders.shutil, "rmtree", lambda path, real=shutil.rmtree, **how: how or real(path))

    def counted(real):
        def call(*args, **how):
            nonlocal left
            for after in (False, True):
                if left is not None and (left := left - 1) < 0:
                    raise Killed
                if not after:
                    out = real(*args, **how)
            return out
        return call

    for where, name in ((folders.os, "fsync"), (folders.os, "rename"), (stored, "save_file"), (Path, "write_text"),
                        (Path, "rename")):
        monkeypatch.setattr(where, name, counted(getattr(where, name)))
    here = cut(Layout(), "biases", "adamw")
    go(here, Layout(), range(1))
    checkpoint.save(tmp_path, here.model, here.optimizer, 0)
    states = {0: all_of(here)}
    step, kills, seen = 0, 0, set()
    while True:
        go(here, Layout(), range(step + 1, step + 2))
        states[step + 1] = all_of(here)
        left = kills
        try:
            checkpoint.save(tmp_path, here.model, here.optimizer, step + 1, keep=1)
        except Killed:
            done = False
        else:
            done = True
        left = None
        again = cut(Layout(), "biases", "adamw", seed=9)
        found = checkpoint.load(checkpoint.latest(tmp_path), again.model, again.optimizer)
        assert found in (step, step + 1) and apart(all_of(again), states[found]) == 0
        seen.add((found - step, done))
        if done:
            break
        step, kills = found, kills + 1
    assert kills > 15 and seen == {(0, False), (1, False), (1, True)}
    assert [each.name for each in tmp_path.iterdir()] == [f"step-{step + 1:08}"]  # what kills have left is gone


STEPS = 6


def run(group, folder, layout, kill_after=None, victims=()):
    """All steps that are still to do, each with a checkpoint, by a rank that may be killed on the way."""
    if kill_after is not None and group.rank() in victims:
        threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    here = cut(layout, "biases", "adamw", seed=9)
    found = checkpoint.latest(folder)
    if found is None:
        here = cut(layout, "biases", "adamw")
    done = 0 if found is None else checkpoint.load(found, here.model, here.optimizer)

    def after(number, _):
        checkpoint.save(folder, here.model, here.optimizer, number + 1, keep=2)

    return done, go(here, layout, range(done, STEPS), after), all_of(here)


LAYOUTS = [Layout(dp=2, zero=1), Layout(tp=2), Layout(pp=2, microbatches=2), Layout(dp=2, zero=3)]


def goes_on(folder, pool, layout, expected, full):
    """The run goes on under another layout, and comes to what the one that went through came to."""
    for done, steps, ours in pool.run(run, folder, layout):
        assert stray(steps, expected[done:]) < 1e-10 if steps else done == STEPS
        assert apart(ours, full) < 1e-10


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.more) for seed in range(1, SEEDS, 2))])
def test_a_killed_rank_leaves_a_checkpoint_that_goes_on(tmp_path, seed):
    expected, full = through("biases", "adamw", STEPS)
    draw = random.Random(seed)
    with ranks(2, timeout=120) as pool:
        began = time.monotonic()
        pool.run(run, tmp_path / "whole", LAYOUTS[seed % 4])
        took = time.monotonic() - began
        victim, moment = draw.randrange(2), draw.uniform(0.1, 0.9) * took
        try:
            pool.run(run, tmp_path / "killed", LAYOUTS[seed % 4], moment, (victim,))
        except RankExited as gone:
            assert f"rank {victim}" in str(gone)
        else:
            pool.close()  # it was done before its time, and would be killed in the next run
    with ranks(2, timeout=120) as pool:
        goes_on(tmp_path / "killed", pool, LAYOUTS[(seed + 1) % 4], expected, full)


JOB = """
import sys
sys.path[:0] = {path!r}
from test_checkpoint_faults import LAYOUTS, run
from shardlab.launch import ranks
from pathlib import Path
with ranks(2, timeout=120) as pool:
    print("ready", pool.run(lambda group: __import__("os").getpid()), flush=True)
    pool.run(run, Path({folder!r}), LAYOUTS[{which}])
    print("done", flush=True)
"""


@pytest.mark.more
@pytest.mark.parametrize("seed", range(0, SEEDS, 2))
def test_a_killed_job_leaves_a_checkpoint_that_goes_on(tmp_path, seed):
    """The process that has launched the ranks, and the ranks, at one moment."""
    expected, full = through("biases", "adamw", STEPS)
    folder, draw = tmp_path / "killed", random.Random(seed)
    text = JOB.format(path=[each for each in sys.path if each], folder=str(folder), which=seed % 4)
    job = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        pids = [int(each) for each in job.stdout.readline().strip()[len("ready [") : -1].split(", ")]
        while checkpoint.latest(folder) is None:  # the first
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1.5))
    finally:
        job.kill()
        job.communicate()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError as gone:
            assert gone.errno == errno.ESRCH
    until = time.monotonic() + LIMIT
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)
    with ranks(2, timeout=120) as pool:
        goes_on(folder, pool, LAYOUTS[(seed + 1) % 4], expected, full)
