"""From a folder straight into what each rank holds, and back into one folder: every cut, equal to the bit."""

import pytest
import torch
from safetensors.torch import load_file

from shardlab.model import Transformer, checkpoint
from shardlab.parallel import data, mesh, tensor, weights, zero
from shardlab.parallel.weights import rectangles
from shardlab.specs import ModelSpec

SIZES = dict(hidden=24, layers=2, heads=12, kv_heads=2, head_dim=4, ffn=37, vocab=53)
KINDS = {"plain": {}, "tied": dict(tied=True), "biases": dict(attention_bias=True, output_bias=True, mlp_bias=True)}
LAYOUTS = [(2, 1), (3, 1), (4, 1), (1, 2), (1, 4), (2, 2)]


def folder_of(path, sizes):
    torch.manual_seed(0)
    model = Transformer(ModelSpec(**(SIZES | sizes)))
    for parameter in model.parameters():
        parameter.data.normal_()
    checkpoint.save(model, path)
    return model.state_dict()


def cut(group, folder, dp, tp, stage, dtype=torch.float32):
    axes = mesh.build(dp=dp, tp=tp)
    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder)).to(dtype)
    tensor.cut(model, axes.get_group("tp"))
    if stage:
        zero.shard(model, torch.optim.AdamW(model.parameters()), axes.get_group("dp"), stage)
    return model, weights.load(model, folder)


def there_and_back(group, folder, out, dp, tp, stage):
    """(bytes read, elements of padding left out) and the whole again, by name; written to `out` too."""
    model, read = cut(group, folder, dp, tp, stage)
    whole = {name: value.clone() for names, value in weights.whole(model) for name in names}
    weights.save(model, out)
    return read, whole, model.loss(torch.arange(12).view(2, 6), torch.arange(1, 13).view(2, 6)).item()


@pytest.mark.parametrize("dp,tp", LAYOUTS)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_is_filled_from_a_folder_and_gathered_back(pool, tmp_path, kind, dp, tp, stage):
    stage = stage if dp > 1 else 0
    state = folder_of(tmp_path / "whole", KINDS[kind])
    ranks = pool(dp * tp).run(there_and_back, tmp_path / "whole", tmp_path / "again", dp, tp, stage)
    for _, whole, _ in ranks:
        assert whole.keys() == state.keys() and all(torch.equal(whole[name], state[name]) for name in state)
    again = checkpoint.from_folder(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == \
        (tmp_path / "whole" / "model.safetensors").read_bytes()
    plain = checkpoint.from_folder(tmp_path / "whole")
    loss = plain.loss(torch.arange(12).view(2, 6), torch.arange(1, 13).view(2, 6)).item()
    assert all(abs(each - loss) < 1e-4 for _, _, each in ranks)
    if stage and tp == 1:  # over the data axis each number is read once; without ZeRO every rank reads all it holds
        assert sum(read for read, _, _ in ranks) == 4 * sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("dp,tp,stage", [(1, 2, 0), (1, 4, 0), (2, 2, 1), (2, 2, 3)])
@pytest.mark.parametrize("kind", ["deepseek-dense", "deepseek", "mixtral"])
def test_latent_attention_and_experts_too(pool, tiny, tmp_path, kind, dp, tp, stage):
    """Mixtral's experts under Mixtral's names, which are not the model's; DeepSeek's bias, which is never trained."""
    state = checkpoint.from_folder(tiny(kind)).state_dict()
    ranks = pool(dp * tp).run(there_and_back, tiny(kind), tmp_path / "again", dp, tp, stage)
    tokens = torch.arange(12).view(2, 6)
    loss = checkpoint.from_folder(tiny(kind)).loss(tokens, tokens + 1).item()
    assert all(abs(each - loss) < 1e-4 for _, _, each in ranks)
    again = load_file(tmp_path / "again" / "model.safetensors")
    theirs = load_file(tiny(kind) / "model.safetensors")
    assert again.keys() == theirs.keys() and all(torch.equal(again[name], theirs[name]) for name in theirs)
    for _, whole, _ in ranks:
        assert whole.keys() == state.keys() and all(torch.equal(whole[name], state[name]) for name in state)


def test_a_rank_reads_a_part_of_a_part(pool, tmp_path):
    folder_of(tmp_path / "whole", {})
    alone = sum(read for _, read in pool(4).run(read_only, tmp_path / "whole", 1, 4, 0))
    both = sum(read for _, read in pool(4).run(read_only, tmp_path / "whole", 2, 2, 3))
    whole = checkpoint.load(Transformer(ModelSpec(**SIZES)), tmp_path / "whole")
    spec = ModelSpec(**SIZES)
    norms = 4 * (2 * spec.layers + 1) * spec.hidden
    kv = 4 * 2 * spec.layers * spec.kv_heads * spec.head_dim * spec.hidden
    assert alone == whole + 3 * norms + kv  # each norm on four ranks, each KV head on two
    assert both == whole + norms  # each norm on two tensor ranks, there cut over the data axis


def read_only(group, folder, dp, tp, stage):
    return dp, cut(group, folder, dp, tp, stage)[1]


def low(group, folder):
    model, _ = cut(group, folder, 2, 1, 3, torch.bfloat16)
    return {names[0]: value for names, value in weights.whole(model)}


def test_numbers_are_converted(pool, tmp_path):
    state = folder_of(tmp_path / "whole", {})
    for whole in pool(2).run(low, tmp_path / "whole"):
        assert all(torch.equal(value, state[name].bfloat16()) for name, value in whole.items())


def replicated_on_meta(group, folder):
    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder))
    data.replicate(model, group)
    with pytest.raises(ValueError, match="replicated on the meta device: load it first"):
        weights.load(model, folder)


def test_a_model_replicated_before_it_is_there_is_refused(pool, tmp_path):
    folder_of(tmp_path / "whole", {})
    pool(2).run(replicated_on_meta, tmp_path / "whole")


def refused(group, folder):
    model, _ = cut(group, folder, 1, 2, 0)
    with pytest.raises(FileExistsError, match="exists already"):  # on every rank
        weights.save(model, folder)


def test_a_folder_that_is_full_is_left_alone(pool, tmp_path):
    folder_of(tmp_path / "whole", {})
    before = (tmp_path / "whole" / "model.safetensors").read_bytes()
    pool(2).run(refused, tmp_path / "whole")
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("width", [1, 3, 7])
def test_a_run_of_elements_is_three_rectangles_at_most(width):
    numbers = torch.arange(5 * width).view(5, width)
    for first in range(5 * width + 1):
        for last in range(first, 5 * width + 1):
            parts = list(rectangles(first, last, width))
            assert len(parts) <= 3
            assert torch.equal(torch.cat([numbers[part].flatten() for part in parts] or [numbers[:0, 0]]),
                               torch.arange(first, last))
