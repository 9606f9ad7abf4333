"""The plain mixture of experts and its twin with the experts cut, trained side by side: the parity tests of EP.

The plain one sees four parts a step, each as a pass of its own, for capacity and balance are of a pass; the ranks share
them out, one to four each. So one plain training is the measure of every number of ranks. Parts have different sizes
and numbers of labels; weights are tied, two frozen, one of them an expert's, and nothing uses a third.
"""

from functools import lru_cache

import torch

from shardlab import comm
from shardlab.model import Rules, Transformer
from shardlab.parallel import balance, data, execute, expert, grads, mesh, pipeline, zero
from shardlab.parallel.loss import valid_tokens
from shardlab.specs import ModelSpec
from shardlab.specs.experts import Experts

SIZES = dict(hidden=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53, tied=True, attention_bias=True)
PARTS = 4
FROZEN = ("layers.0.self_attn.o_proj", "layers.2.mlp.experts.5.up_proj")
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
              "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)}
CLIP = 0.1

MIXTRAL = dict(routed=8, active=2, ffn=7)
DEEPSEEK = MIXTRAL | dict(shared=2, first_dense=1, score="sigmoid", routing_bias=True, groups=4, top_groups=2,
                          scale=1.5, active=3)
BIASED = MIXTRAL | dict(routing_bias=True)

# how the model is built: its experts, their rules, and what is added to the numbers they are chosen by
KINDS = {
    "dropless": dict(experts=MIXTRAL),
    "balanced": dict(experts=MIXTRAL, rules=dict(balance=0.3)),
    "deepseek": dict(experts=DEEPSEEK, rules=dict(balance=0.3)),
    "position": dict(experts=MIXTRAL | dict(shared=1), rules=dict(capacity=1.0, balance=0.3)),
    "weight": dict(experts=DEEPSEEK, rules=dict(capacity=0.75, drop="weight")),
    "skewed": dict(experts=BIASED, pushed={0: 10.0, 6: 0.2}),
    "skewed, full": dict(experts=BIASED, pushed={0: 10.0}, rules=dict(capacity=1.0, balance=0.3)),
    "all to one": dict(experts=BIASED | dict(active=1, normalised=False), pushed={0: 10.0}, rules=dict(balance=0.3)),
    "one left out": dict(experts=BIASED, pushed={5: -10.0}),
    "padded": dict(experts=MIXTRAL, rules=dict(capacity=1.0, balance=0.3), padded=True),
    "empty": dict(experts=DEEPSEEK, rules=dict(balance=0.3), empty=True),
    "some frozen": dict(experts=MIXTRAL, frozen=tuple(f"layers.{i}.mlp.experts.{e}." for i in range(3)
                                                      for e in range(4))),
    "late": dict(experts=MIXTRAL | dict(first_dense=3), rules=dict(balance=0.3)),
    "only experts": dict(experts=MIXTRAL | dict(shared=1), only="mlp.experts."),
    "only the last": dict(experts=MIXTRAL, only="mlp.experts.7."),
}


def build(experts, rules=(), pushed=(), frozen=FROZEN, only="", recompute=None, dtype=torch.float64, **sizes):
    """A model of distinct weights, biases and norms too. What has a name that begins as one of `frozen`, or that has
    not `only` in it, is frozen."""
    torch.manual_seed(0)
    spec = ModelSpec(**(SIZES | sizes), experts=Experts(**experts))
    model = Transformer(spec, recompute, rules=Rules(**dict(rules)))
    model.layers[-1].unused = torch.nn.Parameter(torch.ones(2, 5))
    for name, parameter in model.named_parameters():
        pushes = name.endswith("correction_bias")
        parameter.data += (0.01 if pushes else 0.5 if "gate.weight" in name else 0.1) * torch.randn_like(parameter)
        if pushes:
            for number, by in dict(pushed).items():
                parameter.data[number] += by
        parameter.requires_grad_(parameter.requires_grad and not name.startswith(frozen) and only in name)
    return model.to(dtype)


