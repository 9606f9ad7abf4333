"""A cut sequence against the plain model, in float64: loss, logits, gradients, norm, and parameters after steps."""

import pytest
import torch
from contexts import axes, batch, check, compare, twins
from replicas import FROZEN, STAGES, build, distance

from shardlab import comm
from shardlab.model import Rules, Transformer
from shardlab.model.dropout import Dropout, dropped
from shardlab.model.head import cross_entropy
from shardlab.parallel import context, data, grads, rng, tensor
from shardlab.parallel.zigzag import join
from shardlab.specs import Experts, Latent, ModelSpec

EXPERTS = Experts(routed=4, active=2, ffn=6, shared=1, first_dense=1)
LATENT = Latent(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3)
KINDS = {
    "untied, qk-norm": dict(tied=False, qk_norm=True),
    "one KV head": dict(kv_heads=1, frozen=("embed_tokens.weight", *FROZEN)),
    "a head for each": dict(kv_heads=4, frozen=tuple(f"layers.0.self_attn.{name}_proj.weight" for name in "qkv")),
    "latent": dict(latent=LATENT, kv_heads=4),
    "experts": dict(experts=EXPERTS, frozen=("layers.1.self_attn.o_proj.bias",), mlp_bias=False),
}


@pytest.mark.parametrize("p,optimizer", [(2, "sgd"), (3, "adamw"), (4, "sgd"), (4, "adamw")])
def test_a_cut_sequence_is_the_plain_model(pool, p, optimizer):
    check(pool(p).run(compare, optimizer=optimizer, steps=5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.more)])
def test_kinds_of_models(pool, p, kind):
    check(pool(p).run(compare, steps=2, **KINDS[kind]))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("p", [2, 3])
def test_what_is_computed_again_goes_round_again(pool, p, recompute):
    check(pool(p).run(compare, steps=2, recompute=recompute, transport=("shm", "backend")[p % 2]))


@pytest.mark.parametrize("mode", [False, "keep", "again"])
def test_with_a_tensor_axis(pool, mode):
    check(pool(4).run(compare, tp=2, mode=mode, steps=2, qk_norm=True))


def test_latents_with_a_tensor_axis(pool):
    check(pool(4).run(compare, tp=2, mode="keep", steps=2, **KINDS["latent"]))


@pytest.mark.parametrize("etp", [2, 1])
def test_experts_with_a_tensor_axis(pool, etp):
    check(pool(4).run(compare, tp=2, etp=etp, steps=2, **KINDS["experts"]))


@pytest.mark.parametrize("stage", STAGES)
def test_with_a_data_axis(pool, stage):
    check(pool(4).run(compare, dp=2, stage=stage))


@pytest.mark.more
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_a_data_axis_and_recomputation(pool, stage, recompute):
    check(pool(4).run(compare, dp=2, stage=stage, recompute=recompute, transport="shm", tied=False))


@pytest.mark.parametrize("p,dp", [(2, 1), (4, 2)])
def test_with_experts_over_the_data_axis(pool, p, dp):
    """Whose ranks have other tokens of one sequence, and of others. Padding goes to none."""
    check(pool(p).run(compare, dp=dp, spread=True, steps=3, **KINDS["experts"]))


def balanced(group, seq=9):
    """With a coefficient, what the loss has more than without: each rank's balance by its share of the tokens."""
    tokens, labels = (each[0, 0] for each in batch(1, 0, seq))
    more, expected = [], 0.0
    for valid in (None, 11):
        losses = []
        for balance in (0.5, 0.0):
            routed = []
            model = Transformer(ModelSpec(**vars(build(0, experts=EXPERTS).spec)), rules=Rules(balance=balance))
            model.load_state_dict(build(0, experts=EXPERTS).state_dict(), strict=False)
            losses.append(context.cut(model.double(), group).loss(tokens, labels, valid, routed))
            if balance:
                expected = 0.5 * sum(each.balance * each.tokens for each in routed).item()
        more.append((losses[0] - losses[1]).item() * (tokens.numel() if valid is None else valid) - expected)
    return more, routed[0].tokens


def test_balance_is_weighted_by_each_ranks_tokens(pool):
    outcomes = pool(2).run(balanced)
    assert sum(tokens for _, tokens in outcomes) == 18 and outcomes[0][1] != outcomes[1][1]
    assert all(abs(each) < 1e-6 for more, _ in outcomes for each in more)


