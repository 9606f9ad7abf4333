"""Checkpoints read straight into shards: logits, words and gradients as of `transformers`, on 1, 2 and 4 ranks."""

import checkpoints
import pytest
import torch
from twins import mine

from shardlab.cost.memory import memory
from shardlab.model import Transformer, checkpoint
from shardlab.parallel import grads, tensor
from shardlab.parallel.shard import unshard
from shardlab.specs import Layout, ModelSpec

LATE = [pytest.mark.more]  # on two ranks; and mixtures on fewer than four
RUNS = [pytest.param(kind, p, id=f"{kind}-{p}", marks=LATE * (p == 2 or (p < 4 and kind in checkpoints.MIXTURES)))
        for kind in checkpoints.KINDS for p in (1, 2, 4)]


def cut_from(folder, group, dtype=torch.float32):
    """The model in `folder`, cut while it has no memory yet; and the bytes read to fill it."""
    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder)).to(dtype)
    model = tensor.cut(model, group)
    return model, checkpoint.load(model, folder)


def speak(group, folder, tokens):
    model, read = cut_from(folder, group)
    with torch.no_grad():
        logits = model(tokens)
    held = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    return logits, model.generate(tokens, 16), model.generate(tokens, 16, cached=False), held, read


@pytest.mark.parametrize("kind,p", RUNS)
def test_cut_checkpoints_say_what_transformers_says(pool, tiny, kind, p):
    folder, spec = tiny(kind), ModelSpec.from_config(tiny(kind))
    theirs, tokens = checkpoints.oracle(folder), checkpoints.prompt(spec.vocab, seq=9)
    with torch.no_grad():
        expected = theirs(tokens).logits
    words = theirs.generate(tokens, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    held = memory(spec, Layout(tp=p), "fp32").weights
    for logits, cached, uncached, has, read in pool(p).run(speak, folder, tokens):
        assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5
        assert torch.equal(cached, words) and torch.equal(uncached, words)
        assert has == held
        assert read <= has and (p == 1 or read < memory(spec, Layout(), "fp32").weights)


def gradient_distance(group, folder):
    """How far the cut model's gradients are from the plain one's, over the plain model's largest, in float64."""
    plain, (cut, _) = checkpoint.from_folder(folder, torch.float64), cut_from(folder, group, torch.float64)
    tokens = checkpoints.prompt(plain.spec.vocab)
    for model in (plain, cut):
        model.loss(tokens, tokens.roll(-1, 1)).backward()
    grads.finish(cut)
    theirs, ours = ({name: p for name, p in model.named_parameters() if p.requires_grad} for model in (plain, cut))
    theirs = {name: p.grad for name, p in theirs.items()}
    worst = max((mine(theirs[name], p) - p.grad).abs().max().item() for name, p in ours.items())
    return worst / max(g.abs().max().item() for g in theirs.values())


@pytest.mark.parametrize("kind,p", RUNS)
def test_gradients_of_cut_checkpoints(pool, tiny, kind, p):
    assert max(pool(p).run(gradient_distance, tiny(kind))) < 1e-10


def shards(group, folder):
    return {name: (p.detach(), getattr(p, "window", None)) for name, p in cut_from(folder, group)[0].named_parameters()}


@pytest.mark.parametrize("p", [2, 4])
def test_shards_put_together_are_the_file(pool, tiny, p):
    """`unshard` is the inverse of what `load` read into windows: padding gone, nothing missing (FAULTS Z1)."""
    whole = dict(checkpoint.from_folder(tiny("odd")).named_parameters())
    held = pool(p).run(shards, tiny("odd"))
    for name, parameter in whole.items():
        window = held[0][name][1]
        pieces = [rank[name][0] for rank in held]
        assert torch.equal(pieces[0] if window is None else unshard(pieces, window.full, window.dim), parameter), name


def test_a_cut_model_is_not_saved_as_a_whole_one(pool, tiny, tmp_path):
    def save(group, folder, target):
        model, _ = cut_from(folder, group)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        try:
            checkpoint.save(model, target / str(group.rank()))
        except ValueError as error:
            return str(error)

    assert all("cut" in said for said in pool(2).run(save, tiny("llama"), tmp_path))
    assert not list(tmp_path.iterdir())
