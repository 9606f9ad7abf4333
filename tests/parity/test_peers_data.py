"""Our gradients beside those of PyTorch's own: DDP and FSDP2's fully_shard, on the same model and tokens.

Both of PyTorch's average over ranks what each made of its own loss, so with losses that are sums ÷ the tokens of all
ranks, theirs are 1/p of the gradient.
"""

import pytest
import torch
from replicas import FROZEN, OPTIMIZERS, STAGES, batch, build, cut, distance, whole_gradients

from shardlab.parallel import grads
from shardlab.parallel.loss import valid_tokens


class Loss(torch.nn.Module):
    """A model whose forward is the loss, for DDP, which hooks into forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels, valid):
        return self.model.loss(tokens, labels, valid)


def of_ddp(group, tokens, labels, valid):
    model = build(0)
    wrapped = torch.nn.parallel.DistributedDataParallel(Loss(model), find_unused_parameters=True)
    wrapped(tokens, labels, valid).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def of_fsdp(group, tokens, labels, valid):
    from torch.distributed.fsdp import fully_shard

    model = build(0)
    axis = torch.distributed.init_device_mesh("cpu", (group.size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=axis)
    wrapped = fully_shard(Loss(model), mesh=axis)
    wrapped(tokens, labels, valid).backward()
    return {name: None if p.grad is None else p.grad.full_tensor()
            for name, p in model.named_parameters() if p.requires_grad}


def compared(group, peer, frozen=FROZEN):
    tokens, labels = (x[group.rank(), 0] for x in batch(group.size(), 0))
    valid = valid_tokens([labels], group)
    theirs = {name: None if g is None else g * group.size() for name, g in peer(group, tokens, labels, valid).items()}
    out = {}
    for stage in STAGES:
        model = build(0)
        cut(model, OPTIMIZERS["adamw"](model), group, stage)
        model.loss(tokens, labels, valid).backward()
        grads.finish(model)
        ours = whole_gradients(model)
        for name, gradient in ours.items():
            if gradient is None and theirs[name] is not None:  # theirs has zeros for what nothing uses
                assert not theirs[name].any()
                theirs[name] = None
        out[stage] = distance(theirs, ours)
    return out


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("peer", [of_ddp, of_fsdp])
def test_the_same_gradients_as_pytorchs(pool, p, peer):
    for out in pool(p).run(compared, peer):
        assert len(out) == 4 and max(out.values()) < 1e-12, out
