"""Latent attention by itself: what its cache holds and its core keeps; how positions turn; and chunks of a prompt.

That its numbers are those of `transformers` is in `test_transformer`, for every kind of `checkpoints`.
"""

import checkpoints
import pytest
import torch
from measure import saved_bytes

from shardlab.model import KVCache, Transformer, initialise
from shardlab.model.attention import attend
from shardlab.model.latent import softmax_scale
from shardlab.specs import Latent, ModelSpec, RopeScaling

LATENT = dict(kv_rank=10, rope_dim=4, nope_dim=6, value_dim=5, q_rank=14)
SIZES = dict(hidden=24, layers=3, heads=6, kv_heads=6, head_dim=10, ffn=30, vocab=37)
KINDS = {"latents": {}, "straight queries": dict(q_rank=None), "halves turned": dict(interleaved=False),
         "wide values": dict(value_dim=13)}


def model(changes=None, **more):
    return initialise(Transformer(ModelSpec(**SIZES, **more, latent=Latent(**LATENT | (changes or {})))).double(),
                      std=0.3)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_the_cache_holds_a_latent_and_a_key_a_token_and_a_prompt_may_come_in_parts(kind):
    whole, tokens = model(kind), checkpoints.prompt(37, seq=11)
    cache = KVCache(3, capacity=11)
    parts = [whole(part, cache=cache) for part in tokens.split([1, 5, 4, 1], 1)]
    assert (torch.cat(parts, 1) - whole(tokens)).abs().max() < 1e-12
    assert cache.length == 11 and cache.nbytes == 3 * 2 * 11 * (10 + 4) * 8  # layers, sequences, tokens, numbers, bytes
    for layer in cache.layers:
        assert layer.keys.shape == (2, 1, 11, 10) and layer.values.shape == (2, 1, 11, 4)


def test_the_cache_keeps_no_gradients():
    for name in ("kv_a_proj_with_mqa", "kv_a_layernorm"):
        trained = model()
        trained.requires_grad_(False)
        trained.layers[-1].self_attn.get_submodule(name).requires_grad_()
        with pytest.raises(ValueError, match="no gradients"):
            trained(checkpoints.prompt(37, seq=4), cache=KVCache(3, 4))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_positions_are_told_apart_and_only_their_distances_count(kind):
    whole, tokens, positions = model(kind), checkpoints.prompt(37, seq=6), torch.arange(6)
    logits = whole(tokens)
    assert (whole(tokens, positions + 5) - logits).abs().max() < 1e-4  # angles are float32
    assert (whole(tokens, positions * 2) - logits).abs().max() > 1e-2


def test_no_sequence_at_all_gives_gradients_of_zero():
    """Which a rank without a token needs, to take part in what the others do."""
    whole = model()
    whole(torch.empty(0, 5, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in whole.parameters())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_gradients_are_those_of_differences(kind):
    block = model(kind).layers[0]
    x = torch.randn(1, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cos, sin = (torch.linspace(-1, 1, 12, dtype=torch.float64).view(1, 1, 3, 4) * sign for sign in (1, -0.5))
    assert torch.autograd.gradcheck(lambda x: block(x, cos, sin), x, fast_mode=True)


@pytest.mark.parametrize("recompute,cores", [("selective", True), ("full", False)])
def test_what_is_computed_again_is_the_core_or_the_block(recompute, cores):
    """Bytes kept, and the same gradients to the last bit."""
    kept, gradients = [], []
    for mode in (None, recompute):
        some = initialise(Transformer(ModelSpec(**SIZES, latent=Latent(**LATENT)), mode))
        bytes_, loss = saved_bytes(some, lambda some=some: some.loss(*2 * [checkpoints.prompt(37, seq=40)]))
        loss.backward()
        kept.append(bytes_)
        gradients.append([p.grad for p in some.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    # for each head queries, keys, values and output, all as long as queries, and a sum of exponentials: 4 · 10 + 1;
    # but computed again, what goes in: queries, what the latent is projected up to, and for all heads the shared key
    core = 3 * 2 * 40 * 4 * (6 * (4 * 10 + 1) - 6 * (10 + 11) - 4)
    assert kept[0] - kept[1] == core if cores else kept[0] > 5 * kept[1]


@pytest.mark.parametrize("sizes", [(24, 16), (16, 24), (16, 16)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_heads_of_two_sizes_keep_no_scores(sizes, scale):
    d, values = sizes
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 300, d, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    v = torch.randn(1, 2, 300, values, dtype=torch.float64, generator=generator).requires_grad_()
    scores = (q @ k.mT * (scale or d**-0.5)).masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ v
    kept, y = saved_bytes(torch.nn.Identity(), lambda: attend(q, k, v, scale))
    assert y.shape == (1, 2, 300, values) and kept < 2 * 300 * 8 * (5 * 24)  # scores would be 300 numbers a token
    of = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    for a, b in zip((y, *torch.autograd.grad(y, (q, k, v), of)),
                    (expected, *torch.autograd.grad(expected, (q, k, v), of)), strict=True):
        assert (a - b).abs().max() < 1e-12


def test_the_scale_is_deepseeks():
    """DeepSeek-V3's: 192 numbers a query, a context stretched 40 times, mscale_all_dim 1: 1/√192 · 1.3689² (its
    inference/model.py with its config)."""
    sizes = SIZES | dict(latent=Latent(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128))
    plain = softmax_scale(ModelSpec(**sizes))
    assert plain == pytest.approx(192**-0.5)
    stretched = RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert softmax_scale(ModelSpec(**sizes, rope_scaling=stretched)) == pytest.approx(plain * 1.36888794**2)
    for scaling in (RopeScaling("yarn", 40.0, 4096), RopeScaling("yarn", 0.5, 4096, mscale_all_dim=1.0)):
        assert softmax_scale(ModelSpec(**sizes, rope_scaling=scaling)) == plain
