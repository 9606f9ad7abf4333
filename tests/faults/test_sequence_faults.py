"""Faults of cut sequences that others have had (shared/FAULTS.md, Experts and sequence), each with its own check."""

import pytest
import torch
import torch.nn.functional as F

from shardlab import comm
from shardlab.model import KVCache, Transformer
from shardlab.model.attention import attend
from shardlab.parallel import context, data, grads, mesh, pipeline, ring, tensor, zero
from shardlab.parallel.loss import valid_tokens
from shardlab.parallel.zigzag import join, share
from shardlab.specs import Experts, ModelSpec
from shardlab.train import Batches, loop
from shardlab.train import text as manual

SIZES = dict(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=22, vocab=53, tied=True)
EXPERTS = Experts(routed=4, active=2, ffn=6)


def model_of(**sizes):
    """A model whose heads attend to some tokens more than to others."""
    torch.manual_seed(0)
    model = Transformer(ModelSpec(**(SIZES | sizes))).double()
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    return model


def batch(n, batch=2):
    tokens = torch.randint(0, 53, (batch, n), generator=torch.Generator().manual_seed(n))
    return tokens, tokens.roll(-1, 1).where(tokens % 5 > 0, -100)


def said(error, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def of_lengths(group):
    """(length, loss, logits, gradients): how far a cut sequence of each length is from the plain model's."""
    plain, cut = model_of(), context.cut(model_of(), group)
    data.replicate(cut, group)
    seen = []
    for n in range(1, 18):
        tokens, _ = batch(n)
        labels = tokens.roll(-1, 1)
        for model in (plain, cut):
            model.zero_grad()
        losses = plain.loss(tokens, labels), cut.loss(tokens, labels)
        for loss in losses:
            loss.backward()
        grads.finish(cut)
        with torch.no_grad():
            logits = (plain(tokens) - cut(tokens)).abs().max().item()
        pairs = zip(plain.parameters(), cut.parameters(), strict=True)
        seen.append((n, abs(comm.all_reduce(losses[1].detach(), group=group) - losses[0]).item(), logits,
                     max((p.grad - q.grad).abs().max().item() for p, q in pairs)))
    return seen


@pytest.mark.parametrize("p", [2, 3])
def test_x1_a_sequence_of_any_length_is_padded_and_the_padding_masked(pool, p):
    """EasyContext#47: 2,999 tokens over 4 ranks were chunks of unequal sizes, and backward failed. Here some ranks have
    padding alone."""
    for seen in pool(p).run(of_lengths):
        for n, *distances in seen:
            assert max(distances) < 1e-11, (n, distances)


def of_places(group):
    """With positions that are no plain count, labels that are missing and tokens that are not there: logits, loss, and
    how many tokens experts have seen."""
    plain, cut = model_of(experts=EXPERTS), context.cut(model_of(experts=EXPERTS), group)
    tokens, labels = batch(11)
    positions = torch.arange(22).view(2, 11) * 3 % 17
    real = torch.arange(11) < torch.tensor([[11], [6]])
    routed, theirs = [], []
    with torch.no_grad():
        turned = plain(tokens, positions), cut(tokens, positions)
        counted = plain(tokens), cut(tokens)
        losses = plain.loss(tokens, labels, None, theirs, real), cut.loss(tokens, labels, None, routed, real)
    loads = [torch.stack([each.load for each in of]) for of in (routed, theirs)]
    assert (turned[0] - counted[0]).abs().max() > 0.1  # or RoPE would tell nothing
    return [(a - b).abs().max().item() for a, b in (turned, counted)] + [
        abs(comm.all_reduce(losses[1], group=group) - losses[0]).item(),
        (comm.all_reduce(loads[0], group=group) - loads[1]).abs().max().item()]


@pytest.mark.parametrize("p", [2, 3])
def test_x2_tokens_labels_positions_and_mask_are_in_one_order(pool, p):
    """long-context-attention#53, slime#73: the data in one zigzag and attention, positions or labels in another."""
    for seen in pool(p).run(of_places):
        assert max(seen) < 1e-11, seen


def ring_gradients(group, causal):
    n, generator = 12 * group.size(), torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, n, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    whole = [x.clone().requires_grad_() for x in given]
    out = attend(*whole) if causal else F.scaled_dot_product_attention(*whole, enable_gqa=True)
    out.square().sum().backward()
    own = [share(x, group, 0, 2).requires_grad_() for x in given]
    ring.attend(*own, group=group, causal=causal).square().sum().backward()
    return [(join(x.grad, group, n, 2) - y.grad).abs().max().item() for x, y in zip(own, whole, strict=True)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_x4_backward_rotates_the_keys_and_values_that_it_reads(pool, p, causal):
    """diffusers#14265: backward used the first block in each step; forward was right, and nothing was said."""
    for seen in pool(p).run(ring_gradients, causal):
        assert max(seen) < 1e-11, seen


def rounded(group, n=64):
    """The errors of out, dq, dk and dv of bf16 inputs, over those of the exact numbers rounded to bf16."""
    generator = torch.Generator().manual_seed(0)
    *given, grad = (torch.randn(1, heads, n, 16, generator=generator).bfloat16() for heads in (4, 2, 2, 4))
    whole = [x.double().requires_grad_() for x in given]
    expected = attend(*whole)
    expected.backward(grad.double())
    own = [share(x, group, 0, 2).requires_grad_() for x in given]
    out = ring.attend(*own, group=group)
    out.backward(share(grad, group, 0, 2))
    assert out.dtype == torch.bfloat16 and all(x.grad.dtype == torch.bfloat16 for x in own)
    ours = [join(x, group, n, 2) for x in (out.detach(), *(x.grad for x in own))]
    return [((a - b).square().sum() / (b.bfloat16() - b).square().sum()).sqrt().item()
            for a, b in zip(ours, (expected.detach(), *(x.grad for x in whole)), strict=True)]


@pytest.mark.parametrize("p", [1, 4, pytest.param(8, marks=pytest.mark.more)])
def test_x5_the_error_of_bf16_does_not_grow_with_the_ring(pool, p):
    """ring-flash-attention#42, #22: partial results were kept in bf16, and "loss can look quite reasonable". Here it is
    that of the last rounding, and of the output's, which backward starts from."""
    for seen in pool(p).run(rounded):
        assert all(0.99 < error < 1.25 for error in seen), seen  # so that none is twice that of a single rank


def refused(group):
    """What is said of each thing that a cut sequence can't do."""
    cut = context.cut(model_of(), group)
    tokens, labels = batch(7)
    texts = {
        "generate": said(ValueError, cut.generate, tokens, 3),
        "cache": said(ValueError, cut, tokens, None, KVCache(2, 9)),
        "hidden": said(ValueError, cut.hidden, tokens, cache=KVCache(2, 9)),
        "labels": said(ValueError, cut.loss, tokens, labels[:, 1:]),
        "twice": said(ValueError, context.cut, cut, group),
        "tensor": said(ValueError, tensor.cut, cut, group),
        "of stages": said(ValueError, context.cut, pipeline.cut(model_of(), group), group),
        "replicated": said(ValueError, context.cut, data.replicate(model_of(), group), group),
    }

    class Windowed(Transformer):
        """Attends in another way, for all that is known."""

    texts["other"] = said(ValueError, context.cut, Windowed(ModelSpec(**SIZES)), group)
    odd = model_of()
    del odd.layers[1].self_attn.attend
    texts["attention"] = said(ValueError, context.cut, odd, group)
    return texts


def test_x7_what_a_cut_sequence_can_t_do_is_refused(pool):
    """sglang#33353: paths without ring support took cp > 1 and went wrong."""
    for texts in pool(2).run(refused):
        assert all("a cut sequence has no KV cache: generate(…, cached=False)" in texts[name]
                   for name in ("generate", "cache", "hidden"))
        assert texts["labels"] == "every token has a label: tokens (2, 7), labels (2, 6)"
        assert "cut already" in texts["twice"] and "before context.cut" in texts["tensor"]
        assert "before pipeline.cut" in texts["of stages"]
        assert "cut the sequence first" in texts["replicated"] and "Windowed is no plain" in texts["other"]
        assert texts["attention"].startswith("Attention does not say where its heads attend")


def without_axis(group):
    """Gradients that nothing sums, those of one rank's tokens; and those of another axis's ranks."""
    axes = mesh.build(dp=2, cp=2)
    dp, cp = axes.get_group("dp"), axes.get_group("cp")
    texts = []
    for replicate in (lambda model: model, lambda model: data.replicate(model, dp)):
        model = replicate(context.cut(model_of(), cp))
        model.loss(*batch(7), valid=8).backward()
        texts += [said(RuntimeError, grads.finish, model), said(RuntimeError, grads.clip_grad_norm_, model, 1.0)]
    return texts


def test_x7_parts_of_gradients_that_no_data_axis_sums_are_refused(pool):
    for rank, (none, none_either, other, other_either) in enumerate(pool(4).run(without_axis)):
        pair = [0, 1] if rank < 2 else [2, 3]
        assert none.startswith(f"the sequence is cut over ranks {pair}") and "there is no data axis" in none
        assert f"the data axis has ranks {[rank % 2, rank % 2 + 2]}" in other and "data.replicate(model, dp_cp)" in none
        assert none_either == none and other_either == other


def counts(group, stage):
    """sglang#33327: the labels of ranks that share a sequence are the same ones, and must count once."""
    axes, together = mesh.build(dp=2, cp=2), mesh.build(data=4).get_group("data")
    dp, cp = axes.get_group("dp"), axes.get_group("cp")
    model = context.cut(model_of(), cp)
    if stage:
        zero.shard(model, torch.optim.SGD(model.parameters()), together, stage)
    else:
        data.replicate(model, together)
    tokens, labels = batch(7 + 2 * dp.rank())
    with torch.no_grad():
        mean = comm.all_reduce(model.loss(tokens, labels), group=cp).item()
    text = said(ValueError, model.loss, tokens, labels)
    valid = valid_tokens([labels], dp)
    model.loss(tokens, labels, valid).backward()
    grads.finish(model)
    return mean, text, valid, grads.norm(model).item()


@pytest.mark.parametrize("stage", [0, 3])
def test_x7_labels_of_a_sequence_count_once(pool, stage):
    plain, parts = model_of(), [batch(7), batch(9)]
    valid = sum(int((labels != -100).sum()) for _, labels in parts)
    for part in parts:
        plain.loss(*part, valid).backward()
    for rank, (mean, text, counted, norm) in enumerate(pool(4).run(counts, stage)):
        assert mean == pytest.approx(plain.loss(*parts[rank // 2]).item(), abs=1e-12) and counted == valid
        assert "over 4 ranks, 2 of which share a sequence" in text and "loss.valid_tokens([labels], dp)" in text
        assert norm == pytest.approx(grads.norm(plain).item(), abs=1e-12)


def trained(group, cp):
    """Two steps of the loop: (loss, norm, labels) each, and the weights' sum."""
    axes, together = mesh.build(dp=4 // cp, cp=cp), mesh.build(data=4).get_group("data")
    model = context.cut(model_of(vocab=256), axes.get_group("cp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, together, 1)
    batches = Batches(manual()[:200], seq=7, batch=4, accumulation=2)
    done = loop.train(model, optimizer, batches, range(2), together, progress=False)
    weights = sum(p.detach().sum().item() for p in model.parameters())
    return [value for step in done for value in (step.loss, step.norm, step.tokens)], weights


def test_x7_the_loop_counts_labels_of_a_shared_sequence_once(pool):
    """However the ranks share a batch, steps come to the same."""
    one = pool(4).run(trained, 1)[0]
    for cp in (2, 4):
        for seen in pool(4).run(trained, cp):
            assert seen[0] == pytest.approx(one[0], rel=1e-10) and seen[1] == pytest.approx(one[1], rel=1e-10)


def crossed(group):
    axes, together = mesh.build(cp=2, dp=2), mesh.build(data=4).get_group("data")
    model = data.replicate(context.cut(model_of(), axes.get_group("cp")), together)
    return said(ValueError, loop.train, model, torch.optim.SGD(model.parameters()), None, (), together)


def test_x7_the_loop_knows_which_ranks_share_a_sequence(pool):
    assert all("ranks [0, 2] share a sequence" in text for text in pool(4).run(crossed)[::2])


def others(group, what):
    """In debug mode: one rank is given other tokens, or other labels."""
    cut = context.cut(model_of(), group)
    tokens, labels = batch(7)
    with comm.use(debug=True):
        cut.loss(tokens, labels, 8).backward()  # and what is the same is let through
        given = [tokens, labels]
        given[what] = given[what] + group.rank()
        return said(ValueError, cut.loss, *given)


@pytest.mark.parametrize("what", [0, 1], ids=["tokens", "labels"])
def test_x7_ranks_of_a_sequence_that_are_given_different_ones_are_told_in_debug_mode(pool, what):
    for text in pool(2).run(others, what):
        assert text.startswith("rank 1 was given a sequence otherwise than rank 0")
