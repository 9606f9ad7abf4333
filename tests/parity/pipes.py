"""The plain model and its twin cut over a pipeline, trained side by side: what every parity test of schedules compares.

The plain one runs micro-batch after micro-batch by itself, once for all schedules. Five layers don't divide over the
stages, FFN and vocabulary are odd, queries grouped, biases everywhere, weights tied, two frozen, and one of a block is
used by nothing. Micro-batches have different sizes and different numbers of labels, one of them none.
"""

from functools import lru_cache

import torch
from twins import mine

from shardlab import comm, schedule
from shardlab.model.transformer import Transformer
from shardlab.parallel import data, execute, grads, mesh, pipeline, rng, tensor, zero
from shardlab.parallel.loss import valid_tokens
from shardlab.specs import ModelSpec
from shardlab.specs.stages import split

SIZES = dict(hidden=16, layers=5, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53, tied=True, attention_bias=True,
             output_bias=True, mlp_bias=True)
FROZEN = ("layers.0.mlp.up_proj.weight", "layers.4.self_attn.o_proj.bias")
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "adamw": lambda p: torch.optim.AdamW(p, lr=0.01)}
CLIP = 0.1


def build(dtype=torch.float64, recompute=None, frozen=FROZEN, dropout=0.0, **sizes):
    """A model of distinct weights, biases and norms too; `frozen` are the beginnings of names."""
    torch.manual_seed(0)
    model = Transformer(ModelSpec(**(SIZES | sizes)), recompute, dropout)
    model.layers[-1].unused = torch.nn.Parameter(torch.ones(2, 5))
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.requires_grad_(not name.startswith(frozen))
    return model.to(dtype)


def batch(microbatches, step, vocab=53):
    """Micro-batches of a step: (tokens, labels) of 1 to 3 sequences of 4 to 7 tokens."""
    generator = torch.Generator().manual_seed(step)
    parts = []
    for i in range(microbatches):
        tokens, labels = torch.randint(0, vocab, (2, 1 + (i + step) % 3, 4 + i % 4), generator=generator)
        kept = torch.rand(labels.shape, generator=generator) < 0.2 + 0.7 * (i + 1) / microbatches
        parts.append((tokens, labels.where(kept, -100)))
    if microbatches > 1:
        parts[step % microbatches] = parts[step % microbatches][0], parts[step % microbatches][1] * 0 - 100
    return parts


# what stages may be like: how the model is built for them, and what its layers weigh


def stage_of(orders, number, layers=5):
    """The beginnings of the names of what a stage has."""
    bounds = split(layers, schedule.size(orders)[0])
    ends = {0: ("embed_tokens.",), len(bounds) - 1: ("norm.", "lm_head.")}
    return (*(f"layers.{i}." for i in bounds[number]), *ends.get(number % len(bounds), ()))


def last_of(orders):
    return schedule.size(orders)[0] - 1


