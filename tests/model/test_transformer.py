"""The plain model against `transformers`, on the same weights: logits, loss, generation; and its own promises."""

import subprocess
import sys

import checkpoints
import pytest
import torch

from shardlab.model import KVCache, Transformer, checkpoint, initialise
from shardlab.specs import ModelSpec

KINDS = list(checkpoints.KINDS)
SIZES = dict(hidden=24, layers=2, heads=6, kv_heads=3, head_dim=4, ffn=30, vocab=37)
SPEC = ModelSpec(**SIZES, qk_norm=True, attention_bias=True)


def distance(a, b):
    """The largest distance between two tensors, over the largest of the second."""
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_transformers(tiny, kind):
    ours, theirs = checkpoint.from_folder(tiny(kind)), checkpoints.oracle(tiny(kind))
    tokens = checkpoints.prompt(ours.spec.vocab, seq=100)
    assert distance(ours(tokens), theirs(tokens).logits) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation_is_that_of_transformers_with_a_cache_and_without(tiny, kind):
    ours, theirs = checkpoint.from_folder(tiny(kind)), checkpoints.oracle(tiny(kind))
    tokens = checkpoints.prompt(ours.spec.vocab, seq=9)
    expected = theirs.generate(tokens, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(ours.generate(tokens, 16), expected)
    assert torch.equal(ours.generate(tokens, 16, cached=False), expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3-tied", "mixtral", "qwen3_moe", "deepseek",
                                  "deepseek, straight queries", "deepseek, yarn"])
def test_loss_and_gradients_are_those_of_transformers(tiny, kind):
    ours, theirs = checkpoint.from_folder(tiny(kind)), checkpoints.oracle(tiny(kind))
    tokens = checkpoints.prompt(ours.spec.vocab)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, 3:7] = -100
    loss, expected = ours.loss(tokens, labels), theirs(tokens, shift_labels=labels, labels=labels).loss
    assert abs(loss - expected).item() < 1e-6 * expected.item()
    loss.backward()
    expected.backward()
    gradients = checkpoints.apart({name: p.grad for name, p in theirs.named_parameters()})
    trained = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    largest = max(g.abs().max() for g in gradients.values())
    assert gradients.keys() == trained.keys()
    for name, parameter in trained.items():
        assert (parameter.grad - gradients[name]).abs().max() < 1e-5 * largest, name


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_are_those_of_the_spec_and_of_transformers(tiny, kind):
    ours, theirs = checkpoint.from_folder(tiny(kind)), checkpoints.oracle(tiny(kind))
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    assert shapes == {tensor.name: tensor.shape for tensor in ours.spec.tensors()}
    assert checkpoints.apart(theirs.state_dict()).keys() == ours.state_dict().keys()
    assert sum(p.numel() for p in ours.parameters()) == ours.spec.total


def test_float64_agrees_with_float32_and_its_gradients_with_differences():
    model = initialise(Transformer(SPEC).double(), std=0.3)
    tokens = checkpoints.prompt(SPEC.vocab, seq=7)
    single = initialise(Transformer(SPEC), std=0.3)
    assert distance(single(tokens).double(), model(tokens)) < 1e-5
    assert model.loss(tokens, tokens).dtype == torch.float64
    x = model.embed_tokens(tokens)[:1, :3].detach().requires_grad_()
    cos, sin = (torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x: model.layers[0](x, cos, sin), x, fast_mode=True)


@torch.no_grad()
def test_a_prompt_in_parts_gives_the_logits_of_the_whole():
    """Chunks of 1, several and 1 again: queries that start later than the keys need their own mask."""
    model = initialise(Transformer(SPEC).double(), std=0.3)
    tokens = checkpoints.prompt(SPEC.vocab, seq=11)
    cache = KVCache(SPEC.layers, capacity=11)
    parts = [model(part, cache=cache) for part in tokens.split([1, 5, 4, 1], 1)]
    assert distance(torch.cat(parts, 1), model(tokens)) < 1e-12
    assert cache.length == 11 and cache.nbytes == 2 * SPEC.layers * 2 * SPEC.kv_heads * 11 * SPEC.head_dim * 8


@torch.no_grad()
def test_positions_may_differ_by_sequence_and_only_their_distances_count():
    model = initialise(Transformer(SPEC).double(), std=0.3)
    tokens = checkpoints.prompt(SPEC.vocab, seq=6)
    positions = torch.arange(6)
    assert torch.equal(model(tokens, positions.expand(2, 6)), model(tokens))
    moved = model(tokens, torch.stack((positions, positions * 2)))
    assert torch.equal(moved[0], model(tokens)[0]) and distance(moved[1], model(tokens)[1]) > 1e-3
    assert distance(model(tokens, positions + 5), model(tokens)) < 1e-5  # angles are float32


