"""Streamed weights: the same bits, the time of the link, and nothing left behind, whatever fails."""

import copy
import threading
import time

import pytest
import torch
from checkpoints import prompt

from shardlab import offload, quant
from shardlab.model import Transformer, from_folder, initialise
from shardlab.parallel import tensor
from shardlab.specs import ModelSpec, find_link, format_of

SPEC = ModelSpec(hidden=32, layers=5, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=101)
TOKENS = prompt(SPEC.vocab, batch=1, seq=4)
FETCH = 0.04  # seconds a layer, far above what so small a layer computes and the clock's noise


@pytest.fixture
def model():
    return initialise(Transformer(SPEC))


def workers():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("offload")]


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    assert not workers()


def layer_bytes(model):
    return sum(parameter.nbytes for parameter in model.layers[0].parameters())


def slow(model, seconds):
    """Let every layer compute for at least `seconds`."""
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda *_: time.sleep(seconds))


@torch.no_grad()
def timed(model, stream, expected):
    """Seconds of a pass, the best of three as soon as one is near: a busy machine may be late, never early."""
    best = float("inf")
    for _ in range(3):
        before, began = stream.waited, time.perf_counter()
        model(TOKENS)
        best = min(best, time.perf_counter() - began)
        if best < 1.1 * expected:
            break
    return best, stream.waited - before


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("kind", ["bias", "odd", "qwen3-tied"])
@torch.no_grad()
def test_every_bit_is_that_of_the_plain_model(tiny, kind, prefetch):
    plain = from_folder(tiny(kind))
    streamed, tokens = copy.deepcopy(plain), prompt(plain.spec.vocab)
    with offload.Stream(streamed, prefetch=prefetch) as stream:
        for _ in range(2):
            assert torch.equal(streamed(tokens), plain(tokens))
        assert torch.equal(streamed.generate(tokens, 6), plain.generate(tokens, 6))
    assert stream.fetched == (2 + 6) * plain.spec.layers * layer_bytes(plain)  # generating reads the prompt once
    assert torch.equal(streamed(tokens), plain(tokens))
    assert all(torch.equal(a, b) for a, b in zip(streamed.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(("prefetch", "resident", "rooms"), [(True, 0, 2), (False, 0, 1), (True, 2, 2), (False, 4, 1)])
@torch.no_grad()
def test_the_card_holds_rooms_and_what_stays(model, prefetch, resident, rooms, monkeypatch):
    places, copied, real = [], [], offload.copy
    monkeypatch.setattr(offload, "copy", lambda home, *rest: [copied.append(home[0].data_ptr()), real(home, *rest)])
    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(lambda mlp, _: places.append(mlp.up_proj.weight.data_ptr()))
    at_home = [layer.mlp.up_proj.weight.data_ptr() for layer in model.layers]
    expected, places[:] = model(TOKENS), []
    with offload.Stream(model, prefetch=prefetch, resident=resident) as stream:
        for _ in range(2):
            assert torch.equal(model(TOKENS), expected)
        assert [layer.mlp.up_proj.weight.data_ptr() for layer in model.layers] == at_home
        rest = sum(p.nbytes for part in (model.embed_tokens, model.norm, model.lm_head) for p in part.parameters())
        assert stream.held == (rooms + resident) * layer_bytes(model) + rest
    assert places[:resident] == places[5:][:resident] == at_home[:resident]
    streamed = {*places[resident:5], *places[5:][resident:]}
    assert len(streamed) == min(rooms, 5 - resident) and not streamed & set(at_home)
    assert copied == [next(layer.parameters()).data_ptr() for layer in model.layers][resident:] * 2
    assert stream.fetched == len(copied) * layer_bytes(model)


@pytest.mark.parametrize(("prefetch", "resident", "compute", "layers"), [
    (True, 0, 0.0, 5),  # each waits for its fetch
    (True, 0, 0.04, 6),  # one fetch to begin with, then each hides the other
    (True, 0, 0.06, 5 * 1.5 + 1),  # computing binds
    (True, 2, 0.04, 5),  # while the second resident layer computes, the first fetch is under way
    (False, 0, 0.04, 10),  # one after the other
    (False, 2, 0.04, 8),
])
def test_the_time_is_that_of_the_link_or_of_the_computation(model, prefetch, resident, compute, layers):
    slow(model, compute)
    rate = layer_bytes(model) / FETCH
    with offload.Stream(model, rate, prefetch=prefetch, resident=resident) as stream:
        assert stream.pass_seconds(compute) == pytest.approx(layers * FETCH)
        took, waited = timed(model, stream, layers * FETCH)
        assert took == pytest.approx(layers * FETCH, rel=0.15)
        assert waited == pytest.approx(layers * FETCH - 5 * compute, rel=0.15, abs=0.02)
        assert stream.fetching == pytest.approx(stream.predicted, rel=0.15)


def test_the_prediction_stands_beside_the_measurement(model):
    with offload.Stream(model, "800 kB/s") as stream:
        with torch.no_grad():
            model(TOKENS)
        assert len(workers()) == 1
    assert not workers()
    assert stream.layer_bytes == 36_864 + 256  # four attention matrices, three of the MLP, two norms, in fp32
    assert stream.predicted == 5 * 37_120 / 800_000
    first, second, third = repr(stream).splitlines()
    assert first == "on the card  100.22 kB, with 2 × 37.12 kB for layers"
    assert second == "fetched      185.6 kB at 800 kB/s: 232 ms predicted"
    assert third.startswith("measured     2") and " ms of which the computation waited" in third
    stream.close()  # twice does no harm


@pytest.mark.parametrize("name", ["int8", "int4"])
@torch.no_grad()
def test_what_travels_is_what_is_held(model, name):
    quant.quantise(model, format_of(name).beside("fp32"))
    expected = model(TOKENS)
    with offload.Stream(model) as stream:
        assert torch.equal(model(TOKENS), expected)
    packed = sum(format_of(name).beside("fp32").of(tensor.group, tensor.shape).nbytes(tensor.shape)
                 for tensor in SPEC.layer_tensors())
    assert stream.layer_bytes == packed == layer_bytes(model)


def streamed_part(group):
    cut = tensor.cut(initialise(Transformer(SPEC)), group)
    with torch.no_grad():
        expected = cut(TOKENS)
        with offload.Stream(cut) as stream:
            return torch.equal(cut(TOKENS), expected), stream.fetched


def test_a_cut_model_streams_its_parts(pool):
    norms = 2 * 4 * SPEC.hidden
    assert pool(2).run(streamed_part) == [(True, 5 * ((layer_bytes(Transformer(SPEC)) - norms) // 2 + norms))] * 2


@torch.no_grad()
def test_an_error_of_the_link_reaches_the_caller_and_the_next_pass_is_whole(model, monkeypatch):
    expected, down, real = model(TOKENS), [3], offload.copy

    def breaks(*args):
        down[0] -= 1
        if down[0] == 0:
            raise OSError("the link is down")
        real(*args)

    monkeypatch.setattr(offload, "copy", breaks)
    with offload.Stream(model) as stream:
        with pytest.raises(OSError, match="the link is down"):
            model(TOKENS)
        assert stream.fetched == 2 * stream.layer_bytes
        assert torch.equal(model(TOKENS), expected)


@torch.no_grad()
def test_an_error_in_a_layer_leaves_weights_at_home_and_the_next_pass_whole(model):
    expected, before = model(TOKENS), [parameter.data_ptr() for parameter in model.parameters()]

    def fails(*_):
        raise ArithmeticError("no such number")

    with offload.Stream(model):
        hook = model.layers[2].mlp.register_forward_hook(fails)
        with pytest.raises(ArithmeticError):
            model(TOKENS)
        assert [parameter.data_ptr() for parameter in model.parameters()] == before
        hook.remove()
        assert torch.equal(model(TOKENS), expected)


@torch.no_grad()
def test_closing_does_not_wait_for_a_slow_link(model):
    def fails(*_):
        raise ArithmeticError("no such number")

    model.layers[0].mlp.register_forward_hook(fails)
    began = time.perf_counter()
    with pytest.raises(ArithmeticError), offload.Stream(model, "1 kB/s", resident=1):
        model(TOKENS)  # fails while the second layer is under way for 37 s
    assert time.perf_counter() - began < 5


def test_what_cannot_be_streamed_is_refused(model):
    with torch.device("meta"):
        empty = Transformer(SPEC)
    uneven = initialise(Transformer(SPEC))
    uneven.layers[1].mlp.up_proj = torch.nn.Linear(32, 65)
    for unfit, options, said in (
            (empty, {}, "embed_tokens.weight is on meta: a model is streamed from host memory"),
            (uneven, {}, "differ in shape"),
            (model, dict(resident=5), "resident = 5 of 5 layers leaves none to stream"),
            (model, dict(resident=-1), "resident must be a whole number of at least 0"),
            (model, dict(bandwidth=0), "bandwidth must be a number above 0"),
            (model, dict(bandwidth="2 GB"), r"bandwidth = '2 GB': write a number and its unit, as in \"450 GB/s\"")):
        with pytest.raises(ValueError, match=said):
            offload.Stream(unfit, **options)
    with offload.Stream(model, find_link("pcie5").per_direction):
        with pytest.raises(ValueError, match="streamed already"):
            offload.Stream(model)
        with pytest.raises(ValueError, match=r"gone before a backward pass: use torch.no_grad\(\)"):
            model(TOKENS)
    offload.Stream(model).close()
