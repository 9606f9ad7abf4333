"""What a reader may get wrong with a pipeline: one clear error, on every rank alike, before anything has travelled."""

from pipes import batch, build

import pytest
import torch

from shardlab import comm, quant
from shardlab.launch import launch
from shardlab.model import checkpoint, initialise
from shardlab.parallel import data, execute, mesh, pipeline, tensor
from shardlab.schedule import dualpipe, forward_only, gpipe, interleaved, one_f_one_b, zero_bubble


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
    "no forward": (lambda g: pipeline.cut(build(), g, [[], []]), "a schedule needs forward passes"),
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
    "logits of training": (lambda g: execute.logits(cut(g), one_f_one_b(2, 3), [t for t, _ in batch(3, 0)]),
                           "logits are for inference, and this schedule has backward passes"),
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


def without_gradients(group):
    model = cut(group)
    with torch.no_grad(), pytest.raises(RuntimeError, match="need gradients: run it outside"):
        execute.run(model, one_f_one_b(2, 3), batch(3, 0))


def test_backward_without_gradients_is_refused(pool):
    pool(2).run(without_gradients)


def cut_otherwise(group):
    with pytest.raises(ValueError, match="rank 1 cuts otherwise than rank 0"):
        pipeline.cut(build(), group, weights=[1, 1, 1, 1, 1 + 9 * group.rank()])


def test_ranks_that_cut_in_different_places_are_told(pool):
    pool(2).run(cut_otherwise)


def run_otherwise(group):
    """Other tokens of the same shape on each rank, which no message tells; the same ones in another shape; another
    order of micro-batches."""
    model, said = cut(group), []
    swapped = [[action._replace(microbatch=2 - action.microbatch) for action in order] for order in one_f_one_b(2, 3)]
    turned = [[each.reshape(4, 1) if group.rank() else each for each in part] for part in equal()]
    for orders, parts in ((one_f_one_b(2, 3), [(tokens + group.rank(), labels) for tokens, labels in equal()]),
                          (one_f_one_b(2, 3), turned),
                          (swapped if group.rank() else one_f_one_b(2, 3), equal())):
        with comm.use(debug=True), pytest.raises(ValueError) as error:
            execute.run(model, orders, parts)
        said.append(str(error.value))
    with comm.use(debug=True):
        return said, execute.run(model, one_f_one_b(2, 3), equal()).item()


def equal():
    return [(tokens[:1, :4], labels[:1, :4]) for tokens, labels in batch(3, 0, 40)]


def test_in_debug_mode_ranks_that_run_something_else_are_told(pool):
    outcomes = pool(2).run(run_otherwise)
    assert outcomes[0] == outcomes[1]
    for text in outcomes[0][0]:
        assert text.startswith("rank 1 runs otherwise than rank 0") and "micro-batches" in text


def several(group, places):
    """Tied pipelines of three stages, on other ranks each time: the ends make groups."""
    for place in places:
        orders = gpipe(3, 2)
        pipeline.cut(build(), group, [orders[place.index(rank)] for rank in range(3)])
    return True


def test_ends_on_the_same_two_ranks_are_one_group(pool):
    """Ends (0, 1), (1, 0), (0, 2): were the second another group than the first, the third would be waited for."""
    assert pool(3).run(several, [(0, 2, 1), (1, 2, 0), (0, 1, 2)]) == [True] * 3


def lopsided(group):
    """The ranks are in different numbers of groups, which is how PyTorch would name the ends' group."""
    for _ in range(2):
        torch.distributed.new_group([1])
    pipeline.cut(build(), group, gpipe(2, 1))
    return mesh.blocks(group, 1).size()


def test_groups_that_a_program_has_made_are_in_no_pipeline_s_way():
    assert launch(lopsided, 2, timeout=60) == [1, 1]


def converted(group):
    """Cut in float64 and converted after, on a rank without layers too."""
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        plain, model = build(layers=1, frozen=()), pipeline.cut(build(layers=1, frozen=()), group, gpipe(3, 2))
        parts = batch(2, 0)
        plain.to(dtype), model.to(dtype)
        losses = [plain.loss(*part, 100) for part in parts]
        out.append((execute.run(model, gpipe(3, 2), parts, 100) - sum(losses)).abs().item())
    return out


def test_a_pipeline_is_converted_as_a_model_is(pool):
    for single, half in pool(3).run(converted):
        assert single < 1e-6 and half < 1e-2


def hooked(group):
    """What hooks on a weight see where weight gradients are put off: the gradient, once a micro-batch."""
    model, seen = pipeline.cut(build(frozen=()), group, zero_bubble(2, 3)), []
    weight = next(p for name, p in model.named_parameters() if name.endswith("down_proj.weight"))
    weight.register_hook(lambda gradient: seen.append(gradient.shape))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    execute.run(model, zero_bubble(2, 3), batch(3, 0))
    return seen == [weight.shape] * 6


def test_hooks_see_a_gradient_that_was_put_off_when_it_comes(pool):
    assert pool(2).run(hooked) == [True, True]
