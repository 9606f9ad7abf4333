"""The log of a run: what it says, who writes it, and what a resumed run makes of it."""

import copy
import json
import math
from unittest import mock

import pytest
import torch

from shardlab.model import Transformer, initialise
from shardlab.parallel import data, mesh, rng, tensor, zero
from shardlab.specs import ModelSpec
from shardlab.train import Batches, log, text, train

SPEC = ModelSpec(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=22, vocab=256, tied=True)

SEED = rng.seed


def plain():
    return initialise(Transformer(SPEC, dropout=0.2), seed=3).double()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def batches():
    return Batches(text()[:2000], seq=16, batch=8, accumulation=2, seed=1)


def test_a_line_for_each_step_and_a_resumed_run_drops_those_it_does_again(tmp_path):
    path, model = tmp_path / "new" / "run.jsonl", plain()
    optimizer = adamw(model)
    steps = train(model, optimizer, batches(), range(4), progress=False, log=path)
    lines = log.read(path)
    assert [tuple(line) for line in lines] == [log.KEYS] * 4
    assert [(line["step"], line["loss"], line["norm"], line["tokens"]) for line in lines] == [
        (n, s.loss, s.norm, s.tokens) for n, s in enumerate(steps)]
    for line in lines:
        assert line["lr"] == 0.02 and line["skew"] == 0 and line["memory"] > 2**20
        assert math.isclose(line["tokens_per_second"] * line["seconds"], line["tokens"])
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # where a kill cut it off
    assert log.read(path) == lines
    train(model, optimizer, batches(), range(2, 5), progress=False, log=path)
    again = log.read(path)
    assert [line["step"] for line in again] == [0, 1, 2, 3, 4] and again[:2] == lines[:2] and again[2] != lines[2]
    train(model, optimizer, batches(), range(0), progress=False, log=path)  # nothing to do, nothing to drop
    assert log.read(path) == again and [each.name for each in path.parent.iterdir()] == ["run.jsonl"]


def test_what_is_not_finite_is_null_and_what_is_no_log_is_said(tmp_path):
    path = tmp_path / "run.jsonl"
    log.Log(path).write({"step": 0, "loss": math.nan, "norm": math.inf})
    assert path.read_text() == '{"step": 0, "loss": null, "norm": null}\n'
    for wrong in ("no JSON\n", json.dumps({"epoch": 1}) + "\n", "[1]\n"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"run\.jsonl is no log of a run"):
            log.read(path)


# a step draws at random by its number alone, on every rank


def layout(group, kind):
    model = plain()
    if kind == "data × tensor":
        axes = mesh.build(dp=2, tp=2)
        tensor.cut(model, axes.get_group("tp"))
        data.replicate(model, axes.get_group("dp"))
        return model, adamw(model), axes.get_group("dp")
    optimizer = adamw(model)
    return zero.shard(model, optimizer, group, 1), optimizer, group


def twice(group, folder):
    """Steps 0 to 3, and steps 2 and 3 of a second run, whose state came from the first, under each layout."""
    out = []
    for kind in ("data × tensor", "ZeRO-1"):
        (model, optimizer, axis), (other, its, _) = layout(group, kind), layout(group, kind)
        seen, seeded = [], []
        path = folder / kind
        steps = train(model, optimizer, batches(), range(2), axis, progress=False, seed=5, log=path)
        with zero.gathered(model), zero.gathered(other):
            other.load_state_dict(model.state_dict())
        zero.load_state_dict(other, its, copy.deepcopy(zero.state_dict(model, optimizer)))
        steps += train(model, optimizer, batches(), range(2, 4), axis, progress=False, seed=5, log=path,
                       after=lambda number, step, seen=seen: seen.append((number, step)))
        with mock.patch.object(rng, "seed", lambda *given, seeded=seeded: seeded.append(given[1:]) or SEED(*given)):
            resumed = train(other, its, batches(), range(2, 4), axis, progress=False, seed=5)
        out.append((steps, resumed, seen, seeded == [(5, axis.rank(), 2), (5, axis.rank(), 3)]))
    return out


def test_a_step_that_is_taken_up_again_drops_the_same_and_every_rank_is_told(pool, tmp_path):
    for found in pool(4).run(twice, tmp_path):
        for steps, resumed, seen, seeded in found:
            assert resumed == steps[2:] and seen == [(2, steps[2]), (3, steps[3])] and seeded
    for kind in ("data × tensor", "ZeRO-1"):  # one rank wrote
        assert [line["step"] for line in log.read(tmp_path / kind)] == [0, 1, 2, 3]


def test_a_seed_of_its_own_drops_others():
    first, same, other = (train(model := plain(), adamw(model), batches(), range(2), progress=False, seed=seed)
                          for seed in (1, 1, 2))
    assert first == same and first[0].loss != other[0].loss