def batch(step, padded=False, empty=False, parts=PARTS):
    """The parts of a step: (tokens, labels, real) of 1 to 3 sequences of 4 to 7 tokens. Where some are `padded`, the
    first is before its sequences' beginnings and the last altogether, as it is too where it is `empty`."""
    generator = torch.Generator().manual_seed(step)
    out = []
    for i in range(parts):
        shape = (1 + (i + step) % 3, 4 + i % 4)
        tokens, labels = torch.randint(0, SIZES["vocab"], (2, *shape), generator=generator)
        kept = torch.rand(shape, generator=generator) < 0.3 + 0.6 * i / parts
        real = torch.ones(shape, dtype=torch.bool)
        if padded:
            real[:, : 2 if i == 0 else 0] = False
            real &= i < parts - 1
        if empty and i == parts - 1:
            tokens, labels, kept, real = (each[:0] for each in (tokens, labels, kept, real))
        out.append((tokens, labels.where(kept, -100), real))
    return out


@lru_cache(maxsize=32)
def _reference(kind, optimizer, steps, dtype, rate, parts, sizes):
    how = dict(KINDS[kind])
    drawn = {name: how.pop(name) for name in ("padded", "empty") if name in how}
    model = build(**how, dtype=dtype, **dict(sizes))
    optim, seen = OPTIMIZERS[optimizer](model.parameters()), []
    for step in range(steps):
        drawn_now, total, routed = batch(step, parts=parts, **drawn), 0.0, []
        valid = valid_tokens(labels for _, labels, _ in drawn_now)
        for tokens, labels, real in drawn_now:
            loss = model.loss(tokens, labels, valid, routed, real)
            loss.backward()
            total += loss.detach()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP  # so that there is something to clip
        optim.step()
        optim.zero_grad()
        told, dropped = balance.even(model, routed, rate) if rate else balance.loads(model, routed)
        seen.append((total.item(), norm.item(), gradients, told, dropped))
    return seen, {name: p.detach().clone() for name, p in model.named_parameters()}


def reference(kind, optimizer="sgd", steps=5, dtype=torch.float64, rate=0.0, parts=PARTS, **sizes):
    """The plain model's training: of each step (loss, norm, gradients by name, loads, dropped); the last parameters."""
    return _reference(kind, optimizer, steps, dtype, rate, parts, tuple(sorted(sizes.items())))


