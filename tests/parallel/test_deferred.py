"""The weight gradients of a mixture of experts, put off: the same, and not there before."""

import pytest
import torch

from shardlab.model import Transformer, initialise
from shardlab.parallel.deferred import Deferred, deferring
from shardlab.specs import ModelSpec
from shardlab.specs.experts import Experts

SPEC = ModelSpec(hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=20, vocab=31,
                 experts=Experts(routed=6, active=2, ffn=9, shared=1))
FROZEN = "layers.1.mlp.experts.3.up_proj.weight"


def backward(later=None, recompute=None):
    model = initialise(Transformer(SPEC, recompute).double(), std=0.3)
    model.get_parameter(FROZEN).requires_grad_(False)
    tokens = torch.randint(SPEC.vocab, (2, 5), generator=torch.Generator().manual_seed(3))
    if later is None:
        model.loss(tokens, tokens.roll(-1, 1)).backward()
        return model
    with deferring(later):
        model.loss(tokens, tokens.roll(-1, 1)).backward()
    return model


@pytest.mark.parametrize("recompute", [None, "full"])
def test_gradients_of_experts_are_put_off_and_come_to_the_same(recompute):
    later = Deferred()
    plain, put_off = backward(), backward(later, recompute)
    matrices = {name: p for name, p in put_off.named_parameters() if p.dim() > 1 and "embed" not in name}
    assert any("experts" in name for name in matrices) and all(p.grad is None for p in matrices.values())
    later.compute()
    for name, parameter in plain.named_parameters():
        theirs, ours = parameter.grad, put_off.get_parameter(name).grad
        assert (theirs is None) == (ours is None) == (name == FROZEN), name
        assert theirs is None or torch.allclose(theirs, ours, rtol=1e-12, atol=1e-14), name
