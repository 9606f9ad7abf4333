"""Weights in fewer bits: the nearest numbers, the bytes of the bill, and a model that computes from them."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from checkpoints import prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from shardlab import quant
from shardlab.cost.memory import memory
from shardlab.model import Transformer, checkpoint, from_folder
from shardlab.parallel import tensor
from shardlab.specs import Layout, ModelSpec, format_of

FORMATS = ("int8", "int4", "fp8")
SPEC = ModelSpec(hidden=24, layers=2, heads=12, kv_heads=6, head_dim=4, ffn=301, vocab=101, attention_bias=True,
                 output_bias=True, mlp_bias=True, qk_norm=True)


def e4m3(byte):
    """The number that a byte means: a sign, four bits of exponent (bias 7), three of mantissa; no infinities."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte >> 7 else value


VALUES = {"int8": [float(n) for n in range(-127, 128)], "int4": [float(n) for n in range(-7, 8)],
          "fp8": [e4m3(byte) for byte in range(256) if byte & 127 != 127]}


def random_model(spec=SPEC, dtype=torch.float32, seed=0):
    """A model with every weight (biases and norms too) distinct."""
    torch.manual_seed(seed)
    model = Transformer(spec).to(dtype)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def fill_unpacked(plain, quantised):
    """Give `plain` the weights that `quantised` computes from."""
    for name, parameter in plain.named_parameters():
        layer, _, attribute = name.rpartition(".")
        parameter.data.copy_(getattr(quantised.get_submodule(layer), attribute))


def unpacked(quantised, plain):
    """The model `plain` with the weights that `quantised` computes from, in the dtype that it computes in."""
    twin = copy.deepcopy(plain).to(quantised.norm.weight.dtype)
    fill_unpacked(twin, quantised)
    return twin


def held(model):
    return sum(parameter.nbytes for parameter in model.parameters())


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(FORMATS), rows=st.integers(1, 140), columns=st.integers(1, 270), seed=st.integers(0, 99),
       size=st.sampled_from([1e-6, 0.02, 3e4]))
def test_each_number_is_the_nearest_there_is(name, rows, columns, seed, size):
    packed = format_of(name).matrix
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    numbers, scales = quant.pack(weight, packed)
    assert numbers.nbytes + scales.nbytes == packed.nbytes((rows, columns))
    assert scales.numel() == packed.scales((rows, columns))
    got, values = quant.unpack(numbers, scales, packed, columns).double(), torch.tensor(VALUES[name]).double()
    down, across = (step or n for step, n in zip(packed.block, (rows, columns), strict=True))
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        block = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
        w, scale = weight[block].double(), scales[i, j].double()
        torch.testing.assert_close(scale, w.abs().max() / values.max(), rtol=2**-8 if name == "int4" else 1e-6, atol=0)
        best = (w[..., None] - values * scale).abs().amin(-1)
        assert ((w - got[block]).abs() <= best + w.abs().max() * 1e-6).all()  # the product in float32


def test_known_bytes():
    numbers, scales = quant.pack(torch.tensor([[7.0, -7.0, 1.4]]), format_of("int4").matrix)
    assert (numbers.tolist(), scales.tolist()) == ([[0x1F, 0x09]], [[1.0]])  # 15 and 1 share a byte, 9 has one alone
    numbers, scales = quant.pack(torch.tensor([[-2.54, 1.0]]), format_of("int8").matrix)
    assert (numbers.tolist(), scales.tolist()) == ([[256 - 127, 50]], [[pytest.approx(0.02)]])
    numbers, scales = quant.pack(torch.tensor([[448.0, -1.0, 0.0]]), format_of("fp8").matrix)
    assert (numbers.tolist(), scales.tolist()) == ([[0x7E, 0xB8, 0x00]], [[1.0]])


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name):
    packed = format_of(name).matrix
    assert not quant.unpack(*quant.pack(torch.zeros(3, 130), packed), packed, 130).any()


@pytest.mark.parametrize(("kind", "rest"), [("odd", None), ("bias", "fp32"), ("qwen3-tied", "fp64")])
@pytest.mark.parametrize("name", FORMATS)
def test_it_computes_from_exactly_the_unpacked_weights_and_holds_the_bytes_of_the_bill(tiny, kind, name, rest):
    form = format_of(name).beside(rest) if rest else format_of(name)
    plain = from_folder(tiny(kind))
    model = quant.quantise(copy.deepcopy(plain), form)
    tokens, twin = prompt(plain.spec.vocab), unpacked(model, plain)
    assert torch.equal(model(tokens), twin(tokens))
    assert torch.equal(model.generate(tokens, 5), twin.generate(tokens, 5))
    assert held(model) == memory(plain.spec, dtype=form).weights
    assert (model.lm_head.weight is model.embed_tokens.weight) == plain.spec.tied


