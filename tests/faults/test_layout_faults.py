"""FAULTS.md where axes are put together: what shows only in composition.

| row        | where it is held                                                                                     |
|------------|------------------------------------------------------------------------------------------------------|
| D5–D7      | here, under whole layouts; for one axis in tests/train (test_train_data, test_loop)                   |
| D8, D9     | here: one scale whatever the layout; the rest in test_pipeline_faults                                 |
| D11, D12   | here: the norm over stages, replicas, slices and experts at once                                      |
| P3, P6     | here: a tied embedding on two stages, and backward in halves, with replicas and ZeRO-1                |
| T3, T4, Z6 | here: norms of a cut stream, KV heads on several ranks, tied weights, with replicas                   |
| E3, X2     | here: experts over data × tensor and in a pipeline; a cut sequence in a pipeline                      |
| C9, 32     | here: who stands where, in every order of the axes; in tests/specs how many they are                  |

The matrix (tests/parity/test_layouts.py) has each of these layouts too; a case that fails there fails here by name.
"""

import math
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab import comm
from shardlab.model import Transformer, initialise
from shardlab.parallel import grads, layout, rng, tensor
from shardlab.parallel.layout import axes_of
from shardlab.specs import Experts, Layout, ModelSpec
from shardlab.train import Batches, text, train

sys.path.append(str(Path(__file__).parents[1] / "parity"))
import layouts
from layout_cases import Case

TOGETHER = {
    "p3: tied on two stages, replicas": Case(Layout(dp=2, pp=2, microbatches=3), optimizer="momentum"),
    "p3: tied on two stages, ZeRO-1": Case(Layout(dp=2, pp=2, zero=1, microbatches=3)),
    "p3: tied on two stages, tensor axis": Case(Layout(2, pp=2, sp="keep", microbatches=2)),
    "p6: backward in halves, replicas": Case(Layout(dp=2, pp=2, schedule="zero_bubble", microbatches=3), tied=False),
    "p6: in halves, slices of the stream": Case(Layout(2, pp=2, sp="again", schedule="dualpipe_v", microbatches=4,
                                                       chunks=2)),
    "t3: norms of a cut stream, replicas": Case(Layout(2, dp=2, sp="keep", microbatches=2), optimizer="momentum"),
    "t3: norms of a cut stream, ZeRO-3": Case(Layout(2, dp=2, zero=3, sp="again", microbatches=2)),
    "t4: KV heads on two ranks, replicas": Case(Layout(4, dp=2, zero=1, microbatches=2)),
    "z6: tied, ZeRO-2, tensor axis": Case(Layout(2, dp=2, zero=2, microbatches=2), tied=True),
    "e3: experts over data × tensor": Case(Layout(2, dp=2, ep=4, etp=1, microbatches=2), moe=True),
    "e3: replicas of experts, cut ones": Case(Layout(2, dp=2, microbatches=2), moe=True, optimizer="momentum"),
    "e3: experts in a pipeline": Case(Layout(dp=2, pp=2, ep=2, zero=1, microbatches=2), moe=True),
    "x2: a cut sequence in a pipeline": Case(Layout(cp=2, pp=2, microbatches=3), labels="one without"),
    "x2: a cut sequence, a cut stream": Case(Layout(2, cp=2, sp="keep", microbatches=2), labels="one without"),
}


@pytest.mark.parametrize("case", TOGETHER.values(), ids=TOGETHER)
def test_together_they_are_the_plain_model(pool, case):
    layouts.parity(pool, [case])


# data: who gets which


SPEC = ModelSpec(hidden=16, layers=4, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=256, tied=True)


def plain(spec=SPEC, dropout=0.0):
    return initialise(Transformer(spec, dropout=dropout), std=0.2).double()


def given(group, how):
    """What each rank is given in two steps, in one number, and its place."""
    batches, seen = Batches(text()[:2000], seq=6, batch=8, accumulation=how.microbatches), []

    def look(*place):
        parts = batches(*place)
        seen.append([each.tolist() for part in parts for each in part])
        return parts

    cut = layout.cut(plain(), how, partial(torch.optim.SGD, lr=0.1))
    train(cut.model, cut.optimizer, look, range(2), cut.axes.data, progress=False, orders=how.orders)
    return repr(seen), how.place(dist.get_rank())["dp"]


