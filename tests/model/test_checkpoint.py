"""Weights in and out of Hugging Face folders: whole, in slices, in several files, and damaged in every likely way."""

import itertools
import json
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardlab.model import Transformer, Window, checkpoint, from_folder, initialise, parameters, stored
from shardlab.specs import Experts, Latent, ModelSpec

KINDS = list(checkpoints.KINDS)


def on_meta(folder, dtype=torch.float32):
    with torch.device("meta"):
        return Transformer(ModelSpec.from_config(folder)).to(dtype)


def weights(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def copied(tiny, tmp_path):
    """`copied(kind)`: a copy of a tiny checkpoint that a test may damage."""

    def copy(kind):
        return shutil.copytree(tiny(kind), tmp_path / kind)

    return copy


@pytest.fixture
def rewritten(copied):
    """`rewritten(kind, change)`: a copy whose dict of tensors `change` has changed."""

    def rewrite(kind, change):
        folder = copied(kind)
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return rewrite


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_is_saved_is_loaded_by_transformers_and_by_us(tiny, tmp_path, kind):
    ours = from_folder(tiny(kind))
    checkpoint.save(ours, tmp_path / kind)
    names, stored = (load_file(folder / "model.safetensors").keys() for folder in (tmp_path / kind, tiny(kind)))
    assert names == stored
    again, tokens = from_folder(tmp_path / kind), checkpoints.prompt(ours.spec.vocab)
    assert same(weights(again), weights(ours))
    assert vars(again.spec) == vars(ours.spec)
    theirs, before = (checkpoints.oracle(folder)(tokens).logits for folder in (tmp_path / kind, tiny(kind)))
    assert torch.equal(theirs, before)


@pytest.mark.parametrize("kind", ["llama", "qwen3-tied", "mixtral", "deepseek"])
def test_all_bytes_of_the_file_are_read_once_and_ties_are_kept(tiny, kind):
    model = on_meta(tiny(kind))
    assert checkpoint.load(model, tiny(kind)) == 4 * model.spec.total
    assert (model.lm_head.weight is model.embed_tokens.weight) == model.spec.tied
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes  # no view of the mapped file
    if (maps := Path("/proc/self/maps")).exists():
        assert str(tiny(kind)) not in maps.read_text()  # which is unmapped again


@pytest.mark.parametrize("kind", ["odd", "bias", "qwen3-tied", "mixtral", "deepseek"])
@pytest.mark.parametrize("p", [2, 7])
def test_a_window_reads_its_own_slice_and_pads_with_zeros(tiny, kind, p):
    """Every matrix cut along one of its dims, every vector along its only one, into p parts of ⌈n/p⌉."""
    whole = weights(from_folder(tiny(kind)))
    read = 0
    for rank, dim in itertools.product(range(p), (0, 1)):
        model = on_meta(tiny(kind))
        windows = {}
        for names, parameter in parameters.distinct(model):
            cut, n = min(dim, parameter.dim() - 1), parameter.shape[min(dim, parameter.dim() - 1)]
            each = -(-n // p)
            shape = [each if d == cut else size for d, size in enumerate(parameter.shape)]
            part = torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
            part.window = windows[names[0]] = Window(cut, min(rank * each, n), min((rank + 1) * each, n), n)
            for name in names:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, part)
        read += checkpoint.load(model, tiny(kind))
        for name, window in windows.items():
            held, rows = model.get_parameter(name), window.stop - window.start
            mine = whole[name].narrow(window.dim, window.start, rows)
            assert torch.equal(held.narrow(window.dim, 0, rows), mine), name
            assert held.narrow(window.dim, rows, held.shape[window.dim] - rows).eq(0).all(), name
            assert held.window is window and not held.requires_grad
        assert (model.lm_head.weight is model.embed_tokens.weight) == model.spec.tied
    assert read == 2 * 4 * sum(tensor.numel() for tensor in whole.values())  # once for each way to cut, over all ranks


@pytest.mark.parametrize("kind", ["llama", "qwen3-tied", "mixtral"])
def test_a_sharded_index_is_read_like_one_file(tiny, tmp_path, kind):
    checkpoints.oracle(tiny(kind)).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = on_meta(tiny(kind))
    assert checkpoint.load(model, tmp_path) == 4 * model.spec.total
    assert same(weights(model), weights(from_folder(tiny(kind))))


def test_numbers_are_converted_to_the_parameters_dtype(tiny, rewritten):
    exact = weights(from_folder(tiny("llama")))
    double = from_folder(tiny("llama"), torch.float64)
    assert all(p.dtype == torch.float64 and torch.equal(p, exact[n].double()) for n, p in weights(double).items())
    halves = rewritten("llama", lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    model = on_meta(halves)
    assert checkpoint.load(model, halves) == 2 * model.spec.total
    assert all(torch.equal(p, exact[n].bfloat16().float()) for n, p in weights(model).items())


def test_a_model_with_memory_is_filled_in_place(tiny):
    model = initialise(Transformer(ModelSpec.from_config(tiny("llama"))))
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    checkpoint.load(model, tiny("llama"))
    assert same(weights(model), weights(from_folder(tiny("llama"))))
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_a_head_stored_beside_tied_embeddings_must_be_equal(rewritten):
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    both = rewritten("tied", lambda tensors: tensors.update({head: tensors[embedding].clone()}))
    model = on_meta(both)
    assert checkpoint.load(model, both) == 4 * (model.spec.total + model.embed_tokens.weight.numel())
    shutil.rmtree(both)
    with pytest.raises(ValueError, match=r"two different tensors.*tie_word_embeddings"):
        from_folder(rewritten("tied", lambda tensors: tensors.update({head: tensors[embedding] + 1})))


def test_frequencies_that_old_checkpoints_store_are_ignored(rewritten):
    from_folder(rewritten("llama", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})))


