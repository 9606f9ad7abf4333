"""A cut model served: on every rank the tokens are those of the plain model, uncached, in one process.

One launch for each number of ranks answers many cases one after the other. Pools are small in some of them, so that
requests give way; prompts come in chunks; their beginnings are known the second time. Replicas that share experts have
different requests, or none.
"""

from typing import NamedTuple

import pytest
import torch
from served import build, expected, prompts, requests, texts

from shardlab.parallel import context, expert, layout, pipeline, tensor
from shardlab.serve import Engine, KVLayout, Request, VirtualClock, mixed, prefill_first, sampled
from shardlab.specs import Layout

POLICIES = {"whole": prefill_first(), "chunks": prefill_first(7), "mixed": mixed(8, 16)}


class Case(NamedTuple):
    """`given` is, for each replica, which of `requests()` it is given, those with a time later than the others."""

    kind: str
    layout: Layout
    policy: str = "whole"
    blocks: int = 80
    given: tuple = (range(6),)
    late: float = 0.0

    @property
    def turns(self):
        return 1 if self.blocks < 20 else 2

    def __str__(self):
        return f"{self.kind}, {self.layout.degrees}, sp={self.layout.sp}, {self.policy}, {self.blocks} blocks"


def cut(kind, plan, dtype=torch.float32):
    """(The model on this rank, the group of its replica, those whose experts are shared, the replica's number)."""
    model, axes = build(kind, dtype), layout.axes_of(plan)
    if axes.tp is not None:
        tensor.cut(model, axes.tp, plan.sp, plan.etp)
    if axes.ep is not None:
        expert.cut(model, axes.ep, axes.replicas)
    if axes.pp is not None:
        pipeline.cut(model, axes.pp, plan.orders)
    group = axes.tp if plan.pp == 1 else axes.pp if plan.tp == 1 else torch.distributed.group.WORLD
    return model, group, axes.data, 0 if axes.data is None else axes.data.rank()


def engine_of(case, **how):
    model, group, together, replica = cut(case.kind, case.layout)
    how = dict(blocks=case.blocks, block_size=4, policy=POLICIES[case.policy]) | how
    return Engine(model, group=group, together=together, **how), replica


def heard(engine):
    """All (number, token) that this rank hears of, in order, as a list that fills."""
    run, told = engine.runner.run, []

    def listening(batch):
        tokens = run(batch)
        told.extend((tokens or {}).items())
        return tokens

    engine.runner.run = listening
    return told


def answer(world, cases):
    """Of each case, and where the pool is large again by the same engine: the texts that the leader has, and those that
    each rank has heard; how often a request gave way, tokens found in the cache, and whether all blocks are free."""
    out = []
    for case in cases:
        engine, replica = engine_of(case, clock=VirtualClock(lambda work: 1.0))
        mine = case.given[replica]
        given = [Request(r.number, r.prompt, r.new_tokens, case.late * (r.number % 2)) for r in requests()
                 if r.number in mine]
        for turn in range(case.turns):
            told, answers = heard(engine), engine.run(given)
            whole = {r.number: [token for number, token in told if number == r.number] for r in given}
            out.append((str(case), turn, mine, texts(answers), list(whole.values()), engine.scheduler.preempted,
                        sum(answer.cached for answer in answers), engine.pool.free == case.blocks, len(engine.plans)))
    return out


def check(pool, ranks, cases):
    """Every case on every rank; what came of them, by case, on the leader."""
    seen, outcomes = {}, pool(ranks).run(answer, cases)
    for rank, out in enumerate(outcomes):
        turns = [case for case in cases for _ in range(case.turns)]
        for case, (name, turn, mine, said, listened, preempted, cached, free, steps) in zip(turns, out, strict=True):
            want = [expected(case.kind)[0][number] for number in mine]
            assert listened == want, (rank, name, turn)
            assert said == want or not said, (rank, name, turn)
            assert free, (rank, name, turn)
            if said:
                seen[case, turn, mine] = preempted, cached, steps
    for case in cases:
        assert all((case, turn, mine) in seen for turn in range(case.turns) for mine in case.given if mine), str(case)
    for (case, turn, mine), (preempted, cached, _) in seen.items():
        if case.blocks < 20:
            assert preempted > 0, str(case)
        elif turn and mine:
            assert cached > 0, str(case)
    return seen