KINDS = {
    "tied": lambda orders: {},
    "untied": lambda orders: dict(tied=False),
    "uneven": lambda orders: dict(weights=(6, 1, 3, 1, 1, 2, 1)),
    "frozen first": lambda orders: dict(tied=False, frozen=stage_of(orders, 0)),
    "frozen last": lambda orders: dict(tied=False, frozen=stage_of(orders, last_of(orders))),
    "frozen middle": lambda orders: dict(frozen=stage_of(orders, 1) if last_of(orders) > 1 else FROZEN),
    "no layers": lambda orders: dict(layers=max(1, last_of(orders) // 2)),
    "all one": lambda orders: dict(weights=(0, 0, 5, 0, 0)),
}


@lru_cache(maxsize=64)
def reference(microbatches, optimizer="sgd", steps=2, dtype=torch.float64, frozen=FROZEN, dropout=0.0, **sizes):
    """The plain model's training: for each step (loss, norm, gradients by name), and the parameters after the last."""
    model = build(dtype, frozen=frozen, dropout=dropout, **sizes)
    optim, seen = OPTIMIZERS[optimizer](model.parameters()), []
    for step in range(steps):
        rng.seed(model, 7, step=step)
        parts = batch(microbatches, step)
        valid, total = valid_tokens(labels for _, labels in parts), 0.0
        for tokens, labels in parts:
            loss = model.loss(tokens, labels, valid)
            loss.backward()
            total += loss.detach()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP  # so that there is something to clip
        seen.append((total.item(), norm.item(), gradients))
        optim.step()
        optim.zero_grad()
    return seen, {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(theirs, twin, of):
    """The largest distance between what this rank has and the plain model has of it, over the plain one's largest."""
    ours = dict(twin.named_parameters())
    assert ours.keys() <= theirs.keys()
    pairs = [(theirs[name], of(p), p) for name, p in ours.items()]
    assert all((a is None) == (b is None) for a, b, _ in pairs)
    largest = max(each.abs().max().item() for each in theirs.values() if each is not None)
    return max(((mine(a, p) - b).abs().max().item() for a, b, p in pairs if a is not None), default=0.0) / largest


def cut(group, orders, weights=None, axes=None, mode=False, data_axis="", optimizer="sgd", **built):
    """(The twin on this rank, its optimizer, the rank's place on the data axis, the data axis's group or None)."""
    twin = build(**built)
    torch.manual_seed(1000 + group.rank())
    of = {"pp": group} if axes is None else {name: mesh.build(**axes).get_group(name) for name in axes}
    if "tp" in of:
        tensor.cut(twin, of["tp"], mode)
    pipeline.cut(twin, of["pp"], orders, weights)
    # a rank without layers has nothing to optimize, and PyTorch's optimizers want something
    optim = OPTIMIZERS[optimizer](list(twin.parameters()) or [torch.nn.Parameter(torch.zeros(1))])
    if data_axis == "zero":
        zero.shard(twin, optim, of["dp"], 1, 3000)
    elif data_axis:
        data.replicate(twin, of["dp"], 3000)
    return twin, optim, of["dp"].rank() if "dp" in of else 0, of.get("dp")


def compare(group, orders, expected, transport="backend", debug=False, **how):
    """Train the twin as the plain one was: the largest differences, the first gradients', and the names held here."""
    twin, optim, replica, replicas = cut(group, orders, **how)
    (steps, parameters), seen, count = expected, [], 1 if replicas is None else replicas.size()
    zeroed = how.get("data_axis") == "zero"
    with comm.use(transport=transport, debug=debug):
        for step, (loss, norm, gradients) in enumerate(steps):
            rng.seed(twin, 7, step=step)
            parts = batch(schedule.size(orders)[1] * count, step)
            given = [each.clone() for part in parts for each in part]
            total = execute.run(twin, orders, parts[replica::count],
                                valid_tokens(labels for _, labels in parts) if count > 1 else None)
            if count > 1:
                comm.all_reduce(total, group=replicas)
            grads.finish(twin)
            assert all(torch.equal(a, b) for a, b in zip(given, (x for part in parts for x in part), strict=True))
            # ZeRO leaves slices of gradients, told by the norm and by what they do
            seen.append({"loss": abs(loss - total.item()),
                         "gradients": 0.0 if zeroed else distance(gradients, twin, lambda p: p.grad)})
            seen[-1]["norm"] = abs(norm - grads.clip_grad_norm_(twin, CLIP).item()) / norm
            optim.step()
            optim.zero_grad()
    worst = {name: max(each[name] for each in seen) for name in seen[0]}
    return worst | {"parameters": distance(parameters, twin, lambda p: p.detach()), "first": seen[0]["gradients"],
                    "names": [name for name, _ in twin.named_parameters()]}


def pair(orders, kind="tied", optimizer="sgd", steps=2, dtype=torch.float64, replicas=1, dropout=0.0, **how):
    """What `compare` is to be called with."""
    given = KINDS[kind](orders)
    weights = given.pop("weights", None)
    built = dict(dtype=dtype, dropout=dropout, frozen=FROZEN) | given
    expected = reference(schedule.size(orders)[1] * replicas, optimizer, steps, **built)
    return expected, how | built | dict(weights=weights, optimizer=optimizer)


def parity(pool, orders, kind="tied", ranks=None, **how):
    """Assert that the twin, cut for the schedule, is the plain model."""
    expected, how = pair(orders, kind, **how)
    outcomes = pool(ranks or len(orders)).run(compare, orders, expected, **how)
    check(outcomes, expected, how["dtype"])


def check(outcomes, expected, dtype=torch.float64):
    """Assert that `compare` has found no difference on any rank, and that no weight is on none. In float32, where
    updates add up what rounding has done: losses, norm, and the first step's gradients."""
    for seen in outcomes:
        told = {name: value for name, value in seen.items() if name != "names"}
        if dtype == torch.float64:
            assert max(seen["loss"], seen["norm"], seen["gradients"]) < 1e-10 and seen["parameters"] < 1e-9, told
        else:
            assert max(seen["loss"], seen["norm"], seen["first"]) < 1e-5, told
    assert {name for seen in outcomes for name in seen["names"]} == set(expected[1])
