"""What spread experts and cut sequences cost, by hand and by published numbers; what doesn't know them refuses."""

import pytest

from shardlab.cost import (
    activations,
    bytes_read,
    decode_floor,
    dispatch,
    forward_peak,
    heads_traffic,
    kv_cache,
    kv_per_token,
    memory,
    pipeline,
    prefill_floor,
    requests_that_fit,
    serving,
    traffic,
    training,
)
from shardlab.cost.expert_traffic import Rows, rows_of
from shardlab.cost.parameters import parameters_of
from shardlab.schedule import one_f_one_b
from shardlab.specs import (
    ClusterSpec,
    Experts,
    Latent,
    Layout,
    LinkSpec,
    ModelSpec,
    Topology,
    find_card,
    find_model,
)
from shardlab.specs.placement import place, plain

V3, QWEN, SMALL = find_model("deepseek-v3"), find_model("qwen3-235b-a22b"), find_model("llama-3.1-8b")
SIZES = dict(hidden=16, layers=3, heads=4, kv_heads=4, head_dim=4, ffn=24, vocab=40)
SHARED = Experts(routed=8, active=2, ffn=12, shared=1, first_dense=1, routing_bias=True)
SPEC = ModelSpec(**SIZES, experts=SHARED)
EXPERT = 3 * 16 * 12  # numbers of one
ROUTER = 8 * 16 + 8


def rest(tp=1, etp=1):
    """Numbers that are no routed experts, on a rank."""
    norms, attention = 3 * 2 * 16 + 16, 3 * 4 * 16 * 16
    return (2 * 40 * 16 + attention + 3 * 16 * 24) // tp + norms + 2 * (ROUTER + EXPERT // etp)