STAGES = Layout(pp=2, microbatches=2)
TWO = [Case("gqa", Layout(2)), Case("mha, tied", Layout(2), "mixed"), Case("mla", Layout(2), "chunks"),
       Case("mqa", Layout(2), "mixed", 12), Case("gqa", Layout(2, sp="keep"), "chunks"),
       Case("mla", Layout(2, sp="again"), "mixed", 12), Case("mixture", Layout(2, sp="keep"), "mixed"),
       Case("gqa", STAGES, "mixed"), Case("mha, tied", STAGES, "chunks", 12), Case("mixture", STAGES)]
SHARING = Layout(dp=2, ep=2)
TOGETHER = [Case("mixture", SHARING, "whole", given=((0, 1, 2), (3, 4, 5))),
            Case("mixture", SHARING, "mixed", 12, given=((0, 1, 3), (2, 4, 5)))]
UNEVEN = [Case("mixture", SHARING, "chunks", given=(range(6), ())), Case("mixture", SHARING, given=((), range(6))),
          Case("mixture", SHARING, "chunks", given=((4,), (1, 3, 5))),
          Case("mixture", SHARING, "mixed", given=((0, 1), (2, 3)), late=40.0)]
FOUR = [Case("gqa", Layout(4), "mixed"), Case("mqa", Layout(4), "chunks", 12), Case("mla", Layout(4)),
        Case("gqa", Layout(2, pp=2, microbatches=2), "mixed"),
        Case("gqa", Layout(2, pp=2, microbatches=2, sp="keep"), "chunks", 12),
        Case("mixture", Layout(2, dp=2, ep=2), "mixed", given=((0, 1, 2), (3, 4))),
        Case("mixture", Layout(2, dp=2, ep=4, etp=1), given=((), (3, 4, 5))),
        Case("mixture", Layout(pp=2, dp=2, ep=2, microbatches=2), "chunks", given=((0, 1, 2, 3), (5,)))]
MORE = [Case("mha, tied", Layout(4, sp="again"), "chunks"), Case("mixture", Layout(4, etp=1), "mixed", 12),
        Case("mqa", Layout(4, sp="keep"), "mixed"), Case("mla", Layout(2, pp=2, microbatches=2), "mixed", 12),
        Case("mha, tied", Layout(2, pp=2, sp="again", microbatches=2), "chunks"),
        Case("mixture", Layout(2, pp=2, microbatches=2), "mixed", 12),
        Case("mixture", Layout(dp=4, ep=4), "chunks", given=((0, 1), (), (4,), (1, 3, 5))),
        Case("mixture", Layout(2, dp=2, ep=4, etp=1, sp="keep"), "mixed", 12, given=((0, 1, 3), (2, 4, 5))),
        Case("mixture", Layout(2, dp=2, ep=2, sp="again"), given=(range(6), ())),
        Case("mixture", Layout(pp=2, dp=2, ep=2, microbatches=2), "mixed", given=((), range(6)))]


def test_two_ranks(pool):
    check(pool, 2, TWO)


def test_two_replicas_share_experts(pool):
    check(pool, 2, TOGETHER)


def test_a_replica_with_nothing_to_do_joins_in(pool):
    """From the beginning, after its own last token, and before requests that come later."""
    seen = check(pool, 2, UNEVEN)
    assert seen[UNEVEN[2], 0, (4,)][2] < seen[UNEVEN[2], 0, (1, 3, 5)][2]


def test_four_ranks(pool):
    check(pool, 4, FOUR)


@pytest.mark.more
def test_four_ranks_in_more_ways(pool):
    check(pool, 4, MORE)