@pytest.mark.parametrize("how", [
    Layout(2, dp=2, microbatches=2), Layout(dp=2, cp=2, microbatches=2), Layout(2, dp=2, pp=2, microbatches=2),
    Layout(dp=2, cp=2, pp=2, zero=1, microbatches=2), Layout(dp=2, pp=2, order="tp-dp-pp", microbatches=2)],
    ids=lambda how: how.degrees)
def test_d6_a_replica_s_ranks_get_one_batch_and_replicas_others(pool, how):
    """accelerate#3092: of each tensor, context and pipeline rank its own. torchtitan#49: of replicas the same."""
    outcomes = pool(how.world_size).run(given, how)
    for (one, at), (other, there) in product(outcomes, outcomes):
        assert (one == other) == (at == there)


def streams(group, how):
    """Whether torch's own stream of numbers stands where it stood, after an epoch with dropout; and it itself."""
    torch.manual_seed(5)
    batches = Batches(text()[:300], seq=6, batch=16, accumulation=how.microbatches)
    cut = layout.cut(plain(dropout=0.3), how, partial(torch.optim.SGD, lr=0.1))
    before = torch.random.get_rng_state()
    train(cut.model, cut.optimizer, batches, range(batches.steps), cut.axes.data, progress=False, orders=how.orders)
    return torch.equal(before, torch.random.get_rng_state()), before.tolist()


@pytest.mark.parametrize("how", [Layout(2, dp=2, sp="keep", microbatches=2), Layout(2, pp=2, microbatches=2),
                                 Layout(cp=2, dp=2, microbatches=2)], ids=lambda how: how.degrees)
def test_d7_an_epoch_takes_no_number_from_any_ranks_own_stream(pool, how):
    """Megatron-DeepSpeed#276: the loader drew on the first tensor rank alone, and dropout went apart."""
    outcomes = pool(4).run(streams, how)
    assert all(stands for stands, _ in outcomes)


def dropped(group, how):
    """What dropout's streams begin with on this rank, by name, at one step of one seed."""
    cut = layout.cut(plain(dropout=0.3), how)
    rng.seed(cut.model, 7, how.place(dist.get_rank())["dp"], 3)
    return {name: module.generator.initial_seed() for name, module in cut.model.named_modules()
            if hasattr(module, "generator")}, how.place(dist.get_rank())


@pytest.mark.parametrize(("how", "apart"), [
    (Layout(2, dp=2, microbatches=2), ("dp",)), (Layout(2, dp=2, sp="keep", microbatches=2), ("dp", "tp")),
    (Layout(2, cp=2, microbatches=2), ("cp",)), (Layout(2, cp=2, sp="again", microbatches=2), ("cp", "tp")),
    (Layout(2, pp=2, microbatches=2), ())], ids=lambda value: getattr(value, "degrees", ""))
def test_t9_ranks_drop_alike_what_they_hold_alike(pool, how, apart):
    """The stream between layers is dropped alike on ranks that hold the same of it; attention's heads never are."""
    outcomes = pool(4).run(dropped, how)
    for (one, at), (other, there) in product(outcomes, outcomes):
        same = all(at[axis] == there[axis] for axis in apart)
        for name in one.keys() & other.keys():
            alike = same and (not name.endswith("self_attn.dropout") or at["tp"] == there["tp"])
            assert (one[name] == other[name]) == alike, name


# numbers of micro-batches and labels


def uneven(group, how):
    """Gradients of five micro-batches on one replica and three on the other, which goes on with two that are empty."""
    cut = layout.cut(plain(), how, partial(torch.optim.SGD, lr=0.1), bucket_bytes=4000)
    parts = micro(8)
    mine = parts[:5] if how.place(dist.get_rank())["dp"] == 0 else [*parts[5:], *((a[:0], b[:0]) for a, b in parts[:2])]
    seen = {}
    cut.optimizer.register_step_pre_hook(lambda *_: seen.update(layouts.gradients(cut.model)))
    (step,) = train(cut.model, cut.optimizer, lambda *_: mine, range(1), cut.axes.data, math.inf, progress=False,
                    orders=how.orders)
    alone = plain()
    valid = sum(int((labels >= 0).sum()) for _, labels in parts)
    loss = sum(alone.loss(*part, valid) for part in parts)
    loss.backward()
    theirs = {name: p.grad for name, p in alone.named_parameters()}
    return abs(step.loss - loss.item()), layouts.apart(theirs, seen, cut.model), step.tokens == valid


