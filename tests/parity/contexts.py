"""The plain model and its twin whose sequences are cut over ranks, trained side by side.

The plain one sees the whole batch at once. A twin's ranks lie on three axes: dp replicas, of cp ranks that share a
sequence, of tp ranks that share a layer; its data axis is the first two. The model is that of `replicas`: tied, with
two frozen weights, biases, grouped queries and sizes that nothing divides. Labels are missing as it happens, all of the
last replica's in the second step.
"""

import torch
from replicas import FROZEN, OPTIMIZERS, build, cut, distance, held, whole_gradients

from shardlab import comm
from shardlab.parallel import context, data, expert, grads, mesh, tensor, zero
from shardlab.parallel.loss import valid_tokens

PASSES = 2


def axes(dp=1, cp=1, tp=1):
    """The groups of this rank: dp, cp, tp, and that of dp × cp."""
    three, two = mesh.build(dp=dp, cp=cp, tp=tp), mesh.build(data=dp * cp, tp=tp)
    return *(three.get_group(name) for name in ("dp", "cp", "tp")), two.get_group("data")


def batch(dp, step, seq, vocab=53):
    """Tokens and labels (dp, passes, 2, seq) of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, vocab, (2, dp, PASSES, 2, seq), generator=generator)
    kept = torch.rand(labels.shape, generator=generator) < 0.7
    kept[0, 0, 0, 0] = True
    if step == 1:
        kept[-1] = dp == 1
    return tokens, labels.where(kept, -100)


def twins(group, dp=1, tp=1, stage=0, optimizer="adamw", mode=False, etp=None, spread=False, recompute=None,
          frozen=FROZEN, dtype=torch.float64, **sizes):
    """((plain model, its optimizer), (its twin, its own), the axes): ranks but the first replica's begin from others.

    `spread`: the experts of the twin are cut over the data axis."""
    groups = axes(dp, group.size() // (dp * tp), tp)
    _, cp, of_layers, all_data = groups
    plain, twin = build(0, dtype, frozen=frozen, **sizes), build(all_data.rank(), dtype, recompute, frozen, **sizes)
    if spread:  # which the data axis does not make equal
        twin.load_state_dict(plain.state_dict())
        expert.cut(twin, all_data)
    context.cut(tensor.cut(twin, of_layers, mode, etp), cp)
    optimizers = [OPTIMIZERS[optimizer](model) for model in (plain, twin)]
    return (plain, optimizers[0]), (cut(twin, optimizers[1], all_data, stage), optimizers[1]), groups


def whole_of(twin, tensors):
    """The plain model's tensors that this rank has a part of: experts may be elsewhere."""
    names = dict(twin.named_parameters())
    return held({name: each for name, each in tensors.items() if name in names}, twin)


def train(plain, theirs, twin, ours, groups, step, seq, max_norm=0.3):
    """A clipped step of both: how far they are from each other."""
    dp, _, _, all_data = groups
    tokens, labels = batch(dp.size(), step, seq)
    mine = tokens[dp.rank()], labels[dp.rank()]
    with torch.no_grad():
        logits = plain(mine[0][0]), twin(mine[0][0])
    loss = plain.loss(tokens.flatten(0, 2), labels.flatten(0, 2))
    loss.backward()
    valid, total = valid_tokens(mine[1], dp), 0.0
    for i, (inputs, targets) in enumerate(zip(*mine, strict=True)):
        with data.no_sync(twin) if i < PASSES - 1 else torch.enable_grad():
            part = twin.loss(inputs, targets, valid)
            part.backward()
        total = total + part.detach()
    total = comm.all_reduce(total, group=all_data)
    grads.finish(twin)
    norms = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm), grads.clip_grad_norm_(twin, max_norm)
    assert norms[0] > max_norm  # so that there is something to clip
    ones = {name: q.grad for name, q in plain.named_parameters() if q.requires_grad}
    seen = {"loss": abs(loss - total).item(), "norm": abs(norms[0] - norms[1]).item(),
            "logits": (logits[0] - logits[1]).abs().max().item(),
            "gradients": distance(whole_of(twin, ones), whole_gradients(twin))}
    for each in (theirs, ours):
        each.step()
        each.zero_grad()
    return seen


def compare(group, seq=9, steps=2, transport="backend", **how):
    """Train both for `steps`: the largest differences."""
    (plain, theirs), (twin, ours), groups = twins(group, **how)
    with comm.use(transport=transport):
        seen = [train(plain, theirs, twin, ours, groups, step, seq) for step in range(steps)]
    with zero.gathered(twin), torch.no_grad():
        apart = distance(whole_of(twin, dict(plain.named_parameters())), dict(twin.named_parameters()))
    return {name: max(each[name] for each in seen) for name in seen[0]} | {"parameters": apart}


def check(outcomes):
    """Assert that `compare`, in float64, has found no difference on any rank."""
    for seen in outcomes:
        assert max(seen["loss"], seen["norm"], seen["logits"], seen["gradients"]) < 1e-10, seen
        assert seen["parameters"] < 1e-9, seen