UP = "model.layers.1.mlp.up_proj.weight"
MISFITS = {
    "missing": (lambda t: t.pop(UP), f"missing: {UP}"),
    "missing head": (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
    "unexpected": (lambda t: t.update({"model.layers.2.x": torch.ones(3)}), r"unexpected: model\.layers\.2\.x"),
    "shape": (lambda t: t.update({UP: torch.ones(128, 63)}), rf"{UP} is \(128, 63\), not \(128, 64\)"),
    "transposed": (lambda t: t.update({UP: t[UP].T.contiguous()}), rf"{UP} is \(64, 128\), not \(128, 64\)"),
}


@pytest.mark.parametrize("change,said", MISFITS.values(), ids=MISFITS)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_changed(rewritten, change, said):
    folder = rewritten("llama", change)
    model = on_meta(folder)
    with pytest.raises(ValueError, match=said):
        checkpoint.load(model, folder)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_modules_that_predict_further_tokens_are_left_in_the_folder(rewritten):
    """DeepSeek stores its MTP modules as layers behind the last, which config.json counts."""
    extra = {f"model.layers.2.{name}": torch.ones(3) for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    folder = rewritten("deepseek", lambda tensors: tensors.update(extra))
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.2\.eh_proj"):
        from_folder(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": 1}))
    model = from_folder(folder)
    assert model.spec.mtp == 1
    checkpoint.save(model, folder.with_name("again"))
    assert ModelSpec.from_config(folder.with_name("again")).mtp == 0


def cut_short(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")


def missing_shard(folder):
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lost_tensor(folder):
    index = {"weight_map": {"model.norm.bias": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGE = {
    "cut short": (cut_short, "model.safetensors is cut short or damaged"),
    "pickled": (pickled, r"pytorch_model\.bin: pickled.*save_pretrained"),
    "missing shard": (missing_shard, "model-00002-of-00002.safetensors is named by .* and missing"),
    "index of another folder": (lost_tensor, "names tensors that its files lack: model.norm.bias"),
    "broken index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "is no index"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
}


@pytest.mark.parametrize("damage,said", DAMAGE.values(), ids=DAMAGE)
def test_damaged_folders_are_refused_by_the_file_that_is_at_fault(copied, damage, said):
    folder = copied("llama")
    model = on_meta(folder)
    damage(folder)
    with pytest.raises(ValueError, match=said):
        checkpoint.load(model, folder)
    with pytest.raises(ValueError, match="is not a folder"):
        checkpoint.load(model, folder / "elsewhere")


def test_a_folder_is_saved_whole_or_not_at_all(tiny, tmp_path, monkeypatch):
    model = from_folder(tiny("llama"))
    checkpoint.save(model, tmp_path / "a" / "b")
    with pytest.raises(FileExistsError, match="exists already"):
        checkpoint.save(model, tmp_path / "a" / "b")

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(stored, "save_file", full)
    with pytest.raises(FileExistsError, match="exists already"):  # said before anything is written
        checkpoint.save(model, tmp_path / "a" / "b")
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(model, tmp_path / "a" / "c")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_cut_model_or_one_on_meta_or_one_without_a_name_there_is_not_saved(tiny, tmp_path):
    with pytest.raises(ValueError, match="is on meta"):
        checkpoint.save(on_meta(tiny("llama")), tmp_path / "x")
    model = from_folder(tiny("llama"))
    model.norm.weight.window = Window(0, 0, 64, 64)
    with pytest.raises(ValueError, match=r"norm\.weight is cut"):
        checkpoint.save(model, tmp_path / "x")
    sizes = dict(hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=8)
    few, latent = dict(routed=4, active=2, ffn=8), Latent(kv_rank=4, rope_dim=2, nope_dim=2, value_dim=2)
    theirs = dict(score="sigmoid", routing_bias=True, shared=1)
    mixtures = [dict(experts=Experts(**few), attention_bias=True), dict(experts=Experts(**few, normalised=False)),
                dict(experts=Experts(**few, first_dense=1)), dict(experts=Experts(**few, shared=1), qk_norm=True),
                dict(experts=Experts(**few, scale=2.0), qk_norm=True), dict(latent=latent),
                dict(experts=Experts(**few), latent=latent), dict(experts=Experts(**few, **theirs), mlp_bias=True,
                                                                  latent=latent)]
    for mixed in (dict(output_bias=True), dict(attention_bias=True, qk_norm=True), dict(mlp_bias=True, qk_norm=True),
                  *mixtures):
        with pytest.raises(ValueError, match="no Hugging Face model type"):
            checkpoint.save(Transformer(ModelSpec(**sizes, **mixed)), tmp_path / "x")
    assert not list(tmp_path.iterdir())