def micro(count, seq=6):
    """Micro-batches of one sequence, no two with the same tokens, the i-th with i % seq + 1 labels."""
    out = []
    for i in range(count):
        tokens = (torch.arange(seq) * 7 + 13 * i).view(1, seq) % 256
        out.append((tokens, ((tokens * 3 + 1) % 256).where(torch.arange(seq) <= i % seq, -100)))
    return out


@pytest.mark.parametrize("how", [
    Layout(2, dp=2, microbatches=5), Layout(dp=2, pp=2, microbatches=5), Layout(dp=2, pp=2, zero=1, microbatches=5),
    Layout(dp=2, cp=2, zero=3, microbatches=5)], ids=lambda how: how.degrees)
def test_d5_a_replica_with_fewer_batches_goes_on_with_empty_ones(pool, how):
    """pytorch#38174: ranks with fewer batches left the others waiting. And the mean is over all labels (D8)."""
    for loss, gradients, counted in pool(4).run(uneven, how):
        assert loss < 1e-12 and gradients < 1e-12 and counted


def split(group, how, parts):
    """The gradients of some micro-batches under a layout."""
    cut = layout.cut(plain(), how, partial(torch.optim.SGD, lr=0.1), bucket_bytes=4000)
    seen = {}
    cut.optimizer.register_step_pre_hook(lambda *_: seen.update(layouts.gradients(cut.model)))
    batches = lambda step, place, size: parts[place::size]  # noqa: E731
    train(cut.model, cut.optimizer, batches, range(1), cut.axes.data, math.inf, progress=False, orders=how.orders)
    return {name: each.norm().item() for name, each in seen.items()}


