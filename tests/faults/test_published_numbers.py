"""FAULTS.md, numbers that published books and courses got wrong: the library gets them right, and their whole kind."""

import re
import runpy
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from formats import SCALES, write

from shardlab import comm
from shardlab.cost import (
    bound,
    bytes_read,
    collective_seconds,
    forward_flops,
    kv_cache,
    memory,
    messages,
    training_flops,
    transfer_seconds,
    utilisation,
)
from shardlab.model.mlp import MLP
from shardlab.model.transformer import Transformer
from shardlab.parallel import data, grads, mesh, zero
from shardlab.specs import (
    ClusterSpec,
    Layout,
    ModelSpec,
    Topology,
    bundled_cards,
    bundled_links,
    bundled_models,
    find_card,
    find_model,
    units,
)
from shardlab.specs.quantity import quantity

ROOT = Path(__file__).parents[2]
GIB = 2**30
CARDS = bundled_cards().values()


def plain(text):
    return text.replace("\u00a0", " ")


def test_1_the_vocabulary_is_counted_once_and_not_in_every_layer():
    """scaling-book#34: 26.7B has the embedding in each of 64 layers; 18.4B has it once."""
    spec = ModelSpec(hidden=4096, layers=64, heads=32, kv_heads=8, head_dim=256, ffn=16384, vocab=32128, tied=True)
    counts = spec.parameters
    matrices = counts["attention"] + counts["mlp"] + counts["embedding"]
    assert matrices == 64 * 4096 * (3 * 16384 + 2 * 256 * 40) + 4096 * 32128 == spec.total - counts["norms"]
    assert spec.total == pytest.approx(18.385e9, rel=1e-4)
    assert spec.total + 63 * counts["embedding"] == pytest.approx(26.7e9, rel=2e-3)  # how the wrong one comes about
    deeper = replace(spec, layers=65)
    assert deeper.total - spec.total == sum(tensor.size for tensor in spec.layer_tensors())


def test_2_training_is_six_flop_for_each_active_parameter():
    """scaling-book, DeepSeek-V3: 2.79e6 GPU hours at 1513 TFLOP/s in fp8 are 21.6% used; 7.2% counts forward alone."""
    v3, hours = find_model("deepseek-v3"), 2.79e6
    flop = training_flops(37e9, 14.8e12)
    assert utilisation(flop, hours * 3600, 1, 1513e12) == pytest.approx(0.216, rel=2e-3)
    assert utilisation(flop / 3, hours * 3600, 1, 1513e12) == pytest.approx(0.072, rel=3e-3)
    assert training_flops(v3.active, 1) == 3 * 2 * v3.active
    per_token = forward_flops(v3, 4096) / 4096
    assert 2 * v3.active < per_token < 2.5 * v3.active < 2 * v3.total / 10


@pytest.mark.parametrize(("stage", "whole"), [
    (0, {"weights", "gradients", "states"}), (1, {"weights", "gradients"}), (2, {"weights"}), (3, set())])
def test_3_zero_shares_out_the_optimizer_first_and_the_weights_last(stage, whole):
    """scaling-book had weights, gradients, optimizer. The run holds as much: tests/parity/test_bytes_data.py."""
    spec = find_model("smollm2-135m")
    alone, shared = (memory(spec, Layout(dp=dp, zero=stage if dp > 1 else 0), training=True) for dp in (1, 8))
    for kind in ("weights", "gradients", "moments"):
        part = 1 if kind.replace("moments", "states") in whole else 8
        assert getattr(shared, kind) == pytest.approx(getattr(alone, kind) / part, rel=1e-6)  # but for padding


