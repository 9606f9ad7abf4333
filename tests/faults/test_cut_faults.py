"""FAULTS.md on the data and tensor axes, where no other test is named after the row.

| row                | where it is held                                                                              |
|--------------------|-----------------------------------------------------------------------------------------------|
| D1–D3, D14, 24     | here                                                                                          |
| D5–D8              | tests/train (test_loop, test_train_data)                                                      |
| D9–D11             | test_pipeline_faults; D11 in tests/parallel/test_grads and parity/test_pipeline_axes          |
| T1, T2             | here                                                                                          |
| T3, T4, T6, T7, T9 | tests/parity (test_sequence, test_tensor, test_dropout), tests/specs                          |
| Z1–Z7              | tests/parallel (test_shard, test_flat), tests/specs/test_rows, tests/parity/test_zero_state   |
| C18                | tests/comm/test_regions: finite differences of rank-dependent losses                          |
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from shardlab import comm
from shardlab.model.transformer import Transformer
from shardlab.parallel import data, grads, tensor, zero
from shardlab.parallel.sequence import enter
from shardlab.specs import ModelSpec

SPEC = ModelSpec(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53, tied=True)


def model_of(seed=0):
    torch.manual_seed(seed)
    model = Transformer(SPEC).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batch(rank, step=0, rows=2):
    """Tokens and labels of a rank, distinct by rank and position."""
    tokens = torch.arange(rows * 7).view(rows, 7) * (2 + step) + 11 * rank
    return tokens % 53, (tokens * 3 + 1) % 53


def whole_gradients(p, passes=1):
    """The plain model's, of the mean over all ranks' tokens in all passes."""
    plain = model_of()
    parts = [batch(rank, step) for rank in range(p) for step in range(passes)]
    plain.loss(*(torch.cat(each) for each in zip(*parts, strict=True))).backward()
    return [parameter.grad for parameter in plain.parameters()]


def apart(model, whole):
    """The largest difference of a gradient, over the largest."""
    pairs = list(zip((parameter.grad for parameter in model.parameters()), whole, strict=True))
    return max((a - b).abs().max() for a, b in pairs) / max(b.abs().max() for b in whole)


def reduced(group):
    model = data.replicate(model_of(group.rank()), group)
    before = copy.deepcopy([parameter.detach() for parameter in model.parameters()])
    model.loss(*batch(group.rank()), valid=14 * group.size()).backward()
    grads.finish(model)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return same, apart(model, whole_gradients(group.size())).item()


@pytest.mark.parametrize("p", [2, 3])
def test_d1_backward_sums_gradients_and_leaves_weights_alone(pool, p):
    """picotron#39: the hook gets the parameter, and what was averaged were the weights."""
    for same, difference in pool(p).run(reduced):
        assert same and difference < 1e-12


def accumulated(group, around, passes=3):
    """Several passes, no_sync around all but the last: around forward and backward, backward alone, or nothing."""
    model = data.replicate(model_of(), group, bucket_bytes=4000)
    rows = len(model.reducer.buckets)
    with comm.record() as ledger:
        for step in range(passes):
            held = data.no_sync(model) if step < passes - 1 else nullcontext()
            with held if around == "both" else nullcontext():
                loss = model.loss(*batch(group.rank(), step), valid=14 * group.size() * passes)
                with held if around == "backward" else nullcontext():
                    loss.backward()
        grads.finish(model)
    sent = [entry for entry in ledger.entries if entry.dtype != "uint8"]
    return len(sent) - rows, apart(model, whole_gradients(group.size(), passes)).item()


@pytest.mark.parametrize("around", ["both", "backward"])
def test_d2_d3_and_24_passes_add_up_and_the_last_one_sends(pool, around):
    """PiPPy#1133, build-nanogpt#30: DDP reads its flag in forward, so that no_sync around backward alone sends each
    time, or less than all. Automodel#3530: only the last pass was left. Here backward reads it, once."""
    for more, difference in pool(2).run(accumulated, around):
        assert more == 0 and difference < 1e-12


def forgot(group):
    with pytest.raises(RuntimeError, match=r"all but the last of several inside data\.no_sync"):
        accumulated(group, "nothing")
    return True


def test_d2_passes_without_no_sync_are_refused_not_summed_twice(pool):
    assert pool(2).run(forgot) == [True, True]


def norms(group):
    """The norm of each stage in two steps that change nothing, so that all have the same samples and weights."""
    seen = []
    for stage in range(4):
        model = model_of(group.rank() if stage else 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        if stage:
            zero.shard(model, optimizer, group, stage, bucket_bytes=4000)
        else:
            data.replicate(model, group, bucket_bytes=4000)
        for step in range(2):
            model.loss(*batch(group.rank(), step), valid=14 * group.size()).backward()
            grads.finish(model)
            seen.append(grads.clip_grad_norm_(model, 1e-3).item())
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("p", [2, 3])
def test_d14_every_stage_reports_one_norm(pool, p):
    """DeepSpeed#7839: with a rate of 0 all configurations see the same samples, and must report the same norm."""
    plain = []
    for step in range(2):
        model = model_of()
        parts = [batch(rank, step) for rank in range(p)]
        model.loss(*(torch.cat(each) for each in zip(*parts, strict=True))).backward()
        plain.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    assert plain[0] != pytest.approx(plain[1], rel=1e-3)
    for seen in pool(p).run(norms):
        assert seen == pytest.approx(plain * 4, rel=1e-12)


def biased(group):
    """A row-parallel layer whose bias is in the hundreds, and its bias's gradient; by the plain layer's."""
    torch.manual_seed(0)
    plain = nn.Linear(7, 5).double()
    plain.bias.data = 100.0 * torch.arange(1, 6).double()
    cut = tensor.RowParallelLinear(copy.deepcopy(plain), group, False)
    into = tensor.ColumnParallelLinear(nn.Linear(3, 7).double(), tensor.window(7, group.size(), group.rank(), 0),
                                       cut.in_features)
    x = torch.randn(4, 3, dtype=torch.float64)
    (mine,) = enter(x, [into], group, False)
    y = cut(mine)
    whole = comm.all_gather(mine.detach().T.contiguous(), group).T[:, :7]
    expected = plain(whole)
    for out in (y, expected):
        (out * torch.arange(1, 6)).sum().backward()
    return (y - expected).abs().max().item(), (cut.bias.grad - plain.bias.grad).abs().max().item()


@pytest.mark.parametrize("p", [2, 3])
def test_t1_and_t2_a_row_parallel_bias_comes_once_with_all_of_its_gradient(pool, p):
    """text-generation-inference#1036: tp times. torchtitan#4332: bias / tp, forward right, the gradient 1/tp of it."""
    for output, gradient in pool(p).run(biased):
        assert output < 1e-12 and gradient < 1e-12
