"""The data axis, plain and ZeRO 1 to 3, out of the ordinary: other orders of passes, passes that fail, wrong calls."""

import pytest
import torch
from replicas import (
    OPTIMIZERS,
    STAGES,
    backward,
    batch,
    build,
    cut,
    distance,
    parameters,
    train,
    twins,
    whole_gradients,
)

from shardlab import comm
from shardlab.parallel import data, grads, tensor, zero


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def raising(*_):
    raise ArithmeticError("on purpose")


def said(error, call, *args):
    with pytest.raises(error) as caught:
        call(*args)
    return str(caught.value)


def orders(model, losses, one):
    """Several ways to go about backward; before the first `one(…)` of each, forward has made the losses."""
    yield "summed", lambda: sum(losses()).backward()
    yield "all forward first", lambda: [one(i, loss) for i, loss in enumerate(losses())]
    yield "twice through one graph", lambda: twice(losses()[0], model)
    yield "one, then two together", lambda: one_then_two(losses(), model)
    yield "evaluated in between", lambda: evaluated(losses(), model)


def twice(loss, model):
    with data.no_sync(model):
        loss.backward(retain_graph=True)
    loss.backward()


def one_then_two(losses, model):
    with data.no_sync(model):
        losses[0].backward()
    (losses[1] + losses[2]).backward()


def evaluated(losses, model):
    with torch.no_grad():
        model(torch.arange(6).view(2, 3))
    losses[0].backward()


def in_other_orders(group, stage):
    (plain, _), (twin, ours) = twins(group, stage)
    tokens, labels = batch(group.size(), 0)
    worst = {}

    def of(model, tokens, labels):
        def losses():
            return [model.loss(x, y, 50) for x, y in zip(tokens, labels, strict=True)]

        def one(i, loss):
            with data.no_sync(model) if i < 2 else torch.enable_grad():
                loss.backward()

        return orders(model, losses, one)

    theirs = of(plain, tokens.transpose(0, 1).flatten(1, 2), labels.transpose(0, 1).flatten(1, 2))
    for (name, go), (_, go_too) in zip(theirs, of(twin, tokens[group.rank()], labels[group.rank()]), strict=True):
        go()
        go_too()
        grads.finish(twin)
        worst[name] = distance(gradients(plain), whole_gradients(twin))
        plain.zero_grad()
        ours.zero_grad()
    return worst


@pytest.mark.parametrize("stage", STAGES)
def test_backward_in_other_orders(pool, stage):
    for worst in pool(3).run(in_other_orders, stage):
        assert len(worst) == 5 and max(worst.values()) < 1e-10, worst


def hooked(model):
    """Have a parameter used that else nothing uses; `remove()` ends it."""
    return model.layers[-1].mlp.register_forward_hook(lambda _module, _args, y: y + model.layers[-1].unused.sum())


def used_by_one(group, stage):
    """A parameter in a block that only the last rank's data make use of, and then none."""
    (plain, _), (twin, ours) = twins(group, stage, layers=4)
    tokens, labels = batch(group.size(), 0)

    for users in ({group.size() - 1}, set()):
        for rank in range(group.size()):
            hook = hooked(plain) if rank in users else None
            backward(plain, tokens[rank], labels[rank], None)
            if hook is not None:
                hook.remove()
        hook = hooked(twin) if group.rank() in users else None
        for i in range(3):
            with data.no_sync(twin) if i < 2 else torch.enable_grad():
                twin.loss(tokens[group.rank()][i], labels[group.rank()][i],
                          int((labels[group.rank()] >= 0).sum())).backward()
        if hook is not None:
            hook.remove()
        grads.finish(twin)
        seen = distance(gradients(plain), whole_gradients(twin))
        plain.zero_grad()
        ours.zero_grad()
        yield seen


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_one_rank_uses(pool, stage):
    """The others' collectives must not come in another order for it."""
    for p in (2, 3):
        for seen in pool(p).run(lambda group, stage: list(used_by_one(group, stage)), stage):
            assert len(seen) == 2 and max(seen) < 1e-10, seen


def without_a_pass(group, stage):
    """The last rank has no data, and comes to finish alone."""
    (plain, _), (twin, _) = twins(group, stage)
    tokens, labels = batch(group.size(), 0)
    if group.rank() < group.size() - 1:
        twin.loss(tokens[group.rank(), 0], labels[group.rank(), 0], 50).backward()
    for rank in range(group.size() - 1):
        plain.loss(tokens[rank, 0], labels[rank, 0], 50).backward()
    grads.finish(twin)
    return distance(gradients(plain), whole_gradients(twin))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_without_a_pass(pool, stage):
    assert max(pool(3).run(without_a_pass, stage)) < 1e-10


