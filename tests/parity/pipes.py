"""The plain model and its twin cut over a pipeline, trained side by side: what every parity test of schedules compares.

The plain one runs micro-batch after micro-batch by itself. Five layers don't divide over the stages, FFN and vocabulary
are odd, queries grouped, biases everywhere, tied weights, two frozen ones, and one in a block that nothing uses. The
micro-batches have different sizes and different numbers of labels, one of them none.
"""

import torch

from shardlab import comm, schedule
from shardlab.model.transformer import Transformer
from shardlab.parallel import execute, grads, pipeline
from shardlab.specs import ModelSpec

SIZES = dict(hidden=16, layers=5, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53, tied=True, attention_bias=True,
             output_bias=True, mlp_bias=True)
FROZEN = ("layers.0.mlp.up_proj.weight", "layers.4.self_attn.o_proj.bias")
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "adamw": lambda p: torch.optim.AdamW(p, lr=0.01)}


def build(dtype=torch.float64, recompute=None, frozen=FROZEN, **sizes):
    """A model of distinct weights, biases and norms too; `frozen` are the beginnings of names."""
    torch.manual_seed(0)
    model = Transformer(ModelSpec(**(SIZES | sizes)), recompute)
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


def plain_step(model, parts):
    """All micro-batches, one after another; the loss of their labels."""
    valid, total = sum(int((labels != -100).sum()) for _, labels in parts), 0.0
    for tokens, labels in parts:
        loss = model.loss(tokens, labels, valid)
        loss.backward()
        total += loss.detach()
    return total


def distance(plain, twin, of):
    """The largest distance between what this rank has and the plain model has of it, over the plain one's largest."""
    theirs, ours = dict(plain.named_parameters()), dict(twin.named_parameters())
    assert ours.keys() <= theirs.keys()
    pairs = [(of(theirs[name]), of(p)) for name, p in ours.items()]
    assert all((a is None) == (b is None) for a, b in pairs)
    largest = max(of(p).abs().max().item() for p in theirs.values() if of(p) is not None)
    return max(((a - b).abs().max().item() for a, b in pairs if a is not None), default=0.0) / largest


def compare(group, orders, optimizer="sgd", steps=5, transport="backend", dtype=torch.float64, recompute=None,
            frozen=FROZEN, weights=None, **sizes):
    """Train both for `steps` clipped steps: the largest differences, the first gradients', and the names held here."""
    plain, twin = build(dtype, recompute, frozen, **sizes), build(dtype, recompute, frozen, **sizes)
    torch.manual_seed(1000 + group.rank())
    twin = pipeline.cut(twin, group, orders, weights)
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in (plain, twin)]
    microbatches, seen = schedule.size(orders)[1], []
    with comm.use(transport=transport):
        for step in range(steps):
            parts = batch(microbatches, step)
            losses = plain_step(plain, parts), execute.run(twin, orders, parts)
            grads.finish(twin)
            now = {"loss": abs(losses[0] - losses[1]).item(), "gradients": distance(plain, twin, lambda p: p.grad)}
            norms = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2), grads.clip_grad_norm_(twin, 0.2)
            assert norms[0] > 0.2  # so that there is something to clip
            seen.append(now | {"norm": (abs(norms[0] - norms[1]) / norms[0]).item()})
            for each in optimizers:
                each.step()
                each.zero_grad()
    worst = {name: max(each[name] for each in seen) for name in seen[0]}
    return worst | {"parameters": distance(plain, twin, lambda p: p.detach()), "first": seen[0]["gradients"],
                    "names": [name for name, _ in twin.named_parameters()]}


def check(outcomes):
    """Assert that `compare`, in float64, has found no difference on any rank, and that no weight is on none."""
    for seen in outcomes:
        assert max(seen["loss"], seen["norm"], seen["gradients"]) < 1e-10 and seen["parameters"] < 1e-9, seen
    assert {name for seen in outcomes for name in seen["names"]} == {name for name, _ in build().named_parameters()}
