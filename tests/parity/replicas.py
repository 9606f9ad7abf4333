"""The plain model and its twin on every rank of a data axis, trained side by side: the parity tests of DP and ZeRO.

The plain one sees the whole batch at once, each rank its own tokens in three micro-batches. The model has tied weights,
two frozen ones, two parameters that nothing uses, grouped queries, biases everywhere, an FFN of 29 and a vocabulary of
53, and with rows of 9,000 B, slices that cut through everything. Ranks begin from other weights; as many labels as it
happens are missing, all of the last rank's too in the second step.
"""

import torch

from shardlab import comm
from shardlab.model.transformer import Transformer
from shardlab.parallel import data, grads, zero, zero_state
from shardlab.parallel.loss import valid_tokens
from shardlab.parallel.shard import take
from shardlab.specs import ModelSpec

SIZES = dict(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53, tied=True, attention_bias=True,
             output_bias=True, mlp_bias=True)
FROZEN = ("layers.0.mlp.up_proj.weight", "layers.1.self_attn.o_proj.bias")
BUCKET = 9000
STAGES = (0, 1, 2, 3)  # 0 is plain data parallelism
PASSES = 3


def groups(model):
    """All parameters, frozen and unused ones too, in two groups: matrices, which decay, and the rest."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02}]


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(groups(model), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.01),
}


def build(seed, dtype=torch.float64, recompute=None, frozen=FROZEN, **sizes):
    """A model of distinct weights, biases and norms too, with a parameter beside its layers and one in a block that
    nothing uses."""
    torch.manual_seed(seed)
    model = Transformer(ModelSpec(**(SIZES | sizes)), recompute)
    model.unused = torch.nn.Parameter(torch.ones(3))
    model.layers[-1].unused = torch.nn.Parameter(torch.ones(2, 5))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model.to(dtype)


def cut(model, optimizer, group, stage):
    """The model over the group: replicated, or sharded."""
    if stage:
        return zero.shard(model, optimizer, group, stage, BUCKET)
    return data.replicate(model, group, BUCKET)


def twins(group, stage, optimizer="adamw", dtype=torch.float64, recompute=None, **sizes):
    """((plain model, its optimizer), (its twin on this rank, its own)): the ranks but the first begin from others."""
    plain, twin = build(0, dtype, **sizes), build(group.rank(), dtype, recompute, **sizes)
    optimizers = [OPTIMIZERS[optimizer](model) for model in (plain, twin)]
    return (plain, optimizers[0]), (cut(twin, optimizers[1], group, stage), optimizers[1])


def batch(p, step, vocab=53):
    """Tokens and labels (p, passes, 2, 7) of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, vocab, (2, p, PASSES, 2, 7), generator=generator)
    kept = torch.rand(p, PASSES, 2, 7, generator=generator) < torch.linspace(0.2, 0.9, p).view(p, 1, 1, 1)
    if step == 1:
        kept[-1] = p == 1  # not a label on the last rank
    return tokens, labels.where(kept, -100)


def backward(model, tokens, labels, group):
    """Run this rank's micro-batches (passes, batch, seq), all but the last inside no_sync; the sum of their losses."""
    valid, total = valid_tokens(labels, group), 0.0
    for i, (inputs, targets) in enumerate(zip(tokens, labels, strict=True)):
        with data.no_sync(model) if i < len(tokens) - 1 else torch.enable_grad():
            loss = model.loss(inputs, targets, valid)
            loss.backward()
        total += loss.detach()
    return total