def failed(group, stage, transport):
    """A forward and a backward pass raise on all ranks, midway and in the second of three; then training goes on."""
    (plain, theirs), (twin, ours) = twins(group, stage)
    tokens, labels = batch(group.size(), 7)
    mine = tokens[group.rank()], labels[group.rank()]
    seen, messages = [], []
    with comm.use(transport=transport):
        for step, register in enumerate((twin.layers[1].register_forward_pre_hook,
                                         twin.layers[0].register_full_backward_pre_hook)):
            with data.no_sync(twin):
                twin.loss(mine[0][0], mine[1][0], 50).backward()
            hook = register(raising)
            said(ArithmeticError, backward, twin, *mine, group)
            hook.remove()
            if step:  # there are gradients now of which none can tell what they are
                messages.append(said(RuntimeError, twin.loss(mine[0][0], mine[1][0], 50).backward))
                messages.append(said(RuntimeError, grads.finish, twin))
            ours.zero_grad()
            seen.append(train(plain, theirs, twin, ours, group, step)[0])
    return max(max(each.values()) for each in seen), parameters(plain, twin), messages


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_that_fails_is_given_up_with_zero_grad(pool, stage):
    for transport in ("backend", "shm"):
        for worst, apart, messages in pool(2).run(failed, stage, transport):
            assert worst < 1e-10 and apart < 1e-9
            assert all("the last backward pass ended with an error" in each and "zero_grad()" in each
                       for each in messages) and len(messages) == 2


def wrong(group, stage):
    """What the calls say that come at the wrong time."""
    model = build(0)
    optimizer = OPTIMIZERS["adamw"](model)
    cut(model, optimizer, group, stage)
    tokens, labels = (x[group.rank(), 0] for x in batch(group.size(), 0))
    out = {"twice": said(ValueError, cut, model, optimizer, group, stage),
           "other": said(ValueError, cut, model, optimizer, group, 0 if stage else 1),
           "cut": said(ValueError, tensor.cut, model, group)}
    model.loss(tokens, labels, 50).backward()
    out["norm"] = said(RuntimeError, grads.norm, model)
    if stage:
        out["step"] = said(RuntimeError, optimizer.step)
    if stage < 2:
        out["again"] = said(RuntimeError, model.loss(tokens, labels, 50).backward)
        optimizer.zero_grad()
        model.loss(tokens, labels, 50).backward()
    grads.finish(model)
    out["finish"] = said(RuntimeError, grads.finish, model)
    late = model.loss(tokens, labels, 50)
    optimizer.step()
    out["late"] = said(RuntimeError, late.backward)
    out["left"] = said(RuntimeError, model.loss(tokens, labels, 50).backward)
    optimizer.zero_grad()
    model.get_parameter("layers.0.mlp.up_proj.weight").requires_grad_(True)
    model.loss(tokens, labels, 50).backward()
    out["thawed"] = said(RuntimeError, grads.finish, model)
    return out


@pytest.mark.parametrize("stage", STAGES)
def test_wrong_calls_say_what_to_do(pool, stage):
    for out in pool(2).run(wrong, stage):
        assert "has a data axis already" in out["twice"] and "has a data axis already" in out["other"]
        assert "cut it before that" in out["cut"] and "call grads.finish(model)" in out["norm"]
        assert not stage or "call grads.finish(model) before optimizer.step()" in out["step"]
        assert stage > 1 or "inside data.no_sync(model)" in out["again"]
        assert "zero_grad()" in out["finish"] and "zero_grad()" in out["left"]
        assert "layers.0.mlp.up_proj.weight" in out["thawed"] and "modified by an inplace operation" in out["late"]


def discarded(group, stage):
    """Half a step is thrown away by zero_grad; its gradients must not be in the next."""
    (plain, theirs), (twin, ours) = twins(group, stage)
    tokens, labels = (x[group.rank(), 0] for x in batch(group.size(), 9))
    hook = hooked(twin)  # for the parameter must have no gradient in the next
    with data.no_sync(twin):
        twin.loss(tokens, labels, 50).backward()
    hook.remove()
    ours.zero_grad()
    seen = [train(plain, theirs, twin, ours, group, 0)[0]]
    twin.loss(tokens, labels, 50).backward()  # and a whole one, before and after it is summed
    ours.zero_grad()
    seen.append(train(plain, theirs, twin, ours, group, 1)[0])
    twin.loss(tokens, labels, 50).backward()
    grads.finish(twin)
    ours.zero_grad(set_to_none=True)
    seen.append(train(plain, theirs, twin, ours, group, 2)[0])
    return max(max(each.values()) for each in seen)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_thrown_away_are_gone(pool, stage):
    assert max(pool(2).run(discarded, stage)) < 1e-10


def generated(group, stage):
    """Whether the tokens are the plain model's, and training goes on well after it."""
    (plain, theirs), (twin, ours) = twins(group, stage)
    train(plain, theirs, twin, ours, group, 0)
    prompt = torch.arange(10).view(2, 5)
    out = [torch.equal(plain.generate(prompt, 4), twin.generate(prompt, 4, cached=cached)) for cached in (True, False)]
    with zero.gathered(twin):  # here a rank is on its own
        if group.rank() == 0:
            out.append(torch.equal(plain.generate(prompt, 3), twin.generate(prompt, 3)))
    kept = []  # a graph made just before the step must not keep the weights of then for what comes after
    ours.register_step_pre_hook(lambda *_: kept.append(twin.loss(prompt, prompt, 50)))
    return [*out, *(max(train(plain, theirs, twin, ours, group, step)[0].values()) < 1e-10 for step in (1, 2))]


@pytest.mark.parametrize("stage", STAGES)
def test_generation_between_steps_and_a_pass_before_one(pool, stage):
    assert all(all(out) for out in pool(2).run(generated, stage))