def one_step(_group, stage):
    """A step of ZeRO's `stage`, 0 being plain data parallelism, by messages in rings: its calls, and bytes of weights.

    Each call as (op, phase, payload), and what this rank sent for it."""
    group = mesh.build(dp=4).get_group("dp")
    model = Transformer(ModelSpec(hidden=16, layers=2, heads=4, kv_heads=4, head_dim=4, ffn=32, vocab=64))
    optimizer = torch.optim.AdamW(model.parameters())
    _ = zero.shard(model, optimizer, group, stage) if stage else data.replicate(model, group)
    tokens = torch.arange(12).view(2, 6)
    with comm.use("ring"), comm.record() as ledger:
        model.loss(tokens, tokens + 1, 4 * tokens.numel()).backward()
        grads.finish(model)
        optimizer.step()
    return ([(e.op, e.phase, e.payload, e.wire) for e in ledger.entries], model.spec.total * 4)


@pytest.mark.parametrize("stage", [1, 2])
def test_4_zero_sends_gradients_and_weights_and_no_optimizer_state(pool, stage):
    """ml-engineering#122: "all-gather of optimizer states". Counted: gradients reduce-scattered, weights gathered."""
    for calls, weights in pool(4).run(one_step, stage):
        moved = {(op, phase): sum(n for o, p, n, _ in calls if (o, p) == (op, phase)) for op, phase, *_ in calls}
        used = moved.pop(("all_reduce", "finish"))  # a byte a parameter: whether a rank has used it
        assert used == 3 + 2 * 9
        assert moved == {("reduce_scatter", "backward"): weights, ("all_gather", "step"): weights // 4}


def test_5_zero_1_and_2_send_what_plain_data_parallelism_sends(pool):
    """ttsugriy 1077bb6 had twice as much. Counted at every send: 2 (N − 1)/N · S, and stage 3 half as much again."""
    sent = []
    for stage in range(4):
        for calls, weights in pool(4).run(one_step, stage):
            sent.append((stage, sum(wire for _, phase, _, wire in calls if phase != "finish"), weights))
    assert {wire for stage, wire, _ in sent if stage < 3} == {2 * 3 / 4 * weights for _, _, weights in sent}
    third = {wire for stage, wire, _ in sent if stage == 3}
    ends = (2 * 64 + 1) * 16 * 4  # embedding, norm and head are gathered once, not twice
    assert third == {3 / 4 * (3 * weights - ends) for _, _, weights in sent}


def test_6_an_all_gather_of_everything_takes_what_everything_takes():
    """scaling-book#128: (N − 1) B / (N W) is nearly B/W for many ranks, not B/(N W). B is the whole, W the rate."""
    link, whole = bundled_links()["ethernet-25"], 2**30
    at_once = whole / link.per_direction
    for ranks in (2, 8, 1024, 2**20):
        took = collective_seconds("all_gather", "ring", whole / ranks, ranks, link)
        assert took == pytest.approx((ranks - 1) / ranks * at_once)
        assert took == pytest.approx((ranks - 1) * (at_once / ranks))  # N − 1 times the wrong one
    assert took == pytest.approx(at_once, rel=1e-6)
    topology = Topology(nodes=64, per_node=1, between=link)
    played = transfer_seconds(messages("all_gather", "ring", whole // 64, 1, 64), topology)
    assert played == pytest.approx(63 / 64 * at_once)


def test_11_chinchillas_optimum_is_91_billion():
    """√(1e24 / 120), of 6 · N · 20 N FLOP: 9.1e10 parameters, and not 2.9e10, which spends a tenth."""
    assert training_flops(9.13e10, 20 * 9.13e10) == pytest.approx(1e24, rel=2e-3)
    assert training_flops(2.9e10, 20 * 2.9e10) == pytest.approx(1e23, rel=0.02)


def test_12_what_binds_is_decided_by_the_numbers():
    """ml-engineering#27: 0.053 s of bytes and 0.42 s of arithmetic were called bound by the bytes."""
    for card in CARDS:
        arithmetic, read = 0.42 * card.flop_rate("bf16"), 0.053 * card.hbm
        assert bound(arithmetic, read, card) == "compute"
        assert bound(arithmetic * 0.053 / 0.42, read * 0.42 / 0.053, card) == "memory"


def test_13_every_rate_is_dense_and_a_headline_is_another_field():
    """cs249r#1825: 312 TFLOP/s is A100's; 1,979 is H100's with sparsity in bf16, and dense in fp8."""
    assert (find_card("a100").flop_rate("bf16"), find_card("h100").flop_rate("bf16")) == (312e12, 989e12)
    for card in CARDS:
        for dtype, rate in card.flops.items():
            assert card.flop_rate(dtype) == rate
            assert card.headline(dtype) == (2 * rate if card.sparse else None)
        if "fp8" in card.flops:  # half the bits, twice the rate: a dense figure beside a sparse one would be off by 2
            factor = 4 if card.name == "rubin" else 2
            assert card.flop_rate("fp8") == pytest.approx(factor * card.flop_rate("bf16"), rel=0.1)


def test_15_what_is_not_cut_bounds_what_cutting_gains():
    """cs249r#1009, Amdahl: with 80% serial, 1.25 times as fast is the most, never 5. Here: a latent cache, whole on
    every rank, is 80% of what a step reads."""
    v3 = find_model("deepseek-v3")
    weights = bytes_read(v3, dtype="fp8", batch=1, context=1)
    context = round(4 * weights / (kv_cache(v3, 10**6) / 10**6))
    share = kv_cache(v3, context) / bytes_read(v3, dtype="fp8", context=context)
    assert share == pytest.approx(0.8, rel=1e-3)
    gains = [bytes_read(v3, dtype="fp8", context=context) / bytes_read(v3, Layout(tp), dtype="fp8", context=context)
             for tp in (2, 16, 128)]
    assert gains == pytest.approx([1 / (share + (1 - share) / tp) for tp in (2, 16, 128)], rel=0.01)
    assert gains == sorted(gains) and gains[-1] < 1 / share < 1.251


@pytest.mark.parametrize(("text", "means"), [
    ("1.8 GB/s", 1.8e9), ("1.8 TB/s", 1.8e12), ("235 Gbit/s", 235e9 / 8), ("235 GB/s", 235e9)])
def test_16_bits_bytes_and_prefixes_are_read_as_written(text, means):
    """ml-engineering#31: 1.8 GBps for TBps, 235 Gbps for GBps."""
    assert quantity("link", text, "B/s") == means
    assert plain(write(means, text.split()[1])) == text


@pytest.mark.parametrize("text", ["1.8 GBps", "235 Gbps", "235 Gb/s", "235 gb/s", "235 GiB", "235", "1.8 tb/s", 235])
def test_16_what_could_be_either_is_refused(text):
    with pytest.raises(ValueError, match=r"^link = .*: write a number and its unit"):
        quantity("link", text, "B/s")


def test_17_a_servers_rate_is_that_of_its_ports_one_way():
    """ml-engineering: DGX H100 has 8 × 400 Gbit/s, not 8 × 200; A100 80GB reads 2.0 TB/s from HBM2e, not 1.6."""
    two = ClusterSpec.of("h100", 16)
    assert (two.domains, two.injection) == (2, 0.4e12)
    assert quantity("all", "3200 Gbit/s", "B/s") == two.injection == 8 * two.between.per_direction
    assert find_card("a100").hbm == pytest.approx(2.0e12, rel=0.02)
    for link in bundled_links().values():  # a headline adds directions up, where it differs at all
        assert link.headline is None or link.headline == pytest.approx(2 * link.per_direction, rel=0.02)


def test_18_what_is_there_what_is_left_and_what_is_printed_are_three_fields():
    """ml-engineering: B200's 192 and 180 were taken for GB and GiB, and back. Its stacks hold 192 GiB."""
    b200 = find_card("b200")
    assert (b200.physical, b200.printed) == (192 * GIB, 180 * 10**9)
    assert len({192 * 10**9, 180 * GIB, b200.physical, b200.printed, b200.usable}) == 5  # no two are the same bytes
    for card in CARDS:
        assert card.printed % 10**9 == 0
        assert card.physical is None or card.usable <= card.physical
        assert card.memory == (card.usable or card.printed)


def test_19_512_kib_is_524_kb_both_ways():
    """scaling-book#53: a reader's correction of 512 to 524 kiB. 128 · 2048 · 2 B are 512 KiB and 524 kB."""
    n = 128 * 2048 * 2
    assert units.size(n) == plain(write(n, "size")) == "524,288 B = 512 KiB = 524.29 kB"
    assert (plain(write(n, "KiB")), plain(write(n, "kB"))) == ("512 KiB", "524.3 kB")
    assert units.parse_bytes("512 KiB") == n != units.parse_bytes("512 kB")
    for unit, one in SCALES.items():
        if unit.endswith("B") and unit not in ("TB", "PB", "TiB"):
            assert units.parse_bytes(f"3 {unit}") == 3 * one


def test_20_1752_days_are_nearly_five_years():
    """scaling-book#131 had nearly four."""
    assert plain(write(1752 * 86400, "years")) == "4.797 years"
    assert plain(write(1752 * 86400, "days")) == "1,752 days"


def test_21_a_gradient_has_its_matrixs_shape():
    """scaling-book#125: for Out = In · W with W [D, F], dW is Inᵀ · dOut, [D, F]; dOutᵀ · In is its transpose, which is
    what a weight stored as (out, in) takes."""
    spec = ModelSpec(hidden=6, layers=1, heads=1, kv_heads=1, head_dim=6, ffn=10, vocab=7)
    torch.manual_seed(0)
    block, seen = MLP(spec.hidden, spec.ffn), {}
    block.up_proj.register_forward_hook(lambda layer, given, made: seen.update(x=given[0], y=made))
    y = block(torch.randn(5, spec.hidden))
    seen["y"].retain_grad()
    y.square().sum().backward()
    by_hand = seen["x"].T @ seen["y"].grad
    assert by_hand.shape == (spec.hidden, spec.ffn)
    torch.testing.assert_close(block.up_proj.weight.grad, by_hand.T)
    assert all(p.grad.shape == p.shape for p in block.parameters())


def test_23_a_cache_is_counted_with_the_models_own_heads_and_tokens():
    """huggingface/blog#2345: 405B at 128k, 123.05 GB, has 16 KV heads; with its 8 it is 61.5 GiB, of 128,000 tokens."""
    spec = find_model("llama-3.1-405b")
    assert kv_cache(spec, 128_000) / GIB == pytest.approx(61.52, rel=1e-3)
    assert kv_cache(replace(spec, kv_heads=16), 128_000) / GIB == pytest.approx(123.05, rel=1e-3)
    assert kv_cache(spec, 128 * 1024) / GIB == 63
    assert kv_cache(spec, 1024) / GIB == pytest.approx(0.492, rel=1e-3)  # the same table's 1k


def test_26_a_timer_times_what_was_done(pool):
    """ttsugriy d53413c: a wall clock that does not wait for the work. Ours: a known sleep, here and on a rank."""
    seconds = runpy.run_path(str(ROOT / "bench" / "launch.py"))["seconds"]
    assert 0.05 <= seconds(lambda: time.sleep(0.05)) < 0.2
    pool(1).run(lambda group: None)
    assert 0.05 <= seconds(lambda: pool(1).run(lambda group: time.sleep(0.05)), 3) < 0.5
    slow = iter([0.2, 0.0, 0.0])
    assert seconds(lambda: time.sleep(next(slow)), 3) < 0.1  # the median: one slow call is none of the three
    sources = [path for folder in ("src", "bench", "tools") for path in (ROOT / folder).rglob("*.py")]
    sources += (ROOT / "labs").glob("*.ipynb")
    assert [path.name for path in sources if re.search(r"\btime\.time\(", path.read_text(encoding="utf-8"))] == []


def test_27_everything_of_a_market_is_dated():
    """d2l: "GPUs have plenty of memory nowadays". Cards, links and models have the month; for prose: test_prose.py."""
    dated = {**bundled_models(), **{entry.name: vars(entry) for entry in (*CARDS, *bundled_links().values())}}
    for name, entry in dated.items():
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", entry["date"]), name
