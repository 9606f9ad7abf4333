"""The plain model and its twin under a whole `Layout`, trained side by side by the one loop: the matrix of layouts.

The plain model sees all micro-batches of all replicas, one after the other. Nothing divides: FFN 29, experts' 7,
vocabulary 53, stages of different depth, sequences of 4 to 7 tokens; some tensor axes have more ranks than there are KV
heads; biases, norms and QK norms are far from where they begin; three weights are frozen, an expert's among them, and
one is used by nothing.
"""

from functools import partial

import torch
from replicas import whole_gradients
from twins import mine

from shardlab import comm
from shardlab.model import Rules, Transformer, initialise
from shardlab.parallel import layout, zero
from shardlab.specs import Experts, ModelSpec
from shardlab.train import train

SIZES = dict(hidden=16, heads=8, kv_heads=2, head_dim=2, ffn=29, vocab=53, qk_norm=True, attention_bias=True,
             output_bias=True, mlp_bias=True)
MIXTURE = Experts(routed=8, active=2, ffn=7, shared=1, first_dense=1)
OPTIMIZERS = {"momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
              "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)}
FROZEN = ("layers.0.mlp.up_proj.weight", "layers.1.mlp.experts.5.gate_proj.weight", "layers.1.self_attn.o_proj.bias")
CLIP, STEPS = 0.05, 3


def build(plain):
    """A model of distinct weights, biases and norms too."""
    generator = torch.Generator().manual_seed(0)
    spec = ModelSpec(**SIZES, layers=plain.layers, tied=plain.tied, experts=MIXTURE if plain.moe else None)
    model = initialise(Transformer(spec, rules=Rules(balance=0.3 if plain.balanced else 0.0)), std=0.2).double()
    model.layers[-1].unused = torch.nn.Parameter(torch.ones(2, 5, dtype=torch.float64))
    for name, parameter in model.named_parameters():
        some = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += (0.5 if "gate.weight" in name else 0.1) * some
        parameter.requires_grad_(name not in FROZEN)
    return model


def batches(plain, step, coordinate, size):
    """Of a step's micro-batches those of one replica, as (tokens, labels): all alike with a label for every token, or
    of several sizes with few labels and many, one of them without any."""
    generator, count = torch.Generator().manual_seed(step), plain.count
    out = []
    for i in range(count):
        shape = (2, 6) if plain.labels == "equal" else (1 + (i + step) % 3, 4 + i % 4)
        tokens, targets = torch.randint(0, SIZES["vocab"], (2, *shape), generator=generator)
        often = 1.0 if plain.labels == "equal" else 0.2 + 0.7 * (i + 1) / count
        often = 0.0 if plain.labels == "one without" and i == step % count else often
        kept = torch.rand(shape, generator=generator) < often
        out.append((tokens, targets.where(kept, -100)))
    return out[coordinate::size]


def trained(model, optimizer, plain, **how):
    """(What each step came to, the clipped gradients of the last)."""
    seen = {}

    def look(*_):
        seen["steps"] = seen.get("steps", 0) + 1
        if seen["steps"] == STEPS:  # of slices they are put together, which takes its time
            seen["gradients"] = gradients(model)

    optimizer.register_step_pre_hook(look)
    steps = train(model, optimizer, partial(batches, plain), range(STEPS), max_norm=CLIP, progress=False, **how)
    return steps, seen.get("gradients", {})  # none where a step was skipped, whose norm was not finite


def gradients(model):
    """Of what is trained, by name: copies."""
    some = whole_gradients(model) if hasattr(model, "reducer") else {
        name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: None if each is None else each.clone() for name, each in some.items()}


def reference(plain):
    """The plain model's training: its steps, the last gradients, and the parameters after that."""
    model = build(plain)
    steps, last = trained(model, OPTIMIZERS[plain.optimizer](model.parameters()), plain)
    assert all(step.norm > CLIP for step in steps)  # so that there is something to clip
    return steps, last, {name: p.detach().clone() for name, p in model.named_parameters()}


def apart(theirs, ours, twin):
    """The largest distance between what this rank has and the plain model has of it, over the plain one's largest."""
    shapes = dict(twin.named_parameters())
    assert ours.keys() <= theirs.keys()
    missing = [name for name, each in ours.items() if (each is None) != (theirs[name] is None)]
    assert not missing, f"{missing[0]} has a gradient here or there alone"
    most = max(each.abs().max().item() for each in theirs.values() if each is not None)
    return largest((mine(theirs[name], shapes[name]) - each).abs().max().item() for name, each in ours.items()
                   if each is not None) / most


def largest(numbers):
    """Python's max may lose nan."""
    return torch.tensor([0.0, *numbers], dtype=torch.float64).max().item()


def differences(case, expected):
    """Train the twin as the plain model was: the largest differences, and the names of what is held here."""
    plain_steps, plain_gradients, parameters = expected
    torch.manual_seed(1000 + torch.distributed.get_rank())  # the ranks' own streams differ
    twin, optimizer, axes = layout.cut(build(case.plain), case.layout, OPTIMIZERS[case.optimizer], bucket_bytes=9000)
    with comm.use(transport=case.transport):
        steps, last = trained(twin, optimizer, case.plain, data=axes.data, orders=case.layout.orders)
        with zero.gathered(twin):
            held = {name: p.detach() for name, p in twin.named_parameters()}
            pairs = list(zip(plain_steps, steps, strict=True))
            return {"loss": largest(abs(a.loss - b.loss) for a, b in pairs),
                    "norm": largest(abs(a.norm - b.norm) / a.norm for a, b in pairs),
                    "counts": sum(a[2:] != b[2:] for a, b in pairs),
                    "gradients": apart(plain_gradients, last, twin), "parameters": apart(parameters, held, twin),
                    "names": list(held)}


def compare(group, cases, references):
    """`differences` of one case after another, those that raise with their name."""
    out = []
    for case in cases:
        try:
            out.append(differences(case, references[case.plain]))
        except Exception as error:
            error.add_note(str(case))
            raise
    return out


def references(group, plains):
    """This rank's share of them."""
    return {plain: reference(plain) for plain in plains[group.rank() :: group.size()]}


known = {}  # what the plain model came to
AT_ONCE = 10  # cases in a run, which a pool gives a limited time


def parity(pool, cases):
    """Assert that under each layout the twin is the plain model on every rank, and that every weight is on one. Those
    with the same axes run together: process groups are costly, and those of a pool stay."""
    ranks = cases[0].layout.world_size
    new = dict.fromkeys(case.plain for case in cases if case.plain not in known)
    for some in pool(ranks).run(references, list(new)):
        known.update(some)
    together = {}
    for case in cases:
        together.setdefault(tuple(case.layout.axes.items()), []).append(case)
    for some in (same[i : i + AT_ONCE] for same in together.values() for i in range(0, len(same), AT_ONCE)):
        outcomes = pool(ranks).run(compare, some, {case.plain: known[case.plain] for case in some})
        for case, of_ranks in zip(some, zip(*outcomes, strict=True), strict=True):
            check(case, of_ranks)


def check(case, outcomes):
    for seen in outcomes:
        told = {name: value for name, value in seen.items() if name != "names"}
        exact = all(seen[name] < 1e-10 for name in ("loss", "norm", "gradients")) and not seen["counts"]
        assert exact and seen["parameters"] < 1e-9, f"{case}: {told}"
    assert {name for seen in outcomes for name in seen["names"]} == set(known[case.plain][2]), str(case)
