"""Faults of others' serving engines (FAULTS, "Serving: engine", and SV of it): each is a test, here or where it says.

SV6, SV19 and SV37 are in tests/serve, T10 and S11's layouts in tests/parity/test_serving.py. What is wrong here is
wrong without a word: another text, or a wait that nobody can explain.
"""

from itertools import pairwise

import pytest
import torch
from served import Faked, build, expected, plain, prompts, requests, serve, texts

from shardlab.serve import BlockPool, Engine, Request, Scheduler, kv_cache, mixed, prefill_first


@pytest.mark.parametrize("key", [lambda parent, tokens: 0, lambda parent, tokens: hash(tokens),
                                 lambda parent, tokens: sum(tokens) % 256], ids=["one value", "no parent", "8 bits"])
def test_s1_a_hash_that_many_blocks_have(monkeypatch, key):
    """Equal tokens behind others among them, which a key without the beginning takes for the same."""
    monkeypatch.setattr(kv_cache, "block_hash", key)
    model, (first, second) = build(), prompts([8, 8])
    some = [first + second, second + first, first + first, second + second, [*first[:4], *second[:4], *first]]
    want = [plain(model, request)[0] for request in requests(some)]
    assert len(set(map(tuple, want))) == 5
    engine = Engine(model, blocks=60, block_size=4, policy=prefill_first(16))
    for _ in range(3):
        answers = engine.run(requests(some))
        assert texts(answers) == want
    if key(1, (2,)) != 0:
        assert sum(answer.cached for answer in answers) > 0


def test_s2_a_block_that_was_used_again_is_not_found():
    """A pool that has to give each text's blocks to the next: the first text, asked for again, is computed again."""
    model = build()
    engine, some = Engine(model, blocks=12, block_size=4), requests(prompts([30, 31, 32]))
    want = [plain(model, request)[0] for request in some]
    for number in (0, 1, 0, 2, 2, 1, 0):
        (answer,) = engine.run([some[number]])
        assert answer.tokens == want[number]
    assert answer.cached < 28


def test_s3_a_prompt_that_is_known_to_its_end():
    """Of exactly 2 blocks, twice: one is read, the other computed again, for its last token's answer. After a request
    gave way, what it has made belongs to its prompt, and it decodes only when that is computed."""
    model, (prompt,) = build(), prompts([8])
    engine = Engine(model, blocks=8, block_size=4)
    first, second = (engine.run([Request(0, prompt, 9)])[0] for _ in range(2))
    assert first.tokens == second.tokens == plain(model, Request(0, prompt, 9))[0]
    assert [plan[0][1:3] for plan in engine.plans if plan[0][2] > 1] == [(0, 8), (4, 4)]
    assert second.cached == 4
    engine, answers, _ = serve(model, requests(), blocks=12, block_size=4, policy=prefill_first(5))
    assert texts(answers) == expected()[0]
    number, made = next((answer.request.number, answer.tokens) for answer in answers if answer.preempted)
    starts = [start for plan in engine.plans for each, start, _, _ in plan if each == number]
    again = [start for start, before in zip(starts[1:], starts, strict=False) if start <= before]
    assert len(again) == answers[number].preempted and len(made) == 12


def test_s5_twice_in_a_batch_as_alone():
    """What is read from the cache is attended to, at its own positions: both begin after the beginning, in one step."""
    model, (prompt,) = build(), prompts([19])
    (alone,) = Engine(model, blocks=40, block_size=4).run([Request(0, prompt, 9)])
    engine = Engine(model, blocks=40, block_size=4)
    engine.run([Request(0, prompt[:17], 1)])
    answers = engine.run([Request(number, prompt, 9) for number in range(2)])
    assert texts(answers) == [alone.tokens] * 2 == [plain(model, Request(0, prompt, 9))[0]] * 2
    assert [answer.cached for answer in answers] == [16, 16]
    assert [item[1:3] for item in engine.plans[1]] == [(16, 3), (16, 3)]


def test_s6_whoever_gives_way_says_the_same():
    """Any request is made to give way, at any step, in its prompt and after it."""
    model, dice = build(), torch.Generator().manual_seed(0)
    engine = Engine(model, blocks=80, block_size=4, policy=mixed(8, 16))
    decide = engine.scheduler.step

    def step():
        running = engine.scheduler.running
        if running and torch.rand((), generator=dice) < 0.5:
            engine.scheduler._preempt(running[int(torch.randint(len(running), (), generator=dice))])
        return decide()

    engine.scheduler.step = step
    answers = engine.run(requests())
    assert texts(answers) == expected()[0]
    assert sum(answer.preempted > 0 for answer in answers) >= 4 and engine.pool.free == 80