def test_d9_gradients_have_one_scale_whatever_the_layout_and_the_number_of_micro_batches(pool):
    """torchtitan#2972, picotron: a pipeline's were micro-batches times too large."""
    rows = micro(8)
    alone = plain()
    alone.loss(*(torch.cat(each) for each in zip(*rows, strict=True))).backward()
    expected = {name: p.grad.norm().item() for name, p in alone.named_parameters()}
    for count in (2, 4, 8):
        parts = [tuple(map(torch.cat, zip(*rows[i :: count], strict=True))) for i in range(count)]
        for how in (Layout(dp=2, pp=2, microbatches=count // 2), Layout(dp=2, cp=2, microbatches=count // 2),
                    Layout(pp=4, schedule="zero_bubble", microbatches=count)):
            for seen in pool(4).run(split, how, parts):
                assert seen == pytest.approx({name: expected[name] for name in seen}, rel=1e-10)


# the norm


MIXTURE = ModelSpec(hidden=16, layers=4, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=256, tied=True,
                    experts=Experts(routed=4, active=2, ffn=7, shared=1, first_dense=1))


def norms(group, how, spec):
    cut = layout.cut(plain(spec), how, partial(torch.optim.SGD, lr=0.1), bucket_bytes=4000)
    seen = []
    cut.optimizer.register_step_pre_hook(lambda *_: seen.extend(grads.norm(cut.model, p).item()
                                                                for p in (1, 2, math.inf)))
    batches = lambda step, place, size: micro(4)[place::size]  # noqa: E731
    train(cut.model, cut.optimizer, batches, range(1), cut.axes.data, math.inf, progress=False, orders=how.orders)
    return seen


@pytest.mark.parametrize(("how", "spec"), [
    (Layout(2, dp=2, pp=2, sp="keep", zero=1, microbatches=2), SPEC),
    (Layout(dp=2, cp=2, pp=2, microbatches=2, schedule="interleaved", chunks=2), SPEC),
    (Layout(2, dp=2, pp=2, ep=2, microbatches=2), MIXTURE),
    (Layout(2, dp=2, cp=2, ep=4, etp=1, zero=2, microbatches=2), MIXTURE),
], ids=lambda each: getattr(each, "degrees", ""))
def test_d11_d12_the_norm_over_all_axes_is_one_process_s(pool, how, spec):
    """torchtitan#596: of each stage for itself. DeepSpeed#5259, #8475: experts' averaged, or left out."""
    alone = plain(spec)
    parts = micro(4)
    valid = sum(int((labels >= 0).sum()) for _, labels in parts)
    for tokens, labels in parts:
        real = (labels >= 0).flip(-1).cumsum(-1).flip(-1) > 0
        alone.loss(tokens, labels, valid, real=real if spec.experts else None).backward()
    whole = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
    expected = [torch.linalg.vector_norm(whole, p).item() for p in (1, 2, math.inf)]
    for seen in pool(8).run(norms, how, spec):
        assert seen == pytest.approx(expected, rel=1e-10)


# who stands where


def stands(group, hows):
    """For each layout this rank's place by its groups, and by `Layout`; and how many ranks those groups have."""
    out = []
    for how in hows:
        axes, place = axes_of(how), how.place(dist.get_rank())
        groups = dict(pp=axes.pp, cp=axes.cp, tp=axes.tp, ep=axes.ep)
        mine = {axis: 0 if group is None else group.rank() for axis, group in groups.items()}
        data = 0 if axes.data is None else axes.data.rank()
        sizes = {axis: 1 if group is None else group.size() for axis, group in groups.items()}
        same = 1 if axes.replicas is None else axes.replicas.size()
        out.append((mine | {"dp": data // how.cp}, place, data % how.cp == place["cp"],
                    same == (how.expert_replicas if how.ep > 1 else 1),  # else experts lie as the rest does
                    sizes == {axis: getattr(how, axis) for axis in groups}))
    return out


ORDERS = ["pp-dp-tp", "pp-tp-dp", "dp-pp-tp", "dp-tp-pp", "tp-pp-dp", "tp-dp-pp"]


@pytest.mark.parametrize("order", ORDERS)
def test_c9_groups_are_where_layout_says_they_are(pool, order):
    """pytorch#25390: groups made of other ranks than the neighbours thought; in every order of the axes."""
    hows = [Layout(2, dp=2, pp=2, order=order, microbatches=2), Layout(dp=2, pp=2, cp=2, order=order, microbatches=2),
            Layout(2, cp=2, pp=2, order=order, microbatches=2)]
    if order in ("pp-dp-tp", "dp-tp-pp"):
        hows += [Layout(2, dp=2, pp=2, ep=ep, etp=etp, order=order, microbatches=2)
                 for ep, etp in ((2, None), (2, 1), (4, 1), (1, 1))]
    for outcomes in pool(8).run(stands, hows):
        for seen, place, *right in outcomes:
            assert seen == place and all(right)


# what is refused, before anything is cut


def untouched(group, how, spec=SPEC, **given):
    """(What `cut` said, whether the model is as it was)."""
    model = plain(spec)
    before = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with comm.record() as ledger, pytest.raises(ValueError) as caught:
        layout.cut(model, how, **({"optimizer": partial(torch.optim.SGD, lr=0.1)} | given))
    after = {name: tuple(p.shape) for name, p in model.named_parameters()}
    marked = any("marks" in vars(module) for module in model.modules())
    held = any(hasattr(model, name) for name in ("reducer", "pipeline", "context"))
    return str(caught.value), before == after and not (ledger.entries or marked or held)


@pytest.mark.parametrize(("how", "given", "words"), [
    (Layout(2, pp=2, schedule="dualpipe", chunks=2, microbatches=4), {}, ("two ranks", "dualpipe_v")),
    (Layout(2, dp=2, zero=2), {"optimizer": None}, ("zero = 2", "give the optimizer")),
    (Layout(2, dp=3), {}, ("dp = 3, tp = 2 is a layout of 6 ranks, and there are 4", "cp · tp = 4")),
    (Layout(8, dp=2), {}, ("tp = 8", "tp can be 1, 2, 4")),
    (Layout(2, pp=2, schedule="interleaved", chunks=3, microbatches=2), {}, ("6 stages", "4 stages at most")),
    (Layout(2, dp=2, ep=2), {}, ("ep = 2", "no experts")),
    (Layout(2, pp=2), {"weights": [1, 2, 3]}, ("4 numbers", "[1, 2, 3]")),
], ids=["dualpipe", "zero", "world", "heads", "stages", "experts", "weights"])
def test_what_cannot_be_cut_is_refused_before_anything_is(pool, how, given, words):
    for said, same in pool(4).run(untouched, how, **given):
        assert all(word in said for word in words) and same, said


def twice(group):
    model = layout.cut(plain(), Layout(2, dp=2)).model
    said = []
    for how in (Layout(2, dp=2), Layout(4), Layout(dp=4), Layout(2, pp=2)):
        with pytest.raises(ValueError) as caught:
            layout.cut(model, how)
        said.append(str(caught.value))
    first = tensor.cut(plain(), axes_of(Layout(2, dp=2)).tp)
    with pytest.raises(ValueError) as caught:
        layout.cut(first, Layout(dp=4))
    return [*said, str(caught.value)]


def test_a_model_that_is_cut_is_not_cut_again(pool):
    for messages in pool(4).run(twice):
        assert all("cut already" in said for said in messages)