def held(world, kinds, tp):
    """By kind: the layout, the heads that k_proj's rows are of, and bytes of a cache of 5 blocks."""
    out = {}
    for kind in kinds:
        model, _, _, _ = cut(kind, Layout(tp))
        attention = model.layers[0].self_attn
        window = getattr(getattr(attention, "k_proj", attention).weight, "window", None) if kind != "mla" else None
        heads = range(1) if kind == "mla" else range(window.start // 8, window.stop // 8)
        one = KVLayout.of(model, 4)
        out[kind] = one, heads, Engine(model, blocks=5, block_size=4).cache.nbytes
    return out


HEADS = {2: {"mqa": [[0], [0]], "gqa": [[0], [1]], "mha, tied": [[0, 1], [2, 3]], "mla": [[0], [0]]},
         4: {"mqa": [[0]] * 4, "gqa": [[0], [0], [1], [1]], "mha, tied": [[0], [1], [2], [3]], "mla": [[0]] * 4}}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_layout_names_the_heads_a_rank_has(pool, tp):
    """FAULTS S11: with more ranks than KV heads neighbours have the same one, and the layout says how many.
    """
    total = {"mqa": 1, "gqa": 2, "mha, tied": 4, "mla": 1}
    for rank, out in enumerate(pool(tp).run(held, list(total), tp)):
        for kind, (one, heads, nbytes) in out.items():
            assert one.heads == heads and list(heads) == HEADS[tp][kind][rank], (kind, rank)
            assert (one.total_heads, one.layers, one.dtype) == (total[kind], range(3), "fp32")
            numbers = 16 if kind == "mla" else 2 * 8 * len(heads)
            assert nbytes == 5 * one.block_bytes == 5 * 4 * 3 * numbers * 4


def stages(world):
    return [KVLayout.of(cut("gqa", Layout(2, pp=2, microbatches=2))[0], 4)]


def test_a_stage_of_a_pipeline_has_its_layers(pool):
    outs = pool(4).run(stages)
    assert [(out[0].layers, out[0].heads) for out in outs] == [
        (layers, range(head, head + 1)) for layers in (range(2), range(2, 3)) for head in range(2)]


def chosen(world, seed, apart, layouts):
    """By layout: what each rank hears and the leader answers, each rank with dice of its own where they are `apart`."""
    out = []
    for plan in layouts:
        engine, _ = engine_of(Case("gqa", plan), choose=sampled(1.0, seed + apart * world.rank()))
        told = heard(engine)
        answers = engine.run(requests())
        out.append((told, texts(answers)))
    return out


def test_t10_one_rank_chooses_for_all(pool):
    """By chance, at temperature 1: however the other ranks' dice fall, all have the same tokens; the same seed gives
    the same tokens, and those of one process; another seed gives others."""
    plans = [Layout(2), STAGES]
    outs, again, other = (pool(2).run(chosen, *seeds, plans) for seeds in ((1, 1), (1, 0), (2, 0)))
    engine = Engine(build(), blocks=80, block_size=4, choose=sampled(1.0, 1))
    alone = texts(engine.run(requests()))
    for i in range(len(plans)):
        assert outs[0][i][0] == outs[1][i][0] != [] and outs[1][i][1] == []
        assert again[0][i][0] == again[1][i][0] != other[0][i][0]
    assert outs[0][0] == again[0][0] and outs[0][0][1] == alone  # the leader's seed is the same; in a pipeline
    assert again[0][1][1] == alone != other[0][1][1]  # it is the last stage's that counts
    assert outs[0][1][1] != alone


def plans(world):
    """What the leader of two ranks has decided, by a virtual clock: twice."""
    out = []
    for _ in range(2):
        clock = VirtualClock(lambda work: 0.01 + 0.002 * sum(new for new, _ in work))
        engine, _ = engine_of(Case("gqa", Layout(2), "mixed", 12), clock=clock)
        answers = engine.run([Request(r.number, r.prompt, r.new_tokens, 0.03 * r.number) for r in requests()])
        out.append((engine.plans, [answer.times for answer in answers]))
    return out


def test_by_a_virtual_clock_it_is_what_one_process_does(pool):
    (first, second), followers = pool(2).run(plans)
    assert first == second and followers[0] == ([], [])
    clock = VirtualClock(lambda work: 0.01 + 0.002 * sum(new for new, _ in work))
    engine = Engine(build(), blocks=12, block_size=4, policy=mixed(8, 16), clock=clock)
    answers = engine.run([Request(r.number, r.prompt, r.new_tokens, 0.03 * r.number) for r in requests()])
    assert first == (engine.plans, [answer.times for answer in answers])


def refused(world):
    engine, _ = engine_of(Case("gqa", Layout(2), blocks=4))
    told = heard(engine)
    answers = engine.run([Request(0, prompts()[5], 3), Request(1, prompts()[0], 3), Request(2, [5] * 2047, 3)])
    return [(answer.refused, answer.tokens) for answer in answers], [token for _, token in told]


def test_a_refused_request_stops_nobody(pool):
    (answers, told), (_, followed) = pool(2).run(refused)
    assert "33 tokens and 3 new ones need 9 blocks, and there are 4: 17 tokens" in answers[0][0]
    assert answers[1] == ("", expected()[0][0][:3]) and told == followed == answers[1][1]
    assert "2049 tokens" in answers[2][0] and "made for 2048" in answers[2][0]


def of_a_cut_sequence(world):
    with pytest.raises(ValueError, match=r"sequence is cut.*cut by heads, stages or experts"):
        Engine(context.cut(build(), world), blocks=4, group=world)
    return True


def test_a_cut_sequence_is_not_served(pool):
    """Its attention would wait for keys that go round, or attend to others' tokens."""
    assert pool(2).run(of_a_cut_sequence) == [True, True]
