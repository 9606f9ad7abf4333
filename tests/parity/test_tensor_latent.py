"""Latent attention cut by heads against the plain twin, in float64, on every rank, tokens cut too or not.

What breaks first: the latents' gradients, to which each rank's heads give a part, and so those of all that leads down
to them; the key that the heads share; with sequence parallelism what each rank computes for its own tokens only.
"""

import pytest
import torch
from covering import pairs_first
from twins import SIZES, batch, check, check_float32, compare, distances, twins

from shardlab import comm
from shardlab.model import KVCache
from shardlab.parallel import deferred, grads
from shardlab.specs import Latent, RopeScaling

LATENT = dict(kv_rank=10, rope_dim=4, nope_dim=6, value_dim=5, q_rank=14)
MLA = dict(latent=Latent(**LATENT))
YARN = RopeScaling("yarn", 4.0, 4, mscale=1.0, mscale_all_dim=0.7)
BIASES = dict(attention_bias=True, output_bias=True, mlp_bias=True)
STRAIGHT = dict(latent=Latent(**LATENT | dict(q_rank=None)))
WIDE = dict(latent=Latent(**LATENT | dict(value_dim=13, interleaved=False)), rope_scaling=YARN)
CASES = {
    "latents": (MLA, (2, 3, 4)),
    "tied, with biases": (MLA | BIASES | dict(tied=True), (2, 3, 4)),
    "straight queries": (STRAIGHT, (2, 3, 4)),
    "wide values, halves turned, yarn": (WIDE, (2, 4)),
    "6 heads": (MLA | dict(heads=6, kv_heads=6), (3,)),
}
EVERYTHING = MLA | BIASES | dict(tied=True)
DOWN = [f"layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa",
                                                         "kv_a_layernorm")]
FROZEN = {"the way up": ("layers.0.self_attn.kv_b_proj.weight", "layers.1.self_attn.q_b_proj.weight"),
          "one way down": ("layers.1.self_attn.kv_a_proj_with_mqa.weight", "layers.0.self_attn.q_a_layernorm.weight"),
          "all that is before the way up": ("embed_tokens.weight", "layers.0.input_layernorm.weight", *DOWN)}
MODES = ["keep", "again"]
RUNS = [pytest.param(spec, p, id=f"{name}-{p}") for name, (spec, worlds) in CASES.items() for p in worlds]
FEWER = [pytest.param(spec, p, id=f"{name}-{p}", marks=[pytest.mark.more] * (p < worlds[-1]))
         for name, (spec, worlds) in CASES.items() for p in worlds]


@pytest.mark.parametrize("sizes,p", RUNS)
def test_a_cut_model_is_the_plain_one(pool, sizes, p):
    check(pool(p).run(compare, sizes, steps=5 if sizes is MLA else 2))


@pytest.mark.more
@pytest.mark.parametrize("sizes,p", RUNS)
def test_by_adamw_too(pool, sizes, p):
    check(pool(p).run(compare, sizes, optimizer="adamw"))


@pytest.mark.parametrize("mode,optimizer", [("keep", "sgd"), ("again", "adamw")])
@pytest.mark.parametrize("sizes,p", FEWER)
def test_cut_by_tokens_too(pool, sizes, p, mode, optimizer):
    """Of 11 tokens, which no number of ranks divides."""
    check(pool(p).run(compare, sizes, optimizer=optimizer, mode=mode, shape=(1, 11), steps=5 if sizes is MLA else 2))


@pytest.mark.parametrize("mode", [False, *MODES])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 5)], ids=str)
def test_few_tokens(pool, shape, mode):
    check(pool(4).run(compare, EVERYTHING, mode=mode, shape=shape))


@pytest.mark.parametrize("p,mode,recompute", [
    (1, False, "full"), *pairs_first([3, 4], [False, *MODES], ["selective", "full"])])
def test_blocks_computed_again(pool, p, mode, recompute):
    check(pool(p).run(compare, EVERYTHING, (), "adamw", 2, recompute, mode, shape=(2, 5)))


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("mode", [False, *MODES])
def test_frozen_weights_stay_frozen_and_the_rest_is_trained(pool, frozen, mode):
    check(pool(2).run(compare, MLA, frozen, mode=mode, steps=2))


