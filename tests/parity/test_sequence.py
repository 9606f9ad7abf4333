"""Sequence parallelism against the plain twin, in float64, on every rank, in both of its modes.

The stream between the layers is cut by tokens: what breaks first is the gradient of what all ranks hold, norms and the
biases of row-parallel layers (FAULTS T3), and whatever does not divide.
"""

import pytest
import torch
from covering import pairs_first
from twins import CASES, EVERYTHING, FROZEN, SIZES, batch, check, check_float32, compare, distances, twins

from shardlab import comm
from shardlab.model import KVCache, Transformer
from shardlab.parallel import grads, tensor
from shardlab.specs import ModelSpec

MODES = ["keep", "again"]
OPTIMIZER = {"keep": "sgd", "again": "adamw"}
# both modes of each kind on the most ranks, and in turns on fewer; both of the plain kind, five steps of it
RUNS = [pytest.param(spec, p, mode, 5 if name == "plain" else 2, id=f"{name}-{p}-{mode}",
                     marks=[pytest.mark.more] * (p < worlds[-1] and name != "plain" and (i + p + j) % 2))
        for i, (name, (spec, worlds)) in enumerate(CASES.items()) for p in worlds for j, mode in enumerate(MODES)]


@pytest.mark.parametrize("sizes,p,mode,steps", RUNS)
def test_a_model_cut_by_tokens_too_is_the_plain_one(pool, sizes, p, mode, steps):
    check(pool(p).run(compare, sizes, optimizer=OPTIMIZER[mode], mode=mode, steps=steps))


@pytest.mark.parametrize("p,mode,optimizer", [(2, "keep", "adamw"), (3, "again", "sgd"), (4, "again", "adamw"),
                                              pytest.param(4, "keep", "sgd", marks=pytest.mark.more)])
def test_through_shared_memory_too(pool, p, mode, optimizer):
    check(pool(p).run(compare, EVERYTHING | dict(kv_heads=1), optimizer=optimizer, mode=mode, transport="shm"))


@pytest.mark.parametrize("p,mode", [(2, "again"), (4, "keep")])
def test_in_float32(pool, p, mode):
    check_float32(pool(p).run(compare, EVERYTHING, optimizer="adamw", mode=mode, dtype=torch.float32))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 7), (3, 3), (2, 5)], ids=lambda shape: "x".join(map(str, shape)))
def test_tokens_that_do_not_divide_and_fewer_than_ranks(pool, shape, mode):
    check(pool(4).run(compare, EVERYTHING, mode=mode, shape=shape))


@pytest.mark.parametrize("p,mode,recompute", pairs_first([3, 4], MODES, ["selective", "full"]))
def test_blocks_computed_again(pool, p, mode, recompute):
    sizes = EVERYTHING | dict(kv_heads=1)
    check(pool(p).run(compare, sizes, optimizer="adamw", mode=mode, recompute=recompute, shape=(2, 5), steps=2))


@pytest.mark.parametrize("frozen", [*FROZEN, tuple(f"layers.1.self_attn.{name}_proj.weight" for name in "qkv"),
                                    ("layers.0.input_layernorm.weight", "norm.weight")])
@pytest.mark.parametrize("mode", MODES)
def test_frozen_weights_stay_frozen_and_the_rest_is_trained(pool, frozen, mode):
    check(pool(2).run(compare, dict(tied=len(frozen) == 1, kv_heads=1), frozen, mode=mode, steps=2))


def calls(group, mode):
    """(phase, op, payload) of every collective of a step, and what a ring would send for them forward."""
    _, cut = twins(EVERYTHING | dict(kv_heads=1), group, mode=mode)
    tokens, labels = batch(101, shape=(2, 6))
    with comm.use("ring"), comm.record() as ledger:
        cut.loss(tokens, labels).backward()
    return [(e.phase, e.op, e.payload) for e in ledger.entries], sum(
        e.wire for e in ledger.entries if e.phase == "forward")


def test_forward_sends_the_bytes_of_tensor_parallelism_and_only_again_sends_more_backward(pool):
    for p in (2, 3, 4):
        plain, keep, again = (pool(p).run(calls, mode)[0] for mode in (False, *MODES))
        assert plain[1] == keep[1] == again[1]
        tokens, layers, row = 12, SIZES["layers"], SIZES["hidden"] * 8
        gathered, summed = (("backward", op, rows * row) for op, rows in (
            ("all_gather", tokens // p), ("reduce_scatter", tokens)))
        for entries, gathers in ((keep[0], 2 * layers + 1), (again[0], 4 * layers + 2)):
            assert entries.count(gathered) == gathers and entries.count(summed) == 2 * layers + 1


def kept(group, mode):
    """Numbers of the stream that autograd keeps: of all tokens, and of this rank's."""
    _, cut = twins({}, group, mode=mode)
    tokens, labels = batch(101, shape=(2, 6))
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = tuple(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        cut.loss(tokens, labels)
    shapes = list(storages.values())
    return shapes.count((12, 24)), shapes.count((12 // group.size(), 24))


def test_again_keeps_slices_and_keep_keeps_the_gathered_input(pool):
    inputs = 2 * SIZES["layers"] + 1  # of attention and feed-forward blocks, and of the head
    keep, again = (pool(3).run(kept, mode)[0] for mode in MODES)
    assert keep[0] == inputs and again[0] == 0 and again[1] > 0


def whole(group, mode):
    """What callers get is whole: hidden states with their gradient, logits, and text with and without a cache."""
    plain, cut = twins(EVERYTHING, group, mode=mode)
    tokens, _ = batch(101, shape=(3, 5))
    weight = torch.linspace(-1, 1, 24, dtype=torch.float64)
    for model in (plain, cut):
        (model.hidden(tokens) * weight).sum().backward()
    grads.finish(cut)
    distance = distances(plain, cut, lambda p: p.grad)
    with torch.no_grad():
        same = [torch.allclose(plain.hidden(tokens), cut.hidden(tokens), atol=1e-12, rtol=0)]
        cache = KVCache(2, 9)
        parts = [cut(part, cache=cache) for part in (tokens[:, :3], tokens[:, 3:])]
        same += [torch.allclose(torch.cat(parts, 1), plain(tokens), atol=1e-11, rtol=0)]
    texts = [model.generate(tokens, 6, cached=cached) for model in (plain, cut) for cached in (True, False)]
    return distance, same + [torch.equal(text, texts[0]) for text in texts]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", [2, 4])
def test_what_the_caller_gets_is_whole(pool, p, mode):
    for distance, same in pool(p).run(whole, mode):
        assert distance < 1e-10 and all(same), same


def test_a_mode_that_there_is_not_is_refused(pool):
    def refused(group):
        said = []
        for mode in (True, "kept", None, 0):
            try:
                tensor.cut(Transformer(ModelSpec(**SIZES)), group, mode)
            except ValueError as error:
                said.append(str(error).partition(":")[0])
        return said

    for p in (1, 2):
        assert pool(p).run(refused)[0] == [f"sequence_parallel must be False, 'keep' or 'again', not {mode}"
                                           for mode in ("True", "'kept'", "None", "0")]
