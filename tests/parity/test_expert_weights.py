"""A mixture from a Hugging Face folder into cut experts and back: a rank reads its own experts, and one writes all."""

import math

import pytest
import torch

from shardlab.model import Transformer, checkpoint
from shardlab.parallel import data, expert, mesh, pipeline, tensor, weights, zero
from shardlab.schedule import SCHEDULES
from shardlab.specs import ModelSpec
from shardlab.specs.experts import Experts

SPEC = ModelSpec(hidden=16, layers=4, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53, qk_norm=True, tied=True,
                 experts=Experts(routed=12, active=2, ffn=7, first_dense=1))


def folder_of(path, spec=SPEC):
    torch.manual_seed(0)
    model = Transformer(spec)
    for parameter in model.parameters():
        parameter.data.normal_()
    checkpoint.save(model, path)
    return model.state_dict()


def there_and_back(group, folder, out, axes, stage=0, orders=None):
    """(Bytes read, bytes of this rank's experts, the whole again by name); written to `out` too."""
    of = {axis: mesh.build(**axes).get_group(axis) for axis in axes}
    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder))
    if "tp" in of:
        tensor.cut(model, of["tp"])
    expert.cut(model, of["ep"], of.get("edp"))
    tokens = group if not {"pp", "tp"} & axes.keys() else of["ep"]
    if orders:
        pipeline.cut(model, of["pp"], orders)
    if stage:
        zero.shard(model, torch.optim.AdamW(model.parameters()), tokens, stage)
    read = weights.load(model, folder)
    if not stage:
        data.replicate(model, tokens)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    whole = {name: value.clone() for names, value in weights.whole(model) for name in names}
    weights.save(model, out)
    return read, experts, whole


@pytest.mark.parametrize("axes,how", [
    (dict(ep=2), {}), (dict(ep=4), dict(stage=1)), (dict(ep=2), dict(stage=3)), (dict(edp=2, ep=2), {}),
    (dict(edp=2, ep=2), dict(stage=3)), (dict(edp=2, ep=1), {}), (dict(ep=2, tp=2), {}),
    (dict(pp=2, ep=2), dict(orders="1f1b")), (dict(pp=2, ep=2), dict(orders="dualpipe_v", stage=1)),
], ids=str)
def test_a_rank_reads_its_experts_and_all_are_put_together_again(pool, tmp_path, axes, how):
    state = folder_of(tmp_path / "whole")
    orders = SCHEDULES[how["orders"]](2, 4) if "orders" in how else None
    outcomes = pool(math.prod(axes.values())).run(
        there_and_back, tmp_path / "whole", tmp_path / "again", axes, how.get("stage", 0), orders)
    for _, _, whole in outcomes:
        assert whole.keys() == state.keys() and all(torch.equal(whole[name], state[name]) for name in state)
        inside = [[name for name in each if name != "lm_head.weight"] for each in (whole, state)]
        assert inside[0] == inside[1]
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == \
        (tmp_path / "whole" / "model.safetensors").read_bytes()
    everything = sum(value.nbytes for name, value in state.items() if ".experts." in name)
    copies = axes.get("edp", 1)
    if "tp" not in axes:  # whose FFN of 7 is padded
        assert sum(experts for _, experts, _ in outcomes) == copies * everything
    rest = sum(value.nbytes for name, value in state.items() if ".experts." not in name and name != "lm_head.weight")
    if how.get("stage") and orders is None:  # the data axis shares out the rest, and each reads all its experts
        assert sum(read for read, *_ in outcomes) == copies * everything + rest
    elif axes == dict(ep=2):
        assert [read for read, *_ in outcomes] == [everything // 2 + rest] * 2


@pytest.mark.parametrize("kind", ["mixtral", "deepseek"])
def test_folders_of_transformers(pool, tmp_path, tiny, kind):
    model = checkpoint.from_folder(tiny(kind))
    checkpoint.save(model, tmp_path / "plain")
    outcomes = pool(2).run(there_and_back, tiny(kind), tmp_path / "again", dict(ep=2), 3)
    state = model.state_dict()
    for _, _, whole in outcomes:
        assert whole.keys() == state.keys() and all(torch.equal(whole[name], state[name]) for name in state)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == \
        (tmp_path / "plain" / "model.safetensors").read_bytes()
