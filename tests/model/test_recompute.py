"""What backward computes again changes no number, and is done only where there is a backward."""

import subprocess
import sys

import pytest
import torch

from shardlab.model import Transformer, attention, initialise
from shardlab.specs import ModelSpec

SPEC = ModelSpec(hidden=24, layers=3, heads=6, kv_heads=3, head_dim=4, ffn=30, vocab=37, qk_norm=True)
TOKENS = torch.arange(14).view(2, 7)
MODES = ("selective", "full")


@pytest.fixture
def cores(monkeypatch):
    """A list that grows with every attention core that is computed."""
    seen, attend = [], attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args: (seen.append(args), attend(*args))[1])
    return seen


@pytest.mark.parametrize("frozen", [(), ("embed_tokens",), ("layers.0", "embed_tokens"), ("layers.2.mlp",)])
@pytest.mark.parametrize("recompute", MODES)
def test_gradients_are_the_same_to_the_last_bit(recompute, frozen):
    losses, gradients = [], []
    for mode in (None, recompute):
        model = initialise(Transformer(SPEC, mode))
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        losses.append(model.loss(TOKENS, TOKENS))
        losses[-1].backward()
        gradients.append([p.grad for p in model.parameters()])
    assert torch.equal(*losses)
    assert any(a is not None for a in gradients[0])
    for a, b in zip(*gradients, strict=True):
        assert (a is b is None) or torch.equal(a, b)


@pytest.mark.parametrize(("recompute", "times"), [(None, 1), ("selective", 2), ("full", 2)])
def test_training_computes_attention_twice_and_inference_once(cores, recompute, times):
    model = initialise(Transformer(SPEC, recompute))
    with torch.no_grad():
        model(TOKENS)
    assert len(cores) == SPEC.layers
    cores.clear()
    cached = model.generate(TOKENS, 3)
    assert len(cores) == 3 * SPEC.layers
    assert torch.equal(cached, initialise(Transformer(SPEC)).generate(TOKENS, 3, cached=False))
    cores.clear()
    model.loss(TOKENS, TOKENS).backward()
    assert len(cores) == times * SPEC.layers


@pytest.mark.parametrize("recompute", MODES)
def test_a_hook_on_a_block_acts_in_the_real_forward_alone(recompute):
    """FAULTS E7: what is logged of a block must not be logged again when backward computes it a second time."""
    model, logged = initialise(Transformer(SPEC, recompute)), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *args: logged.append(args))
    model.loss(TOKENS, TOKENS).backward()
    assert len(logged) == SPEC.layers


@pytest.mark.parametrize("mode", ["half", "", True, 0])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(ValueError, match=f"recompute must be None, 'selective' or 'full', not {mode!r}"):
        Transformer(SPEC, mode)


def test_inference_does_not_load_the_compiler():
    """torch.utils.checkpoint loads torch._dynamo when it is first called: two seconds, which AdamW costs anyway."""
    code = ("import sys, torch; from test_recompute import SPEC, TOKENS, Transformer\n"
            "with torch.no_grad(): Transformer(SPEC, 'full')(TOKENS)\n"
            "assert 'torch._dynamo' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, cwd="tests/model")