def test_a_matrix_is_rounded_from_the_full_weight_and_the_rest_to_its_own_dtype():
    plain = random_model()
    model = quant.quantise(copy.deepcopy(plain), "int8")
    packed, weight = format_of("int8").matrix, plain.layers[1].mlp.down_proj.weight.detach()
    direct = quant.unpack(*quant.pack(weight, packed), packed, weight.shape[1])
    assert torch.equal(model.layers[1].mlp.down_proj.weight, direct.bfloat16())
    assert torch.equal(model.embed_tokens.weight, plain.embed_tokens.weight.bfloat16())


def test_gradients_of_inputs_are_exact_and_weights_have_none():
    plain = random_model(dtype=torch.float64)
    model = quant.quantise(copy.deepcopy(plain), format_of("int4").beside("fp64"))
    twin = unpacked(model, plain)
    x = torch.randn(2, 3, SPEC.hidden, dtype=torch.float64)
    grads = []
    for mlp in (model.layers[0].mlp, twin.layers[0].mlp):
        given = x.clone().requires_grad_()
        mlp(given).square().sum().backward()
        grads.append(given.grad)
    assert torch.equal(*grads)
    assert all(parameter.grad is None for parameter in model.parameters())
    tokens = prompt(SPEC.vocab)
    with pytest.raises(RuntimeError, match="does not require grad"):
        model.loss(tokens, tokens).backward()


def test_the_scales_survive_a_change_of_dtype():
    model = quant.quantise(random_model(), "int8")
    before = model.layers[0].mlp.up_proj.weight
    assert torch.equal(copy.deepcopy(model).to(torch.bfloat16).layers[0].mlp.up_proj.weight, before)


def cut_then_quantise(group, spec, name):
    """What a rank puts out, against a twin with the unpacked weights; the bytes it holds; what it refuses."""
    cut, other, twin = (tensor.cut(random_model(spec, torch.float64), group) for _ in range(3))
    model = quant.quantise(cut, format_of(name).beside("fp64"))
    fill_unpacked(twin, model)
    tokens = prompt(spec.vocab)
    with torch.no_grad():
        same = torch.equal(model(tokens), twin(tokens))
    try:
        tensor.cut(quant.quantise(random_model(spec), name), group)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return same, held(model), held(quant.quantise(other, name)), refused


@pytest.mark.parametrize(("p", "name"), [(2, "int8"), (2, "fp8"), (3, "int4")])
def test_a_cut_model_is_quantised_by_each_rank(pool, p, name):
    bills = [memory(SPEC, Layout(tp=p), form).weights for form in (format_of(name).beside("fp64"), name)]
    for same, *counted, refused in pool(p).run(cut_then_quantise, SPEC, name):
        assert same and counted == bills
        assert refused == "this model is quantised: cut the plain one, then quantise each part"


def meta(folder, dtype=torch.bfloat16):
    with torch.device("meta"):
        return Transformer(ModelSpec.from_config(folder)).to(dtype)