def through(group, seq):
    """What callers get is whole: hidden states and logits, their gradients, and text without a cache."""
    (plain, _), (twin, _), _ = twins(group, optimizer="sgd")
    tokens, labels = (each[0, 0] for each in batch(1, 0, seq))
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64)
    seen = []
    for result in (lambda model: (model.hidden(tokens) * weight).sum() ** 2,
                   lambda model: cross_entropy(model(tokens), labels) * 3):
        results = [result(model) for model in (plain, twin)]
        for each in results:
            each.backward()
        grads.finish(twin)
        seen.append(abs(results[0] - results[1]).item() / abs(results[0]).item())
        seen.append(distance(*({name: p.grad for name, p in model.named_parameters()} for model in (plain, twin))))
        for model in (plain, twin):
            model.zero_grad()
    texts = [model.generate(tokens, 5, cached=False) for model in (plain, twin)]
    return max(seen), tuple(twin(tokens).shape), torch.equal(*texts)


@pytest.mark.parametrize("p", [2, 3])
def test_what_the_caller_gets_is_whole_and_gradients_flow_back_through_it(pool, p):
    for distance_, shape, same in pool(p).run(through, 7):
        assert distance_ < 1e-10 and shape == (2, 7, 53) and same


P = 0.3


class Given(Dropout):
    """Drops what it is told."""

    def __init__(self, mask):
        super().__init__(P)
        self.mask = mask

    def draw(self):
        return 0

    def forward(self, x, seed):
        return x.masked_fill(self.mask.bool().view(x.shape), 0) / (1 - P)


def random(group, recompute, seq=9):
    """The plain model with all ranks' masks put together, by the cut one."""
    spec = build(0).spec
    plain, twin = (Transformer(spec, again, P).double() for again in (None, recompute))
    twin.load_state_dict(plain.state_dict())
    data.replicate(context.cut(twin, group), group)
    plain.load_state_dict(twin.state_dict())
    rng.seed(twin, 5)
    masks = {}
    layers = {name: module for name, module in twin.named_modules() if isinstance(module, Dropout)}
    hooks = [module.register_forward_hook(
        lambda _, args, __, name=name: masks.setdefault(name, []).append(dropped(args[0].shape, P, args[1], "cpu")))
        for name, module in layers.items()]
    tokens, labels = (each[0, 0] for each in batch(1, 0, seq))
    loss = twin.loss(tokens, labels, 10)
    for hook in hooks:
        hook.remove()
    for name, drawn in masks.items():
        whole = [join(mask.view(2, -1, mask.shape[-1]).double(), group, seq) for mask in drawn]
        every = comm.all_gather(drawn[0].unsqueeze(0), group)
        assert not torch.equal(every[0], every[1])
        if len(whole) == 1:
            plain.set_submodule(name, Given(whole[0]))
        else:  # the stream's, after attention and after the feed-forward block
            plain.set_submodule(name, Twice(whole))
    truth = plain.loss(tokens, labels, 10)
    for each in (loss, truth):
        each.backward()
    grads.finish(twin)
    apart = distance(*({name: p.grad for name, p in model.named_parameters()} for model in (plain, twin)))
    return abs(comm.all_reduce(loss.detach(), group=group) - truth).item(), apart


class Twice(Given):
    """One mask after the other."""

    def forward(self, x, seed):
        mask, *self.mask = self.mask
        return Given(mask).forward(x, seed)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_each_rank_drops_numbers_of_its_own_and_the_same_when_it_computes_again(pool, recompute):
    for seen in pool(2).run(random, recompute):
        assert max(seen) < 1e-10


def draws(group):
    """Seeds of a layer's dropouts, with a tensor axis too."""
    _, cp, tp, _ = axes(1, 2, 2)
    model = Transformer(ModelSpec(**vars(build(0).spec)), dropout=P)
    context.cut(tensor.cut(model, tp), cp)
    rng.seed(model, 3)
    return model.layers[0].self_attn.dropout.draw(), model.layers[0].dropout.draw(), cp.rank()


def test_streams_differ_by_tokens_and_by_heads(pool):
    of_heads, of_stream, coordinates = zip(*pool(4).run(draws), strict=True)
    assert len(set(of_heads)) == 4
    assert len({*zip(of_stream, coordinates, strict=True)}) == len(set(of_stream)) == 2


def test_one_rank_is_the_plain_model(pool):
    def alone(group):
        plain = build(0)
        with comm.record() as ledger:
            cut = context.cut(plain, group)
            cut.loss(*(each[0, 0] for each in batch(1, 0, 5))).backward()
            grads.finish(cut)
        return cut is plain, type(cut).__name__, hasattr(cut, "context"), len(ledger.entries)

    assert pool(1).run(alone) == [(True, "Transformer", False, 0)]
