"""Tiny Mixtral, Qwen3-MoE and DeepSeek-V3 checkpoints, each rank reading what it holds: cut over experts, heads and
sequence, they have the logits of `transformers`."""

import checkpoints
import pytest
import torch

from shardlab.model import Transformer
from shardlab.parallel import context, data, expert, mesh, tensor, weights
from shardlab.specs import ModelSpec

CUTS = {  # sizes of the axes: replicas of the experts, experts, tensor; ranks to an expert
    "ep 2": (2, dict(ep=2)),
    "ep 2, twice": (4, dict(edp=2, ep=2)),
    "ep 4": (4, dict(ep=4)),
    "tp 2": (2, dict(tp=2)),
    "tp 2, whole experts": (2, dict(tp=2, etp=1)),
    "ep 2, tp 2": (4, dict(ep=2, tp=2)),
    "ep 4 over tp 2": (4, dict(ep=4, tp=2, etp=1)),
    "sp 2, ep 2 over it": (2, dict(ep=2, tp=2, etp=1, sp="again")),
    "cp 2": (2, dict(cp=2)),
    "cp 3": (3, dict(cp=3)),
    "cp 2, ep 2 over it": (2, dict(cp=2, ep=2)),
    "cp 2, tp 2, ep 2": (4, dict(cp=2, tp=2, ep=2)),
}


def logits(group, folder, tokens, tp=1, ep=1, edp=1, cp=1, etp=None, sp=False):
    """The logits of each rank's own prompt, or of one that ranks share: (which of `tokens`, logits, bytes read)."""
    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder))
    rank, others = group.rank(), group.size() // tp
    axes = mesh.build(others=others, tp=tp)
    tensor.cut(model, axes.get_group("tp"), sp, etp)
    if ep > 1:
        over = mesh.build(edp=edp, ep=ep) if etp == 1 or tp == 1 else mesh.build(edp=edp, ep=ep, tp=tp)
        expert.cut(model, over.get_group("ep"), over.get_group("edp") if edp > 1 else None)
    if cp > 1:
        context.cut(model, mesh.build(dp=others // cp, cp=cp, tp=tp).get_group("cp"))
    read = weights.load(model, folder)
    if others > 1:
        data.replicate(model, axes.get_group("others"))
    mine = rank // tp // cp
    with torch.no_grad():
        return mine, model(tokens[mine]), read


RUNS = [pytest.param(kind, cut, marks=[pytest.mark.more] * ("," in kind and cut not in ("ep 2, tp 2", "cp 2")))
        for kind in checkpoints.MIXTURES for cut in CUTS]


@pytest.mark.parametrize(("kind", "cut"), RUNS)
def test_a_cut_checkpoint_has_the_logits_of_transformers(pool, tiny, kind, cut):
    p, axes = CUTS[cut]
    folder = tiny(kind)
    spec = ModelSpec.from_config(folder)
    tokens = checkpoints.prompt(spec.vocab, 8, 23).view(4, 2, 23)
    with torch.no_grad():
        expected = [checkpoints.oracle(folder)(each).logits for each in tokens]
    outcomes = pool(p).run(logits, folder, tokens, **axes)
    for mine, seen, _ in outcomes:
        assert ((seen - expected[mine]).abs().max() / expected[mine].abs().max()).item() < 1e-5
    if "tp" not in axes:  # all that is no expert is on every rank, an expert on one, or on one of each of the copies
        experts = spec.parameters["experts"]
        copies = axes.get("edp", 1) if "ep" in axes else p
        assert sum(read for *_, read in outcomes) == 4 * (p * (spec.total - experts) + copies * experts)