@pytest.mark.parametrize("kind", ["odd", "tied"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_read_packed(tiny, kind, name, monkeypatch):
    folder, seen = tiny(kind), []
    model, pack = meta(folder), quant.pack
    matrices = {id(layer) for layer in model.layers.modules() if isinstance(layer, nn.Linear)}

    def watched(weight, packed):
        waiting = [layer for layer in model.layers.modules() if id(layer) in matrices
                   and not parametrize.is_parametrized(layer) and not layer.weight.is_meta]
        seen.append([layer.weight.shape for layer in waiting])
        return pack(weight, packed)

    monkeypatch.setattr(quant, "pack", watched)
    read = quant.load(model, folder, name)
    assert len(seen) == len(matrices)
    assert all(len(waiting) == 1 for waiting in seen)  # the one being packed: the next has no memory yet
    expected = quant.quantise(from_folder(folder, torch.bfloat16), name).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    assert read == 4 * model.spec.total  # as stored


def load_cut(group, folder, name):
    model = tensor.cut(meta(folder, torch.float32), group)
    read = quant.load(model, folder, name)
    expected = quant.quantise(tensor.cut(from_folder(folder), group), name).state_dict()
    return read, held(model), all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_a_cut_model_reads_its_slices_packed(pool, tiny):
    folder = tiny("bias")  # whose sizes divide by 2
    spec = ModelSpec.from_config(folder)
    whole, part = memory(spec, Layout(tp=2), "fp32").weights, memory(spec, Layout(tp=2), "int4").weights
    assert pool(2).run(load_cut, folder, "int4") == [(whole, part, True)] * 2


def test_errors_of_each_matrix_and_of_the_logits():
    plain, tokens = random_model(), prompt(SPEC.vocab)
    model = quant.quantise(copy.deepcopy(plain), format_of("int4").beside("fp32"))
    found = quant.errors(plain, model, tokens)
    assert [layer.name for layer in found.layers] == [
        f"layers.{n}.{name}" for n in range(2) for name in (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj",
                                                             "mlp.up_proj", "mlp.down_proj")]
    up, other = plain.layers[0].mlp.up_proj, model.layers[0].mlp.up_proj.weight
    inputs = []
    hook = up.register_forward_hook(lambda layer, args, out: inputs.append(args[0]))
    z, w = plain(tokens).detach().double(), model(tokens).double()
    hook.remove()
    first = next(layer for layer in found.layers if layer.name == "layers.0.mlp.up_proj")
    assert first.weight == pytest.approx(((up.weight - other).norm() / up.weight.norm()).item())
    y = up(inputs[0])
    assert first.output == pytest.approx(((y - F.linear(inputs[0], other, up.bias)).norm() / y.norm()).item())
    p, q = z.softmax(-1), w.softmax(-1)
    assert found.kl == pytest.approx((p * (p / q).log()).sum(-1).mean().item())
    assert found.same == (z.argmax(-1) == w.argmax(-1)).double().mean().item()
    z, w = z - z.mean(-1, keepdim=True), w - w.mean(-1, keepdim=True)
    assert found.logits == pytest.approx(((z - w).norm() / z.norm()).item())
    assert not plain.layers[0].mlp.up_proj._forward_hooks


def test_fewer_bits_err_more_and_no_change_errs_nothing():
    plain, tokens = random_model(), prompt(SPEC.vocab)
    found = {name: quant.errors(plain, quant.quantise(copy.deepcopy(plain), format_of(name).beside("fp32")), tokens)
             for name in FORMATS}
    for measure in ("logits", "kl"):
        assert getattr(found["int8"], measure) < getattr(found["fp8"], measure) < getattr(found["int4"], measure)
    assert quant.errors(plain, copy.deepcopy(plain), tokens) == ([], 0, pytest.approx(0, abs=1e-12), 1)
    quantised = quant.quantise(copy.deepcopy(plain), format_of("int8").beside("fp32"))
    same = quant.errors(unpacked(quantised, plain), quantised, tokens)
    assert {error for layer in same.layers for error in layer[1:]} == {0} and same.logits == 0


def test_a_plain_dtype_is_a_format_too():
    plain = random_model()
    model = quant.quantise(copy.deepcopy(plain), "bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert held(model) == memory(SPEC, dtype="bf16").weights == held(plain) // 2


@pytest.mark.parametrize("form", ["mxfp4", "fp4-fp8", format_of("bf16").beside("fp32")])
def test_a_format_that_is_known_by_its_size_only_is_refused(form):
    with pytest.raises(ValueError, match=r"(mxfp4|bf16) matrices beside .* are not computed here: use one of int8, "):
        quant.quantise(random_model(), form)


def test_what_cannot_be_quantised_is_refused_unchanged(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"unknown dtype 'int3'.*int8, int4, fp8"):
        quant.quantise(random_model(), "int3")
    model = quant.quantise(random_model(), "int8")
    for again in (lambda: quant.quantise(model, "int4"), lambda: quant.load(model, tiny("llama"), "int4")):
        with pytest.raises(ValueError, match="this model is quantised already"):
            again()
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on meta: quant.load\(model, folder, 'int8'\)"):
        quant.quantise(meta(tiny("llama")), "int8")
    broken, tokens = random_model(), prompt(SPEC.vocab)
    broken.layers[1].mlp.up_proj.weight.data[3, 4] = torch.inf
    training = random_model()
    training.loss(tokens, tokens).backward()
    for unfit, said in ((broken, "layers.1.mlp.up_proj.weight holds nan or inf"), (training, "has a gradient")):
        before = copy.deepcopy(unfit.state_dict())
        with pytest.raises(ValueError, match=said):
            quant.quantise(unfit, "int8")
        assert all(torch.equal(value, before[key]) for key, value in unfit.state_dict().items())
    with pytest.raises(ValueError, match="if it was quantised, save it before that"):
        checkpoint.save(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="does not fit model: missing"):
        checkpoint.load(model, tiny("llama"))
    with pytest.raises(ValueError, match="differ in shape"):
        quant.errors(from_folder(tiny("llama")), model, tokens)
