"""What is published about serving, in the simulator: closed forms, shapes that measurements have, and faults of others
(../shared/SERVING.md (g), (h); FAULTS.md SV16, 17, 18, 21, 22, 23, 30).

Step times are such as DistServe fitted (OPT-13B on an A100, SERVING.md (e)) where none is said: a floor, new tokens,
context. Only ratios and signs are claimed.
"""

from dataclasses import replace
from random import Random

import pytest

from shardlab.cost.handover import Handover
from shardlab.cost.queueing import md1_wait
from shardlab.serve import BlockPool, Request, Scheduler, mixed, prefill_first
from shardlab.serve.arrivals import poisson
from shardlab.serve.cluster import Cluster
from shardlab.serve.events import Instance
from shardlab.serve.first_come import first_come, prompt_seconds
from shardlab.serve.metrics import Metrics
from shardlab.serve.router import LeastOutstanding
from shardlab.serve.simulate import Simulated, Wire
from shardlab.serve.workload import Lengths, afternoon, synthetic
from shardlab.specs import LinkSpec, find_model

LINK = LinkSpec(name="400 Gbit/s", per_direction=50e9, alpha=10e-6)
WIRE = Wire(LINK, 819_200, 40)  # OPT-13B: 2 · 40 layers · 5,120 · 2 B


def opt(instance, work):
    """Seconds: DistServe's fits, a prompt's tokens and one token of each answer."""
    new = sum(n for n, _ in work if n > 1)
    decodes = [context for n, context in work if n == 1]
    return 0.0199 + 1.02e-4 * new + 6.27e-7 * sum(decodes) + 3.85e-5 * len(decodes)


def simulate(requests, roles, *, policy=mixed, budget=512, step_time=opt, blocks=2000, wire=WIRE, watermark=0.0,
             seen=None, **how):
    """(Metrics, the cluster). Into the list `seen` goes each step: (when it began, instance, batch)."""
    policies = {"both": lambda: policy(budget), "prefill": prefill_first, "decode": lambda: mixed(budget)}
    instances = [Instance(f"{role}{i}", Scheduler(BlockPool(blocks), policies[role](), watermark=watermark), role)
                 for i, role in enumerate(roles)]
    world, steps = Simulated(step_time, wire), [] if seen is None else seen
    cluster = Cluster(world, instances, LeastOutstanding(Random(1)), **how,
                      watch=lambda instance, batch: steps.append((world.now(), instance, batch)))
    return Metrics(cluster.run(requests), 0.6, 0.06), cluster


def drawn(rate, count, prompt, new, seed=1, **how):
    return synthetic(poisson(rate, count, seed), prompt, new, 1000, seed, **how)


@pytest.mark.parametrize(("load", "wait"), [(0.5, 0.5), (0.7, 7 / 6), (0.8, 2.0)])
def test_one_token_answers_of_one_at_a_time_are_an_m_d_1_queue(load, wait):
    requests = drawn(load, 20_000, 1, 1, seed=2)
    instance = Instance("one", Scheduler(BlockPool(4), most=1))
    answers = Cluster(Simulated(lambda instance, work: float(len(work))), [instance], LeastOutstanding(Random(0))
                      ).run([Request(r.number, r.prompt, 1, r.arrival) for r in requests])
    found = sum(Metrics(answers).waits["TTFT"]) / len(answers) - 1.0
    assert md1_wait(load, 1.0) == pytest.approx(wait)
    assert found == pytest.approx(wait, rel=0.1)


def test_a_rate_that_drifts_makes_one_server_s_users_wait_as_first_come_first_served_does():
    """(a2): 0.59 busy on average, and the tenth that waits longest waits for many seconds."""
    requests = [replace(request, new_tokens=1) for request in afternoon(1000)]
    seconds = prompt_seconds([len(request.prompt) for request in requests])
    instance = Instance("one", Scheduler(BlockPool(1, 8192), prefill_first(8192), most=1))
    by_length = {len(request.prompt): each for request, each in zip(requests, seconds, strict=True)}
    world = Simulated(lambda instance, work: by_length[work[0][0]])
    answers = Cluster(world, [instance], LeastOutstanding(Random(0))).run(requests)
    waits = first_come([request.arrival for request in requests], seconds)
    assert [answer.times[0] for answer in answers] == pytest.approx(
        [request.arrival + wait + each for request, wait, each in zip(requests, waits, seconds, strict=True)])
    assert sum(seconds) / 3600 == pytest.approx(0.59, abs=0.06)
    assert Metrics(answers).percentile("TTFT", 50) < 0.5 < 5 < Metrics(answers).percentile("TTFT", 90)


def test_a_watermark_trades_the_first_token_for_fewer_preemptions():
    """(h): fewer preemptions, better ITL at the tail, worse TTFT. Nobody is refused or lost."""
    requests = drawn(9.0, 500, Lengths(200, 0.5, 800), Lengths(200, 0.5, 600))
    by = {}
    for watermark in (0.0, 0.1):
        metrics, _ = simulate(requests, ["both"], blocks=500, watermark=watermark)
        assert len(metrics.done) == 500
        by[watermark] = (metrics.preempted, metrics.percentile("ITL", 99), metrics.percentile("TTFT", 50))
    assert by[0.1][0] < 0.5 * by[0.0][0]
    assert by[0.1][1] < by[0.0][1] and by[0.1][2] > by[0.0][2], by