@pytest.mark.parametrize(("layout", "numbers"), [
    (Layout(), rest() + 2 * 8 * EXPERT),
    (Layout(dp=8, ep=8), rest() + 2 * EXPERT),
    (Layout(dp=4, ep=2), rest() + 2 * 4 * EXPERT),
    (Layout(cp=4, ep=2), rest() + 2 * 4 * EXPERT),
    (Layout(cp=4), rest() + 2 * 8 * EXPERT),
    (Layout(2, dp=4, ep=4), rest(2, 2) + 2 * 2 * EXPERT // 2),
    (Layout(2, dp=4, ep=4, etp=1), rest(2) + 2 * 2 * EXPERT),
    (Layout(2, dp=4, ep=8, etp=1), rest(2) + 2 * EXPERT),
    (Layout(2, dp=4, etp=1), rest(2) + 2 * 8 * EXPERT),
], ids=lambda value: getattr(value, "degrees", ""))
def test_each_rank_holds_its_part_of_the_experts_and_of_the_rest(layout, numbers):
    bill = memory(SPEC, layout, training=True)
    assert bill.weights == 4 * numbers
    assert bill.gradients == bill.moments / 2 == 4 * (numbers - 2 * 8)  # no gradient moves the routers' biases
    assert sum(bill.groups.values()) == bill.held
    assert sum(each.numel for each in parameters_of(SPEC, layout, rank=layout.world_size - 1)) == numbers


def test_the_bill_says_what_is_copied():
    """On 4 ranks all but the routed experts is there four times, and these once."""
    bill = memory(SPEC, Layout(dp=4, ep=4))
    assert (bill.copied, bill.padding) == (3 * rest(), 0)
    assert "Every rank holds as much. 4 ranks have the whole model" in str(bill)
    whole = memory(SPEC, Layout(2, dp=3, ep=3, etp=1), redundant=1)  # 6 ranks, where each third has 3 of 9 slots twice
    assert whole.copied == 6 * (rest(2) + 2 * 3 * EXPERT) - SPEC.total


@pytest.mark.parametrize("layout", [Layout(dp=4, ep=2), Layout(cp=2, dp=2, ep=2), Layout(2, dp=4, ep=4, etp=1),
                                    Layout(2, dp=4, ep=4), Layout(dp=4, ep=4)], ids=lambda layout: layout.degrees)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_may_share_experts_over_their_copies_and_the_rest_over_the_data_axis(layout, zero):
    """In all, the states of each number are held once a tensor rank that has it; padding is not stepped."""
    layout = Layout(layout.tp, dp=layout.dp, cp=layout.cp, ep=layout.ep, etp=layout.etp, zero=zero)
    keys = dict(training=True, share_experts=True)
    bills = [memory(SPEC, layout, rank=rank, **keys) for rank in range(layout.world_size)]
    one = parameters_of(SPEC, layout)
    others, experts = (sum(each.numel for each in some if each.trained) for some in one.apart())
    copies, data = layout.expert_replicas, layout.data_ranks
    assert copies == layout.world_size // (layout.ep * layout.expert_tp)
    assert sum(bill.share.stepped for bill in bills) == layout.tp * others + layout.ep * layout.expert_tp * experts
    for bill in bills:
        exact = others / data + experts / copies
        assert abs(bill.share.stepped - exact) < data * len(one)
    most = memory(SPEC, layout, **keys)
    assert most.held == max(bill.held for bill in bills) and most.held == bills[most.rank].held


def test_v3s_training_layout():
    """arXiv:2412.19437, §3.2: EP64 in DP128, ZeRO-1. Of each layer a rank has 4 of 256 experts, twice in all."""
    layout, keys = Layout(dp=128, ep=64, zero=1), dict(training=True, master="fp32")
    bill = memory(V3, layout, "bf16", share_experts=True, **keys)
    experts = V3.parameters["experts"]
    others = V3.total - experts
    assert bill.weights == 2 * (others + experts // 64)
    trained = others - 58 * 256
    assert bill.master_weights == pytest.approx(4 * (trained / 128 + experts / 128), rel=1e-6)
    assert bill.rank < 128 and bill.to_dict()["worst_rank"] == bill.rank
    ours = memory(V3, layout, "bf16", **keys)  # which leaves experts whole
    assert ours.master_weights == pytest.approx(4 * (trained / 128 + experts / 64), rel=1e-6)


def test_redundant_experts_are_for_serving():
    bill = memory(V3, Layout(4, dp=8, ep=32, etp=1), "fp8", redundant=32)
    assert bill.elements["experts"] == 58 * 9 * 3 * 7168 * 2048
    for keys in (dict(training=True), {}):
        layout = Layout(4, dp=8, ep=32, etp=1, zero=0 if keys else 1)
        with pytest.raises(ValueError, match="redundant = 32: copies of experts are for serving"):
            memory(V3, layout, "bf16", redundant=32, **keys)


def test_a_decode_step_reads_the_experts_that_any_rank_asks_for():
    """One token a rank: of 8 experts a rank of ep = 8 has one, which any of 8 tokens may want."""
    spec = ModelSpec(**SIZES, experts=Experts(routed=8, active=1, ffn=12))
    alone, spread = (bytes_read(spec, layout, dtype="fp32") for layout in (Layout(), Layout(dp=8, ep=8)))
    experts = 3 * 8 * EXPERT * 4
    base = memory(spec).weights - experts - 40 * 16 * 4 + kv_cache(spec, 1)
    assert alone == base + experts // 8
    assert spread == base + int(experts / 8 * (1 - (7 / 8) ** 8))
    wide = ModelSpec(**SIZES, experts=Experts(routed=8, active=8, ffn=12))
    apart, together = (decode_floor(wide, find_card("h100"), layout) for layout in (Layout(dp=8, ep=8), Layout(dp=8)))
    assert apart < together


def test_a_cut_sequence_leaves_each_rank_its_tokens():
    """64 tokens over 4 ranks are 16 each; 65 are padded to 72, of which each has 18."""
    kept, whole = (activations(SMALL, layout, batch=2, seq=64) for layout in (Layout(cp=4), Layout()))
    quarter = activations(SMALL, batch=2, seq=16)
    assert (kept.total, kept.peak, kept.layers) == (quarter.total, quarter.peak, whole.layers // 4)
    assert activations(SMALL, Layout(cp=4), batch=2, seq=65).total == activations(SMALL, batch=2, seq=18).total
    assert kv_cache(SMALL, 64, Layout(cp=4)) == kv_cache(SMALL, 16)
    assert kv_cache(SMALL, 65, Layout(cp=4)) == kv_cache(SMALL, 18)
    assert kv_per_token(SMALL, Layout(cp=4)) == kv_per_token(SMALL) / 4
    assert kv_cache(V3, 64, Layout(cp=4)) == kv_cache(V3, 16)
    assert requests_that_fit(10**9, SMALL, 4096, Layout(cp=4)) == requests_that_fit(10**9, SMALL, 1024)
    with pytest.raises(ValueError, match="cp = 2: gpt-oss-120b attends to entries or windows"):
        kv_cache(find_model("gpt-oss-120b"), 64, Layout(cp=2))


def test_experts_elsewhere_leave_as_much_to_keep():
    """With ep as much comes as goes; whole experts have a tensor rank's part of the tokens each."""
    keys = dict(batch=2, seq=64)
    assert activations(SPEC, Layout(dp=4, ep=4), **keys).total == activations(SPEC, Layout(dp=4), **keys).total
    cut, split = ({term.what: term for term in activations(SPEC, layout, **keys).kinds[1][1]}
                  for layout in (Layout(2), Layout(2, etp=1)))
    assert split["sent to experts"].nbytes == cut["sent to experts"].nbytes / 2
    assert split["experts"].nbytes == cut["experts"].nbytes
    wide = ModelSpec(**SIZES | dict(ffn=1), experts=Experts(routed=8, active=4, ffn=400))
    assert forward_peak(wide, Layout(2, etp=1), tokens=8) > forward_peak(wide, Layout(2), tokens=8)


def test_training_adds_it_up():
    bill = training(SPEC, Layout(dp=4, cp=2, ep=4, zero=2), batch=1, seq=64)
    kept = activations(SPEC, Layout(cp=2), batch=1, seq=64, dtype="bf16", device="cuda")
    assert bill.part("activations") == kept.layers + kept.ends
    assert bill.part("under way") > 0


@pytest.mark.parametrize("price", [
    lambda layout: forward_peak(SPEC, layout, tokens=8), lambda layout: serving(SPEC, layout, context=8),
    lambda layout: bytes_read(SPEC, layout), lambda layout: decode_floor(SPEC, find_card("h100"), layout),
    lambda layout: prefill_floor(SPEC, find_card("h100"), layout, tokens=8)])
def test_inference_of_cut_sequences_is_refused(price):
    """X7: sglang#33353, #33327: paths that know nothing of cp take it all the same."""
    with pytest.raises(ValueError, match="cp = 2: the inference of sequences that are cut over ranks"):
        price(Layout(cp=2))


def test_other_paths_that_dont_know_them_refuse():
    with pytest.raises(ValueError, match="has experts: over a tensor axis the traffic of the Llama kind alone"):
        pipeline(SPEC, one_f_one_b(2, 4), batch=1, seq=8, layout=Layout(2, etp=1)).traffic(0)
    with pytest.raises(ValueError, match="has experts: over a tensor axis the traffic of the Llama kind alone"):
        traffic(SPEC, Layout(2, dp=2, ep=2), 1, 8)


def test_a_token_of_v3_is_handed_out_in_57344_bytes_and_crosses_in_28672():
    """arXiv:2412.19437, §3.2: 8 experts × 7,168 × 1 B; to 4 nodes at most."""
    bill = dispatch(V3, Layout(dp=128, ep=64), 4096, dtype="fp8", back="bf16", nodes=8, reach=4)
    assert (bill.per_token, bill.over_network) == (57_344, 28_672)
    assert (bill.payload, bill.leaving) == (4096 * 57_344, 4096 * 57_344 * 63 / 64)
    assert (bill.across, bill.combined) == (4096 * 28_672 * 7 / 8, 2 * bill.payload)
    assert (bill.skew, bill.node_skew) == (1.0, 1.0)
    free = dispatch(V3, Layout(dp=128, ep=64), 4096, dtype="fp8", nodes=8)
    assert (free.over_network, free.across) == (57_344, 2 * bill.across)
    assert "at most 4 nodes × 7,168 × 1 B (fp8)" in str(bill) and bill.to_dict()["over_network"] == 28_672
    few = dispatch(QWEN, Layout(dp=4, ep=4), 1, dtype="fp8")
    assert (few.per_token, few.over_network) == (8 * 4096, 0)


def test_the_number_of_experts_has_no_part_in_the_bytes():
    """Tokens × top-k × hidden × bytes, whether 8 or 128 of them share the tokens."""
    few, many = (dispatch(ModelSpec(**SIZES, experts=Experts(routed=n, active=2, ffn=12)), Layout(dp=4, ep=4), 100)
                 for n in (8, 128))
    assert few.payload == many.payload == 100 * 2 * 16 * 2


def test_the_busiest_rank_is_the_clock_and_redundant_experts_slow_it_down_less():
    load, layout = [1.0] * 7 + [9.0], Layout(dp=4, ep=4)
    skewed = dispatch(SPEC, layout, 100, load=load)
    assert skewed.shares == (2 / 16, 2 / 16, 2 / 16, 10 / 16)
    assert (skewed.skew, skewed.rows_of_busiest, skewed.leaving) == (2.5, 500, skewed.payload * 3 / 4)
    card = find_card("h100")
    even = dispatch(SPEC, layout, 100)
    assert skewed.compute(card) == pytest.approx(2.5 * even.compute(card))
    assert even.compute(card) == pytest.approx(200 * 6 * 16 * 12 / card.flop_rate("bf16"))
    spread = dispatch(SPEC, layout, 100, load=load, placement=place(load, 4, 12))
    assert 1 <= spread.skew < 1.2 and spread.payload == skewed.payload


def test_what_it_takes():
    """Even load, one kind of link: the closed form. Skewed: longer. With a limit on nodes: two steps."""
    link = LinkSpec(name="some", per_direction=1e9, alpha=1e-6)
    flat, layout = Topology(nodes=4, per_node=1, between=link), Layout(dp=4, ep=4)
    even = dispatch(SPEC, layout, 100, nodes=4)
    assert even.seconds(flat) == pytest.approx(3 * 1e-6 + even.payload * 3 / 4 / 1e9)
    assert dispatch(SPEC, layout, 100, nodes=4, load=[1.0] * 7 + [9.0]).seconds(flat) > even.seconds(flat)
    limited = dispatch(SPEC, layout, 100, nodes=2, reach=1)
    two = Topology(nodes=2, per_node=2, between=link, inside=LinkSpec(name="in", per_direction=4e9), nic="rank")
    row = 16 * 2
    assert limited.seconds(two) == pytest.approx(1e-6 + 100 * row / 2 / 1e9 + 200 * row / 2 / 4e9)
    shared = Topology(nodes=2, per_node=2, between=link)
    assert limited.seconds(shared) == pytest.approx(1e-6 + 2 * 100 * row / 2 / 1e9)
    with pytest.raises(ValueError, match="on 4 ranks of 2 nodes, and the topology has 4 of 4"):
        limited.seconds(flat)
    v3 = ClusterSpec.of("h800", 64)
    free, four = (dispatch(V3, Layout(dp=128, ep=64), 4096, dtype="fp8", nodes=8, reach=reach) for reach in (None, 4))
    assert four.seconds(v3.topology) < free.seconds(v3.topology)


@pytest.mark.parametrize(("keys", "message"), [
    (dict(nodes=3), "ep = 4 ranks do not divide over 3 nodes"),
    (dict(nodes=2, reach=3), "reach = 3: there are 2 nodes"),
    (dict(placement=plain(6, 2)), "the placement is of 6 experts on 2 ranks; 8 on ep = 4 are wanted"),
    (dict(load=[0.0] * 8), "load is 0 for all experts"),
    (dict(load=[1.0] * 7), "load has 7 numbers, and there are 8 experts"),
    (dict(spec=SMALL), "llama-3.1-8b has no experts to send tokens to"), (dict(dtype="fp3"), "fp3"),
    (dict(tokens=0), "tokens must be a whole number of at least 1"),
])
def test_a_dispatch_that_cant_be_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        dispatch(**dict(spec=SPEC, layout=Layout(dp=4, ep=4), tokens=1) | keys)


def test_rows_by_hand():
    """Two ranks of two with two experts each; rank 1 sends rank 0 five rows and keeps four."""
    layout = Layout(2, dp=2, ep=2, etp=1)
    routed = [[(1, 2, 3, 4)], [(2, 3, 4, 0)], [(9, 9, 9, 9)], [(0, 0, 0, 0)]]

    def rows(rank, layout):
        return next(rows_of(routed, layout, rank))

    assert rows(0, layout) == Rows(10, 3 + 5, 3) and rows(1, layout) == Rows(9, 7 + 4, 4)
    assert rows(3, layout) == Rows(0, 18, 0)
    # with etp = tp ranks 0 and 2 share experts, each of which is on two neighbours
    assert rows(2, Layout(2, dp=2, ep=2)) == Rows(36, 7 + 18, 18)


def test_heads_by_all_to_all_is_priced():
    """arXiv:2309.14509, §3.1: four all-to-alls a layer, of a p-th of the sequence each: the less, the more ranks."""
    bills = [heads_traffic(ModelSpec(**SIZES), Layout(cp=cp), 2, 16, "bf16") for cp in (2, 4)]
    two, four = (bill.where(phase="forward") for bill in bills)
    assert [bill.total(phase="backward") for bill in bills] == [bill.total(phase="forward") for bill in bills]
    assert "an all-to-all pair by pair" in str(bills[0])
    assert heads_traffic(ModelSpec(**SIZES), Layout(), 2, 16, backward=False).count() == 0
    assert [c.payload for c in two] == [2 * 8 * 16 * 2] * 4 and sum(c.count for c in two) == 12
    assert all(a.payload == 2 * b.payload for a, b in zip(two, four, strict=True))
    assert (two[0].wire, four[0].wire, four[0].hops) == (two[0].payload / 2, four[0].payload * 3 / 4, 3)
    grouped = ModelSpec(**SIZES | dict(kv_heads=2))
    sent = heads_traffic(grouped, Layout(cp=2), 2, 16, "bf16", backward=False).collectives
    assert [c.payload for c in sent] == [512, 256, 256, 512]
    with pytest.raises(ValueError, match=r"cp = 4 does not share out 4 heads and 2 KV heads .*: cp can be 1, 2$"):
        heads_traffic(grouped, Layout(cp=4), 2, 16)
    latent = ModelSpec(**SIZES | dict(kv_heads=2), latent=Latent(kv_rank=6, rope_dim=2, nope_dim=4, value_dim=8))
    assert [c.payload for c in heads_traffic(latent, Layout(cp=4), 2, 16, "bf16", backward=False).collectives] == [
        2 * 4 * 4 * numbers * 2 for numbers in (6, 6, 8, 8)]
    with pytest.raises(ValueError, match=r"gpt-oss-120b has .*a sliding window"):
        heads_traffic(find_model("gpt-oss-120b"), Layout(cp=2), 1, 16)


def test_a_ring_sends_about_the_same_whatever_its_size():
    """(p − 1) / p of all keys and values of the sequence, whatever p."""
    for cp in (2, 4):
        ring = traffic(ModelSpec(**SIZES), Layout(cp=cp), 2, 16, "bf16", backward=False)
        assert ring.wire(axis="cp") == ring.total("send") == 3 * 2 * (cp - 1) * (2 * 16 // cp) * 16 * 2