def cut(group, kind, axes=None, stage=0, orders=None, optimizer="sgd", **built):
    """(The twin on this rank, its optimizer, the data axis, what it takes of the parts). `axes` names the axes over all
    ranks: by default experts on each rank of the group."""
    how = {name: each for name, each in KINDS[kind].items() if name not in ("padded", "empty")}
    twin = build(**(how | built))
    axes = axes or {"ep": group.size()}
    of = {name: mesh.build(**axes).get_group(name) for name in axes}
    tokens = group if orders is None else mesh.build(pp=axes["pp"], dp=group.size() // axes["pp"]).get_group("dp")
    for name, parameter in twin.named_parameters():  # ranks begin with other weights than the first of their group
        first = of.get("edp") if "mlp.experts." in name else tokens
        parameter.data += 0.0 if first is None or first.rank() == 0 else 0.5
    expert.cut(twin, of["ep"], of.get("edp"))
    if orders is not None:
        pipeline.cut(twin, of["pp"], orders)
    optim = OPTIMIZERS[optimizer](list(twin.parameters()) or [torch.nn.Parameter(torch.zeros(1))])
    if stage:
        zero.shard(twin, optim, tokens, stage, 3000)
    else:
        data.replicate(twin, tokens, 3000)
    return twin, optim, tokens


def distance(theirs, ours):
    """The largest distance between what this rank has and the plain model has of it, over the plain one's largest."""
    assert ours.keys() <= theirs.keys()
    assert [name for name in ours if (ours[name] is None) != (theirs[name] is None)] == []
    largest = max(each.abs().max().item() for each in theirs.values() if each is not None)
    there = [name for name, each in ours.items() if each is not None]
    return max(((theirs[name] - ours[name]).abs().max().item() for name in there), default=0.0) / largest


def passes(twin, parts, valid, orders, routed):
    """Forward and backward of this rank's parts; the sum of their losses."""
    if orders is not None:
        real = [each for _, _, each in parts]
        return execute.run(twin, orders, [part[:2] for part in parts], valid, routed, real)
    total = torch.zeros((), dtype=torch.float64)
    for i, (tokens, labels, real) in enumerate(parts):
        with data.no_sync(twin) if i < len(parts) - 1 else torch.enable_grad():
            loss = twin.loss(tokens, labels, valid, routed, real)
            loss.backward()
        total += loss.detach()
    return total


def compare(group, kind, expected, transport="backend", debug=False, rate=0.0, parts=PARTS, **how):
    """Train the twin as the plain one was: the largest differences, the first gradients', and the names held here."""
    twin, optim, tokens = cut(group, kind, **how)
    steps, parameters = expected
    drawn = {name: True for name in ("padded", "empty") if name in KINDS[kind]}
    left = grads.spread(twin)
    seen = []
    with comm.use(transport=transport, debug=debug):
        for step, (loss, norm, gradients, told, dropped) in enumerate(steps):
            now, routed = batch(step, parts=parts, **drawn), []
            given = [each.clone() for part in now for each in part]
            valid = valid_tokens(labels for _, labels, _ in now)
            total = passes(twin, now[tokens.rank() :: tokens.size()], valid, how.get("orders"), routed)
            comm.all_reduce(total, group=tokens)
            grads.finish(twin)
            assert all(torch.equal(a, b) for a, b in zip(given, (x for part in now for x in part), strict=True))
            # ZeRO leaves slices of gradients, told by the norm and by what they do; experts' are whole
            mine = {name: p.grad for name, p in twin.named_parameters() if not how.get("stage") or p in left}
            seen.append({"loss": abs(loss - total.item()), "gradients": distance(gradients, mine)})
            seen[-1]["norm"] = abs(norm - grads.clip_grad_norm_(twin, CLIP).item()) / norm
            optim.step()
            optim.zero_grad()
            load, lost = balance.even(twin, routed, rate, tokens) if rate else balance.loads(twin, routed, tokens)
            seen[-1]["loads"] = (load - told).abs().max().item() + abs(lost - dropped)
    worst = {name: max(each[name] for each in seen) for name in seen[0]}
    with zero.gathered(twin):
        apart = distance(parameters, {name: p.detach() for name, p in twin.named_parameters()})
    return worst | {"parameters": apart, "first": seen[0]["gradients"],
                    "names": [name for name, _ in twin.named_parameters()]}


def parity(pool, kind, ranks=2, optimizer="sgd", steps=5, dtype=torch.float64, rate=0.0, parts=PARTS, layers=3,
           tied=True, **how):
    """Assert that the twin, its experts cut, is the plain model, on every rank; returns what the plain one's steps came
    to."""
    expected = reference(kind, optimizer, steps, dtype, rate, parts, layers=layers, tied=tied)
    outcomes = pool(ranks).run(compare, kind, expected, rate=rate, optimizer=optimizer, dtype=dtype, parts=parts,
                               layers=layers, tied=tied, **how)
    for seen in outcomes:
        told = {name: value for name, value in seen.items() if name != "names"}
        assert seen["loads"] == 0, told
        if dtype == torch.float64:
            assert max(seen["loss"], seen["norm"], seen["gradients"]) < 1e-10 and seen["parameters"] < 1e-9, told
        else:
            assert max(seen["loss"], seen["norm"], seen["first"]) < 1e-5, told
    assert {name for seen in outcomes for name in seen["names"]} == set(expected[1])
    return expected[0]