def test_the_smaller_the_budget_the_better_the_worst_gap_and_the_longer_the_prompt():
    """SV16: a step is as long as the tokens of prompts in it."""
    requests = [Request(0, [1], 300), Request(1, list(range(4000)), 2, 0.5)]
    gaps, first = [], []
    for budget in (128, 512, 2048):
        metrics, _ = simulate(requests, ["both"], budget=budget)
        gaps.append(max(metrics.waits["ITL"]))
        first.append(metrics.waits["TTFT"][1])
    assert gaps == sorted(gaps) and gaps[0] < gaps[-1] / 4
    assert first == sorted(first, reverse=True) and first[0] > first[-1] * 1.5


def test_chunks_without_mixing_leave_decodes_to_starve():
    """SV17: with prompts first, a decode waits for all chunks of a prompt, however small they are."""
    requests = [Request(0, [1], 300), Request(1, list(range(20_000)), 2, 0.5)]
    whole, chunked, mixed_in = (max(simulate(requests, ["both"], policy=policy, budget=budget)[0].waits["ITL"])
                                for policy, budget in ((prefill_first, 20_000), (prefill_first, 512), (mixed, 512)))
    assert chunked >= whole > 20 * mixed_in


def test_with_nothing_decoding_a_prompt_is_not_cut():
    """SV18: at a low rate chunks would only add steps."""
    metrics, _ = simulate([Request(0, list(range(4000)), 2)], ["both"], budget=128)
    assert metrics.waits["TTFT"][0] == pytest.approx(opt(None, [(4000, 4000)]))


def test_one_prefill_and_one_decode_card_lose_to_two_that_do_both():
    """SV21: equal cards; 1,024 tokens in and 50 out want one of the two far more than the other."""
    requests = drawn(9.0, 400, 1024, 50)
    apart, _ = simulate(requests, ["prefill", "decode"])
    together, _ = simulate(requests, ["both"] * 2)
    assert together.goodput > 1.2 * apart.goodput


def test_long_answers_want_few_prefill_cards():
    """SV22: of the ways to split 4 cards, 1 : 1 is not the best where prompts are a small part of the work."""
    requests = drawn(16.0, 300, 64, Lengths(300, 0.3, 600))
    tokens = {}
    for prefill in (1, 2, 3):
        metrics, _ = simulate(requests, ["prefill"] * prefill + ["decode"] * (4 - prefill), blocks=700)
        tokens[prefill] = metrics.tokens["out"]
    assert tokens[1] > tokens[2] > tokens[3]


def test_half_the_prefill_pool_loses_where_prompts_are_the_work():
    """SV23."""
    requests = drawn(7.5, 250, 2048, 20)
    more, less = (simulate(requests, ["prefill"] * prefill + ["decode"])[0] for prefill in (2, 1))
    assert less.achieved < 0.8 * more.achieved
    assert less.percentile("TTFT", 50) > 5 * more.percentile("TTFT", 50)


@pytest.mark.parametrize("layerwise", [True, False])
def test_the_first_two_tokens_have_no_wait_that_is_not_accounted_for(layerwise):
    """SV30: queue + prefill is the first token; exposed transfer + admission + a decode step the second, within 5%."""
    requests = drawn(5.0, 300, Lengths(600, 0.5, 2000), 20)
    steps, began, samples = [], {}, {}
    metrics, cluster = simulate(requests, ["prefill", "prefill", "decode"], layerwise=layerwise, seen=steps)
    for now, instance, batch in steps:
        for item in batch.items:
            began.setdefault(item.number, now)  # its first chunk
            if item.samples:
                samples.setdefault(item.number, []).append((now, now + opt(instance, batch.work)))
    moved = {transfer.number: transfer for transfer in cluster.handovers.arrived}
    assert len(moved) == 300
    first = second = explained_first = explained_second = 0.0
    for answer in metrics.answers:
        number = answer.request.number
        (_, end), (decode, decoded), *_ = samples[number]
        transfer, queue = moved[number], began[number] - answer.request.arrival
        first += answer.times[0] - answer.request.arrival
        explained_first += queue + (end - began[number])
        second += answer.times[1] - answer.times[0]
        explained_second += (transfer.adopted - transfer.begun) + (decode - transfer.adopted) + (decoded - decode)
        assert queue >= 0 and 0 <= decode - transfer.adopted < 0.1  # at most the step that was under way
    assert explained_first == pytest.approx(first, rel=0.05) and explained_second == pytest.approx(second, rel=0.05)


@pytest.mark.parametrize("times", [0.25, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("layers", [16, 80])
def test_what_is_exposed_of_a_transfer(times, layers):
    """In bulk all of it; by layers at most one of them and 5% above B* = bytes ÷ seconds of prefill, and as
    `cost.handover` says below it."""
    tokens, token_bytes = 4000, 100_000
    prefill = opt(None, [(tokens, tokens)])
    rate = times * tokens * token_bytes / prefill
    ideal = tokens * token_bytes / rate
    link = LinkSpec(name="paced", per_direction=rate, alpha=1e-6)
    exposed = {}
    for layerwise in (True, False):
        _, cluster = simulate([Request(0, list(range(tokens)), 2)], ["prefill", "decode"], layerwise=layerwise,
                              wire=Wire(link, token_bytes, layers))
        transfer, = cluster.handovers.arrived
        exposed[layerwise] = transfer.adopted - transfer.begun
    assert 1 <= exposed[False] / ideal < 1.001
    if times >= 1:
        assert exposed[True] / ideal <= 1 / layers + 0.05
    if layers == 80:
        said = Handover(find_model("llama-3.1-70b"), tokens, tokens * token_bytes, prefill, link, 1, "bf16")
        assert exposed == pytest.approx({True: said.by_layers, False: said.seconds})