def test_a_cache_that_is_too_small_or_of_another_batch_or_asked_for_gradients_says_so():
    model = initialise(Transformer(SPEC))
    tokens = checkpoints.prompt(SPEC.vocab, seq=4)
    with pytest.raises(ValueError, match="no gradients"):
        model(tokens, cache=KVCache(SPEC.layers, 4))
    model.requires_grad_(False).layers[-1].self_attn.v_proj.requires_grad_()  # values alone
    with pytest.raises(ValueError, match="no gradients"):
        model(tokens, cache=KVCache(SPEC.layers, 4))
    with torch.no_grad():
        cache = KVCache(SPEC.layers, 6)
        model(tokens, cache=cache)
        with pytest.raises(ValueError, match="room for 6 tokens, 4 taken: 4 don't fit"):
            model(tokens, cache=cache)
        with pytest.raises(ValueError, match="batch of 2, not of 1"):
            model(tokens[:1, :1], cache=cache)


def test_generation_stops_when_every_sequence_has_made_the_stop_token():
    model = initialise(Transformer(SPEC), std=0.3)
    tokens = checkpoints.prompt(SPEC.vocab, batch=3, seq=4)
    free = model.generate(tokens, 12)[:, 4:]
    stop = free[0, 2].item()
    stopped = model.generate(tokens, 12, stop=stop)[:, 4:]
    for row, whole in zip(stopped.tolist(), free.tolist(), strict=True):
        ended = whole.index(stop) + 1 if stop in whole else len(whole)
        assert row[:ended] == whole[: min(ended, len(row))] and set(row[ended:]) <= {stop}
    assert torch.equal(model.generate(tokens[:1], 12, stop=stop)[0, 4:], stopped[0][: free[0].tolist().index(stop) + 1])
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(tokens[:, :0], 1)


def test_bf16_computes_norms_and_loss_in_float32():
    model = initialise(Transformer(SPEC).bfloat16())
    tokens = checkpoints.prompt(SPEC.vocab)
    loss = model.loss(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float32 and model(tokens).dtype == torch.bfloat16
    assert abs(loss.item() - initialise(Transformer(SPEC)).loss(tokens, tokens).item()) < 0.02
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + SPEC.norm_eps).rsqrt()
    assert ((model.norm(x).double() - exact) / exact).abs().max() < 2**-8  # one rounding, not one a step


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = initialise(Transformer(SPEC), seed=3)
    torch.manual_seed(2)
    with torch.device("meta"):
        second = Transformer(SPEC)
    initialise(second, seed=3)
    other = initialise(Transformer(SPEC), seed=4)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.norm.weight.eq(1).all() and first.layers[0].self_attn.q_proj.bias.eq(0).all()
    assert abs(first.embed_tokens.weight.std() - 0.02) < 0.002
    first.lm_head.weight.window = checkpoint.Window(0, 0, 37, 37)
    with pytest.raises(ValueError, match="cut it"):
        initialise(first)


def test_tied_embeddings_stay_one_parameter_on_meta_in_float64_and_with_memory():
    with torch.device("meta"):
        model = Transformer(ModelSpec(**SIZES, tied=True)).double()
    for built in (model, initialise(model)):
        assert built.lm_head.weight is built.embed_tokens.weight
    tokens = checkpoints.prompt(SPEC.vocab)
    model.loss(tokens, tokens).backward()
    assert model.embed_tokens.weight.grad.abs().sum() > 0


def test_building_on_meta_is_quick_and_on_a_device_leaves_no_weight_unfilled():
    """FOUND: torch fills an embedding on meta through its compiler, two seconds of imports on every rank."""
    code = (
        "import sys, torch; from shardlab.model import Transformer; from shardlab.specs import ModelSpec\n"
        f"with torch.device('meta'): Transformer(ModelSpec(**{SIZES}))\n"
        "print([name for name in sys.modules if name.startswith(('torch._inductor', 'torch._dynamo.'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]", run.stdout
    torch.empty(37, 24).fill_(torch.nan)  # what an allocator is likely to give back, were it asked for no more
    assert 0.9 < Transformer(SPEC).embed_tokens.weight.std() < 1.1
