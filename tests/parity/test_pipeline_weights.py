"""From a Hugging Face folder into the stages and back: each rank reads the bytes of its own layers."""

import pytest
import torch

from shardlab.model import Transformer, checkpoint
from shardlab.parallel import data, execute, mesh, pipeline, tensor, weights, zero
from shardlab.schedule import SCHEDULES, forward_only
from shardlab.specs import ModelSpec

SIZES = dict(hidden=16, layers=5, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53)
TOKENS = torch.arange(12).view(2, 6)


def folder_of(path, **sizes):
    torch.manual_seed(0)
    model = Transformer(ModelSpec(**(SIZES | sizes)))
    for parameter in model.parameters():
        parameter.data.normal_()
    checkpoint.save(model, path)
    with torch.no_grad():
        return model.state_dict(), model(TOKENS)


def there_and_back(group, folder, out, axes, name, data_axis):
    """(Bytes read, bytes held, logits, the whole again by name); written to `out` too."""
    of = {axis: mesh.build(**axes).get_group(axis) for axis in axes}
    p = of["pp"].size()
    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder))
    if "tp" in of:
        tensor.cut(model, of["tp"])
    pipeline.cut(model, of["pp"], SCHEDULES[name](p, 2 * p))
    if data_axis == "zero":
        zero.shard(model, torch.optim.SGD(model.parameters()), of["dp"], 1)
    read = weights.load(model, folder)
    if data_axis == "data":
        data.replicate(model, of["dp"])
    windows = [getattr(parameter, "window", None) for parameter in model.parameters()]
    held = 4 * sum(parameter.numel() if window is None else
                   parameter.numel() // parameter.shape[window.dim] * (window.stop - window.start)
                   for parameter, window in zip(model.parameters(), windows, strict=True))
    logits = None
    if name == "1f1b":
        logits = execute.logits(model, forward_only(p, 1), [TOKENS])
    whole = {name: value.clone() for names, value in weights.whole(model) for name in names}
    weights.save(model, out)
    return read, held, logits, whole


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("axes,name,layers,data_axis", [
    (dict(pp=2), "1f1b", 5, ""), (dict(pp=3), "interleaved", 5, ""), (dict(pp=4), "1f1b", 2, ""),
    (dict(tp=2, pp=2), "1f1b", 5, ""), (dict(dp=2, pp=2), "dualpipe_v", 5, "zero"),
    (dict(dp=2, pp=2), "1f1b", 5, "data"),
], ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items()) if isinstance(x, dict) else None)
def test_a_rank_reads_its_layers_and_all_are_put_together_again(pool, tmp_path, axes, name, layers, data_axis, tied):
    state, logits = folder_of(tmp_path / "whole", tied=tied, layers=layers)
    ranks = axes["pp"] * axes.get("tp", 1) * axes.get("dp", 1)
    outcomes = pool(ranks).run(there_and_back, tmp_path / "whole", tmp_path / "again", axes, name, data_axis)
    for read, held, ours, whole in outcomes:
        assert whole.keys() == state.keys() and all(torch.equal(whole[name], state[name]) for name in state)
        orders = [[name for name in each if name != "lm_head.weight"] for each in (whole, state)]
        assert orders[0] == orders[1]  # both names of a tied embedding come first
        assert read == held or data_axis == "zero"  # which reads this rank's slices
        assert ours is None or torch.allclose(ours[0], logits, atol=1e-4)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == \
        (tmp_path / "whole" / "model.safetensors").read_bytes()
    plain = 4 * sum(value.numel() for name, value in state.items() if not tied or name != "lm_head.weight")
    table = 4 * SIZES["vocab"] * SIZES["hidden"]
    if axes.keys() == {"pp"}:  # a tied table is read at both ends, and nothing else twice
        assert sum(read for read, *_ in outcomes) == plain + tied * table
    if data_axis == "zero":  # first and last stage are on one rank, and replicas share the reading
        assert sum(read for read, *_ in outcomes) == plain