def whole_gradients(model):
    """Every trained parameter's gradient, put together from the ranks' slices: None where no rank holds any of it."""
    reducer = model.reducer
    if not reducer.shards:
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    out = {}
    for bucket in reducer.buckets:
        held = {p: reducer.gradient(p) for p in bucket.flat.parameters if reducer.gradient(p) is not None}
        dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
        row = zero_state.whole(reducer, bucket.flat, held, dtype)
        there = zero_state.whole(reducer, bucket.flat, {p: torch.ones_like(g) for p, g in held.items()}, dtype)
        for p in bucket.flat.parameters:
            known = bucket.flat.view(there, p)
            assert known.min() == known.max(), "some ranks have a gradient, and others none"
            out[p] = bucket.flat.view(row, p) if known.max() else None
    # experts that are spread over ranks lie in no row
    return {name: out.get(p, p.grad) for name, p in model.named_parameters() if p.requires_grad}


def distance(theirs, ours):
    """The largest distance between the tensors of two dicts, over the largest number; both have None at the same."""
    assert theirs.keys() == ours.keys()
    missing = [[name for name, x in each.items() if x is None] for each in (theirs, ours)]
    assert missing[0] == missing[1], missing
    there = [name for name, x in theirs.items() if x is not None]
    largest = max(theirs[name].abs().max() for name in there)
    return (max((theirs[name] - ours[name]).abs().max() for name in there) / largest).item()


def held(tensors, twin):
    """Of the plain model's tensors, the parts that the ranks of the tensor axis hold of them: all, if there is none."""
    shapes = {name: (getattr(p, "window", None), p.shape) for name, p in twin.named_parameters()}
    return {name: whole if whole is None or shapes[name][0] is None else
            take(whole, shapes[name][0], shapes[name][1][shapes[name][0].dim]) for name, whole in tensors.items()}


def train(plain, theirs, twin, ours, group, step, max_norm=0.5):
    """A clipped step of both: their differences, and the names of what has no gradient."""
    tokens, labels = batch(group.size(), step)
    loss = plain.loss(tokens.flatten(0, 2), labels.flatten(0, 2))
    loss.backward()
    total = comm.all_reduce(backward(twin, tokens[group.rank()], labels[group.rank()], group), group=group)
    grads.finish(twin)
    norms = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm), grads.clip_grad_norm_(twin, max_norm)
    assert norms[0] > max_norm  # so that there is something to clip
    gradients = {name: q.grad for name, q in plain.named_parameters() if q.requires_grad}
    seen = {"loss": abs(loss - total).item(), "norm": abs(norms[0] - norms[1]).item(),
            "gradients": distance(held(gradients, twin), whole_gradients(twin))}
    for each in (theirs, ours):
        each.step()
        each.zero_grad()
    return seen, [name for name, gradient in gradients.items() if gradient is None]


def parameters(plain, twin):
    """How far the weights are from each other."""
    with zero.gathered(twin), torch.no_grad():
        return distance(held(dict(plain.named_parameters()), twin), dict(twin.named_parameters()))


def compare(group, stage, optimizer="adamw", transport="backend", dtype=torch.float64, steps=5, recompute=None,
            frozen=FROZEN, **sizes):
    """Train both for `steps`: the largest differences, the first gradients', and the names of what has none."""
    (plain, theirs), (twin, ours) = twins(group, stage, optimizer, dtype, recompute, frozen=frozen, **sizes)
    with comm.use(transport=transport):
        seen, lacking = zip(*(train(plain, theirs, twin, ours, group, step) for step in range(steps)), strict=True)
    return {name: max(each[name] for each in seen) for name in seen[0]} | {
        "parameters": parameters(plain, twin), "first": seen[0]["gradients"], "lacking": lacking[-1]}


def check(outcomes):
    """Assert that `compare` in float64 has found no difference, on any rank."""
    for seen in outcomes:
        assert max(seen["loss"], seen["norm"], seen["gradients"]) < 1e-10 and seen["parameters"] < 1e-9, seen
        assert {"unused", "layers.1.unused"} <= set(seen["lacking"])


def check_float32(outcomes):
    """In float32, where updates add up what rounding has done: losses, norm, and the first step's gradients."""
    for seen in outcomes:
        assert max(seen["loss"], seen["norm"], seen["first"]) < 1e-5, seen
