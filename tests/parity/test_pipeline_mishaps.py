"""What a reader may get wrong with a pipeline: one clear error, on every rank alike, before anything has travelled."""

from pipes import batch, build

import pytest
import torch

from shardlab import comm, quant
from shardlab.model import checkpoint, initialise
from shardlab.parallel import data, execute, pipeline, tensor
from shardlab.schedule import dualpipe, forward_only, gpipe, interleaved, one_f_one_b


def cut(group, orders=None):
    return pipeline.cut(build(), group, orders or one_f_one_b(2, 3))


def quantised():
    model = build(torch.float32)
    del model.layers[-1].unused  # which no form knows
    return quant.quantise(model, "int8")


def shorn(group):
    """A schedule from which an action is missing."""
    orders = one_f_one_b(2, 3)
    orders[1] = [action for action in orders[1] if (action.kind, action.microbatch) != ("B", 2)]
    return execute.run(cut(group), orders, batch(3, 0))


def unlabelled(group):
    tokens, labels = batch(3, 0)[0]
    return execute.run(cut(group), one_f_one_b(2, 3), [(tokens, labels), (tokens, labels[:, 1:]), (tokens, labels)])


CUTTING = {
    "twice": (lambda g: pipeline.cut(cut(g), g), "this model has a pipeline already: cut the one without"),
    "replicated": (lambda g: pipeline.cut(data.replicate(build(), g), g), "has a data axis, which holds its"),
    "quantised": (lambda g: pipeline.cut(quantised(), g), "this model is quantised"),
    "two copies": (lambda g: pipeline.cut(build(), g, dualpipe(2, 4)), "dualpipe_v runs as well with one"),
    "other ranks": (lambda g: pipeline.cut(build(), g, gpipe(3, 3)), "is for 3 ranks, and the group has 2"),
    "no forward": (lambda g: pipeline.cut(build(), g, [[], []]), "a pipeline of 0 stages"),
    "weights": (lambda g: pipeline.cut(build(), g, weights=[1, 2]), "must be 5 numbers from 0, one a layer, or 7"),
    "negative": (lambda g: pipeline.cut(build(), g, weights=[1, 1, 1, 1, -1]), "weights must be 5 numbers from 0"),
    "nan": (lambda g: pipeline.cut(build(), g, weights=[1, 1, 1, 1, float("nan")]), "weights must be 5 numbers from 0"),
    "by layers first": (lambda g: tensor.cut(cut(g), g), "tensor.cut it before pipeline.cut"),
    "initialised": (lambda g: initialise(cut(g)), "initialise the plain model, then cut it"),
}
RUNNING = {
    "parts": (lambda g: execute.run(cut(g), one_f_one_b(2, 3), batch(2, 0)),
              "the schedule is for 3 micro-batches, and there are 2"),
    "no parts": (lambda g: execute.run(cut(g), one_f_one_b(2, 3), []),
                 "the schedule is for 3 micro-batches, and there are 0"),
    "stages": (lambda g: execute.run(cut(g), interleaved(2, 4), batch(4, 0)),
               "give pipeline.cut the schedule that it is to run"),
    "plain": (lambda g: execute.run(build(), one_f_one_b(2, 3), batch(3, 0)), "this model has no pipeline"),
    "shorn": (shorn, "micro-batch 2: it takes one F, and one B or one I and one W"),
    "labels": (unlabelled, "every token has a label: tokens (1, 4), labels (1, 3), in micro-batch 1"),
    "logits": (lambda g: execute.logits(cut(g), forward_only(2, 3), [batch(1, 0)[0][0]]),
               "the schedule is for 3 micro-batches, and there are 1"),
}
WITHOUT = {
    "loss": lambda model, tokens: model.loss(tokens, tokens),
    "forward": lambda model, tokens: model(tokens),
    "hidden": lambda model, tokens: model.hidden(tokens),
    "generate": lambda model, tokens: model.generate(tokens, 2),
}


def said(group, call):
    """The error's text, and how much has travelled since the call began, but for what a data axis starts with."""
    with comm.record() as ledger:
        try:
            call(group)
        except (ValueError, RuntimeError) as error:
            return type(error).__name__, str(error), len(ledger.where(lambda e: e.phase != "start").entries)


@pytest.mark.parametrize("wrong", [*CUTTING, *RUNNING])
def test_it_is_told_on_every_rank_before_anything_travels(pool, wrong):
    call, words = (CUTTING | RUNNING)[wrong]
    outcomes = pool(2).run(said, call)
    assert outcomes[0] == outcomes[1] and outcomes[0][::2] == ("ValueError", 0)
    assert words in outcomes[0][1] and "\n" not in outcomes[0][1]


@pytest.mark.parametrize("wrong", WITHOUT)
def test_the_model_s_own_ways_are_closed(pool, wrong):
    def call(group):
        WITHOUT[wrong](cut(group), batch(1, 0)[0][0])

    for kind, text, sent in pool(2).run(said, call):
        assert kind == "RuntimeError" and sent == 0
        assert "run the model with execute.run(model, schedule, parts), or execute.logits, on all ranks" in text


def untouched(group):
    model = build()
    before = [name for name, _ in model.named_modules()]
    for call in (lambda: pipeline.cut(model, group, dualpipe(2, 4)), lambda: pipeline.cut(model, group, weights=[1])):
        with pytest.raises(ValueError):
            call()
    return before == [name for name, _ in model.named_modules()] and model.loss(*batch(1, 0)[0]).isfinite().item()


def test_a_model_that_is_not_cut_is_left_as_it_was(pool):
    assert all(pool(2).run(untouched))


def saved(group, folder):
    model = pipeline.cut(build(frozen=()), group)
    for layer in model.layers.values():
        layer.unused = None  # which no Hugging Face model has
    with pytest.raises(ValueError, match="is on another rank: save the whole model"):
        checkpoint.save(model, folder)


def test_a_rank_s_layers_are_not_saved_as_a_model(pool, tmp_path):
    pool(2).run(saved, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def alone(group):
    """A pipeline of one rank is the plain model."""
    plain, model, orders = build(), build(), gpipe(1, 2)
    pipeline.cut(model, group, orders)
    parts = batch(2, 0)
    valid = sum(int((labels != -100).sum()) for _, labels in parts)
    for part in parts:
        plain.loss(*part, valid).backward()
    with comm.record() as ledger:
        execute.run(model, orders, parts)
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return all(p.grad is q.grad is None or torch.equal(p.grad, q.grad) for p, q in pairs), [
        entry.op for entry in ledger.entries if entry.wire]


def test_a_pipeline_of_one_rank_is_the_plain_model(pool):
    assert pool(1).run(alone) == [(True, [])]


def part_by_part(group):
    """Each rank's part is quantised by itself, and infers as the plain quantised model does."""
    plain, model = quantised(), build(torch.float32)
    del model.layers[-1].unused
    quant.quantise(pipeline.cut(model, group), "int8")
    tokens = batch(1, 0)[0][0]
    with torch.no_grad():
        whole = plain(tokens)
    mine = execute.logits(model, forward_only(2, 1), [tokens])
    return None if mine is None else torch.equal(mine[0], whole)


def test_what_is_quantised_after_the_cut_runs(pool):
    assert pool(2).run(part_by_part) == [None, True]