@pytest.mark.parametrize("ends", ["abort", "give way"])
def test_s8_a_block_is_free_when_request_and_writer_are_done(ends):
    """Somebody still writes into a request's blocks, or sends them (S9), when it is aborted or gives way: the next
    request gets none of them, and waits."""
    scheduler = Scheduler(BlockPool(4, 4))
    scheduler.add(Request(0, [1] * 9, 3))
    blocks = list(scheduler.step().items[0].blocks)
    scheduler.pool.hold(blocks)
    if ends == "abort":
        scheduler.abort(0)
    else:
        scheduler._preempt(scheduler.running[0])
    assert scheduler.pool.free == 1
    scheduler.add(Request(1, [2] * 3, 2))
    taken = scheduler.step()
    if ends == "abort":
        assert taken.plan == ((1, 0, 3, tuple(set(range(4)) - set(blocks))),)
    else:
        assert taken is None  # the elder waits first, for three blocks
    scheduler.pool.release(blocks)
    assert scheduler.pool.free == (3 if ends == "abort" else 4) and scheduler.step() is not None


def test_s13_two_in_a_pool_for_one_and_a_half():
    model = build()
    some = [Request(i, prompt, 12) for i, prompt in enumerate(prompts([20, 20]))]
    engine = Engine(model, blocks=12, block_size=4)
    answers = engine.run(some)
    assert texts(answers) == [plain(model, request)[0] for request in some]
    assert [answer.preempted for answer in answers] == [0, 1] and len(engine.plans) <= 25


STEP = 0.02  # seconds, and a millisecond for each token: a step takes longer, the more prompt there is in it


def under_way(policy, prompt=2048, asking=1):
    """A request decodes, and half a second later others come with long prompts: (the longest that it waits between
    two tokens, seconds until the last prompt is computed, the steps that had prompts in them)."""
    faked = Faked(4096, 16, policy, lambda work: STEP + 0.001 * sum(new for new, _ in work))
    victim = Request(0, [1] * 8, 400)
    others = [Request(i, [i + 1] * prompt, 2, arrival=0.5) for i in range(1, asking + 1)]
    answers = faked.run([victim, *others])
    longest = max(b - a for a, b in pairwise(answers[0].times))
    return longest, answers[-1].times[0] - 0.5, sum(any(new > 1 for new, _ in work) for work in faked.batches) - 1


def test_sv16_a_smaller_budget_is_steadier_and_slower():
    """The worst gap between tokens falls with the budget, to that of a step; prompts take longer, for more steps."""
    budgets = 1024, 512, 256, 128, 64, 32
    runs = [under_way(mixed(budget)) for budget in budgets]
    gaps, prompts, steps = zip(*runs, strict=True)
    assert list(gaps) == sorted(gaps, reverse=True) and len(set(gaps)) == len(gaps)
    assert list(prompts) == sorted(prompts) and len(set(prompts)) == len(prompts)
    for budget, gap, count in zip(budgets, gaps, steps, strict=True):
        assert gap == pytest.approx(STEP + 0.001 * budget)
        assert count == -(-2048 // (budget - 1))


def test_sv17_chunks_alone_do_not_help_who_decodes():
    """With prompts before everything else the victim waits for all of them, whether they come in chunks or not; one
    chunk a step beside its token, and it waits for a chunk."""
    whole, chunks, beside = (under_way(policy, asking=3)[0] for policy in (
        prefill_first(8192), prefill_first(256), mixed(256)))
    assert whole >= 3 * 2.048 and chunks > whole  # more steps, which take their time too
    assert beside == pytest.approx(STEP + 0.256)


def test_sv18_with_nobody_decoding_a_prompt_is_not_cut():
    for policy in (mixed(64), prefill_first()):
        faked = Faked(4096, 16, policy, lambda work: STEP + 0.001 * sum(new for new, _ in work))
        (answer,) = faked.run([Request(0, [1] * 2048, 4)])
        assert answer.times[0] == pytest.approx(STEP + 2.048)
        assert faked.batches == [[(2048, 2048)], *([(1, 2048 + i)] for i in (1, 2, 3))]
