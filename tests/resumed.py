"""Runs that stop at a checkpoint and go on: small models, their layouts, and how far a run is from the one that went
through.

Data and dropout are functions of the step, so the steps of one run, in one process, are what every other must come to.
"""

from functools import partial

import torch

from shardlab.model import Transformer
from shardlab.parallel import layout as layouts
from shardlab.parallel import whole
from shardlab.specs import Experts, Layout, ModelSpec
from shardlab.train import train

SIZES = dict(hidden=16, layers=4, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53)  # padded over 2, 3 and 4 ranks
SPECS = {
    "biases": ModelSpec(**SIZES, attention_bias=True),
    "tied": ModelSpec(**SIZES, tied=True, qk_norm=True),
    "experts": ModelSpec(**SIZES, qk_norm=True, experts=Experts(routed=4, active=2, ffn=7, first_dense=1)),
}
FROZEN = ("layers.1.post_attention_layernorm.weight", "layers.2.self_attn.q_proj.weight")
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
SEQUENCES, MICROBATCHES = 12, 2  # of a step, and of a replica in it


def build(kind, seed=0, dtype=torch.float64, dropout=0.0):
    torch.manual_seed(seed)
    model = Transformer(SPECS[kind], dropout=dropout).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.requires_grad_(parameter.requires_grad and name not in FROZEN)
    return model


def parts(step, coordinate, size):
    """The step's sequences, unequally labelled, dealt out to the replicas, each in two micro-batches."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, 53, (2, SEQUENCES, 6), generator=generator)
    kept = torch.rand(labels.shape, generator=generator) < torch.linspace(0.2, 0.9, SEQUENCES).unsqueeze(1)
    mine = tokens[coordinate::size], labels.where(kept, -100)[coordinate::size]
    return list(zip(*(each.tensor_split(MICROBATCHES) for each in mine), strict=True))


def cut(layout, kind, optimizer, **how):
    """A model under a layout, with an optimizer that has not begun."""
    return layouts.cut(build(kind, **how), layout, OPTIMIZERS[optimizer], bucket_bytes=3000)


def go(here, layout, steps, after=None):
    """Train, clipped: what each step came to."""
    return train(here.model, here.optimizer, parts, steps, here.axes.data, 0.1, False, layout.orders, after=after)


def all_of(here):
    """Every weight and every state of the whole model, by (name, state): on every rank."""
    entries = whole.listed(here.model, here.optimizer)
    tensors = [each for each in entries if each.number is None]
    out = {(e.name, e.state): value.clone() for e, value in whole.tensors(here.model, tensors, here.optimizer)}
    return out | {(e.name, e.state): torch.tensor(e.number) for e in entries if e.number is not None}


def apart(ours, theirs):
    """The largest distance of two runs' weights and states; they must have the same ones, of the same dtypes."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    assert all(ours[key].dtype == theirs[key].dtype and ours[key].shape == theirs[key].shape for key in theirs)
    return max((ours[key] - theirs[key]).abs().max().item() for key in theirs)


def stray(steps, expected):
    """The largest distance of steps from those of the run that went through, in loss and norm."""
    assert [each.tokens for each in steps] == [each.tokens for each in expected]
    return max(max(abs(a.loss - b.loss), abs(a.norm - b.norm)) for a, b in zip(steps, expected, strict=True))


def through(kind, optimizer, steps):
    """The run that goes through, in this process: its steps, and all it has after them."""
    here = cut(Layout(), kind, optimizer)
    return go(here, Layout(), range(steps)), all_of(here)
