"""The same gradients as PyTorch's own tensor parallelism, DTensor through parallelize_module, on the same model."""

import pytest
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from twins import batch, mine, twins

from shardlab.model.head import cross_entropy
from shardlab.parallel import grads, mesh

SIZES = dict(ffn=96, vocab=108, kv_heads=4)  # which divide: where they don't, DTensor refuses some


def plan(layers, sequence):
    """What PyTorch's tutorial on tensor parallelism asks for of a Llama."""
    stream = Shard(1) if sequence else Replicate()
    out = {"embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
           "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate())}
    for i in range(layers):
        out |= {f"layers.{i}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        out |= {f"layers.{i}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        out |= {f"layers.{i}.{name}": RowwiseParallel(output_layouts=stream)
                for name in ("self_attn.o_proj", "mlp.down_proj")}
        if sequence:
            rest = (None,) * 4  # cos, sin, cache and run
            out |= {f"layers.{i}.self_attn": PrepareModuleInput(
                        input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest)),
                    f"layers.{i}.mlp": PrepareModuleInput(
                        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                    f"layers.{i}.input_layernorm": SequenceParallel(),
                    f"layers.{i}.post_attention_layernorm": SequenceParallel()}
    return out | ({"norm": SequenceParallel()} if sequence else {})


def against_dtensor(group, sequence, mode):
    """The largest distance between our gradients and theirs, over the largest gradient, and how many were compared."""
    theirs, ours = twins(SIZES, group, mode=mode)
    parallelize_module(theirs, mesh.build(tp=group.size()), plan(len(theirs.layers), sequence))
    tokens, labels = batch(108, shape=(3, 12))
    losses = cross_entropy(theirs(tokens), labels), ours.loss(tokens, labels)
    for loss in losses:
        loss.backward()
    grads.finish(ours)
    pairs = []
    for (name, a), (same, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert name == same
        if a.grad is not None:
            pairs.append((a.grad.full_tensor() if isinstance(a.grad, DTensor) else a.grad, b))
    largest = max(a.abs().max().item() for a, _ in pairs)
    worst = max((mine(a, b) - b.grad).abs().max().item() for a, b in pairs)
    return worst / largest, abs(losses[0] - losses[1]).item(), len(pairs)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("sequence,mode", [(False, False), (True, "keep"), (True, "again")])
def test_the_gradients_are_those_of_dtensor(pool, p, sequence, mode):
    for gradients, loss, compared in pool(p).run(against_dtensor, sequence, mode):
        assert gradients < 1e-10 and loss < 1e-10 and compared == 3 + 2 * 9
