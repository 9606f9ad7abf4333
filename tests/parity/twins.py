"""The plain model and its cut twin, trained side by side: what every parity test of the tensor axis compares.

Sizes don't divide (FFN 90, vocabulary 101), weights are distinct by position, biases and norms are far from their
initial values, one parameter is used by nothing, and the ranks' own random streams differ.
"""

import torch

from shardlab import comm
from shardlab.model.transformer import Transformer
from shardlab.parallel import grads, rng, tensor
from shardlab.parallel.shard import take
from shardlab.specs import ModelSpec

SIZES = dict(hidden=24, layers=2, heads=12, kv_heads=12, head_dim=4, ffn=90, vocab=101)
BIASES = dict(attention_bias=True, output_bias=True, mlp_bias=True)
CASES = {
    "plain": (dict(), (2, 3, 4)),
    "tied": (dict(tied=True), (2, 3, 4)),
    "biases": (BIASES, (2, 3)),
    "grouped queries": (dict(kv_heads=6), (2, 3)),
    "qk-norm": (dict(qk_norm=True, kv_heads=4), (2, 4)),
    "one KV head on all ranks": (dict(kv_heads=1, **BIASES), (2, 3, 4)),
    "each KV head on two ranks": (dict(kv_heads=2, qk_norm=True, tied=True), (4,)),
    "ranks that hold padding only": (dict(ffn=5, vocab=5), (4,)),
}
EVERYTHING = dict(qk_norm=True, tied=True, kv_heads=2, **BIASES)
FROZEN = [("embed_tokens.weight",), ("layers.0.self_attn.o_proj.weight", "layers.1.mlp.up_proj.weight")]
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "adamw": lambda p: torch.optim.AdamW(p, lr=0.01)}


def twins(sizes, group, frozen=(), recompute=None, mode=False, dtype=torch.float64, dropout=0.0):
    """The plain model and the same one cut, from one seed, with every weight (biases and norms too) distinct."""
    torch.manual_seed(0)
    plain = Transformer(ModelSpec(**(SIZES | sizes)), dropout=dropout).double()
    for parameter in plain.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    torch.manual_seed(1000 + group.rank())
    twin = Transformer(plain.spec, recompute, dropout).double()
    twin.load_state_dict(plain.state_dict())
    for model in (plain, twin):
        model.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        model.to(dtype)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    cut = tensor.cut(twin, group, mode)
    for model in (plain, cut):
        rng.seed(model, 7)
    return plain, cut


def batch(vocab, step=0, shape=(3, 8)):
    """Tokens and labels, the last of each sequence and some more without one."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocab, shape, generator=generator)
    labels = torch.randint(0, vocab, shape, generator=generator)
    if shape[1] > 1:
        labels[:, -1] = -100
        labels[0, : shape[1] // 3] = -100
    return tokens, labels


def mine(whole, parameter):
    """What this rank should hold of the plain model's tensor."""
    window = getattr(parameter, "window", None)
    return whole if window is None else take(whole, window, parameter.shape[window.dim])


def distances(plain, cut, of):
    """The largest distance between the cut model's tensors and this rank's part of the plain ones, over the largest."""
    theirs, ours = dict(plain.named_parameters()), dict(cut.named_parameters())
    assert list(theirs) == list(ours)
    pairs = [(of(theirs[name]), of(p), p) for name, p in ours.items()]
    assert all((a is None) == (b is None) for a, b, _ in pairs)
    pairs = [(mine(a, p), b) for a, b, p in pairs if a is not None]
    largest = max(of(p).abs().max().item() for p in theirs.values() if of(p) is not None)
    return max((a - b).abs().max().item() for a, b in pairs) / largest


def compare(group, sizes, frozen=(), optimizer="sgd", steps=2, recompute=None, mode=False, shape=(3, 8),
            transport="backend", dtype=torch.float64):
    """Train both for `steps` clipped steps; the largest differences, and those of the first step. Two see what the
    first has left: weights moved, an optimizer's state; five are for one kind of each test."""
    plain, cut = twins(sizes, group, frozen, recompute, mode, dtype)
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in (plain, cut)]
    differences = []
    with comm.use(transport=transport):
        for step in range(steps):
            tokens, labels = batch(plain.spec.vocab, step, shape)
            given = tokens.clone(), labels.clone()
            with torch.no_grad():
                logits = plain(tokens), cut(tokens)
            losses = plain.loss(tokens, labels), cut.loss(tokens, labels)
            for loss in losses:
                loss.backward()
            grads.finish(cut)
            assert torch.equal(tokens, given[0]) and torch.equal(labels, given[1])
            now = {"loss": abs(losses[0] - losses[1]).item(),
                   "logits": ((logits[0] - logits[1]).abs().max() / logits[0].abs().max()).item(),
                   "gradients": distances(plain, cut, lambda p: p.grad)}
            norms = (torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), grads.clip_grad_norm_(cut, 0.5))
            assert norms[0] > 0.5  # so that there is something to clip
            differences.append(now | {"norm": (abs(norms[0] - norms[1]) / norms[0]).item()})
            for each in optimizers:
                each.step()
                each.zero_grad()
    worst = {name: max(each[name] for each in differences) for name in differences[0]}
    return worst | {"parameters": distances(plain, cut, lambda p: p.detach())}, differences[0]


def check(outcomes):
    """Assert that `compare`, in float64, has found no difference on any rank."""
    for worst, _ in outcomes:
        assert max(worst["loss"], worst["norm"], worst["logits"], worst["gradients"]) < 1e-10, worst
        assert worst["parameters"] < 1e-9, worst


def check_float32(outcomes):
    """The same in float32, in which Adam turns rounding into steps: losses, norm, the first step's gradients."""
    for worst, first in outcomes:
        assert max(worst["loss"], worst["norm"]) < 1e-5 and first["gradients"] < 1e-5, (worst, first)