@pytest.mark.parametrize("mode", [False, *MODES])
def test_in_float32_through_shared_memory(pool, mode):
    check_float32(pool(4).run(compare, EVERYTHING, optimizer="adamw", mode=mode, dtype=torch.float32, transport="shm"))


def put_off(group, mode, recompute):
    plain, cut = twins(EVERYTHING, group, recompute=recompute, mode=mode)
    tokens, labels = batch(101, shape=(2, 5))
    plain.loss(tokens, labels).backward()
    later = deferred.Deferred()
    with deferred.deferring(later):
        cut.loss(tokens, labels).backward()
    assert all(p.grad is None for name, p in cut.named_parameters() if ".self_attn." in name and p.dim() == 2)
    later.compute()
    grads.finish(cut)
    return distances(plain, cut, lambda p: p.grad)


@pytest.mark.parametrize("mode,recompute", [(False, None), ("keep", "selective"), ("again", "full")])
def test_weight_gradients_may_be_put_off(pool, mode, recompute):
    assert max(pool(2).run(put_off, mode, recompute)) < 1e-10


def whole(group, sizes, mode):
    """What callers get is whole: hidden states with their gradient, logits, and text with and without a cache."""
    plain, cut = twins(sizes, group, mode=mode)
    tokens, _ = batch(101, shape=(3, 5))
    weight = torch.linspace(-1, 1, 24, dtype=torch.float64)
    for model in (plain, cut):
        (model.hidden(tokens) * weight).sum().backward()
    grads.finish(cut)
    distance = distances(plain, cut, lambda p: p.grad)
    with torch.no_grad():
        cache = KVCache(2, 9)
        parts = [cut(part, cache=cache) for part in (tokens[:, :1], tokens[:, 1:4], tokens[:, 4:])]
        same = [torch.allclose(torch.cat(parts, 1), plain(tokens), atol=1e-11, rtol=0)]
    texts = [model.generate(tokens, 6, cached=cached) for model in (plain, cut) for cached in (True, False)]
    return distance, same + [torch.equal(text, texts[0]) for text in texts], cache.nbytes


@pytest.mark.parametrize("sizes,mode", [
    pytest.param(sizes, mode, id=f"{name}-{mode}", marks=[pytest.mark.more] * (i != j))
    for i, (name, sizes) in enumerate({"straight": STRAIGHT, "wide": WIDE, "latents": MLA}.items())
    for j, mode in enumerate([False, *MODES])])
def test_what_the_caller_gets_is_whole_and_so_is_the_cache(pool, sizes, mode):
    """A latent serves all heads: each rank's cache holds 2 layers × 3 sequences × 9 tokens of it, as a single one's."""
    for distance, same, held in pool(4).run(whole, sizes, mode):
        assert distance < 1e-10 and all(same), same
        assert held == 2 * 3 * 9 * (10 + 4) * 8


def calls(group, sizes, mode):
    """(phase, op, numbers a token) of a layer's collectives, of 12 tokens, besides those of the blocks' ends."""
    _, cut = twins(sizes | dict(layers=1), group, mode=mode)
    tokens, labels = batch(101, shape=(2, 6))
    with comm.record() as ledger:
        cut.loss(tokens, labels).backward()
    rows = {"all_gather": 12 // group.size()}
    numbers = [(e.phase, e.op, e.payload / 8 / rows.get(e.op, 12)) for e in ledger.entries]
    return [each for each in numbers if each[2] in (14, 10, 4)]


def test_what_travels_is_latents_and_not_the_stream(pool):
    """q_rank, kv_rank and rope_dim numbers a token, where the stream has 24: backward, and forward too if tokens are
    cut; without a latent of queries the stream itself is entered."""
    backward = [("backward", "all_reduce", n) for n in (4, 10, 14)]
    forward = [("forward", "all_gather", n) for n in (4, 10, 14)]
    summed = [("backward", "reduce_scatter", n) for n in (4, 10, 14)]
    again = [("backward", "all_gather", n) for n in (10, 14)]  # no weights take in the key
    expected = {False: backward, "keep": forward + summed, "again": forward + summed + again}
    for p in (2, 3):
        for mode, entries in expected.items():
            assert sorted(pool(p).run(calls, MLA, mode)[0]) == sorted(entries), (p, mode)
    assert sorted(pool(2).run(calls, STRAIGHT, False)[0]) == sorted(backward[:2])
    assert SIZES["hidden"] == 24
