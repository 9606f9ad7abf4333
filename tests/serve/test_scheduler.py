"""The scheduler with nobody who computes: who takes part in each step, with what, and that all come to their end.

In place of tensors each slot of a block holds the text up to its token: so a wrong position, a block that two write, a
known block that isn't what it is taken for, and a token that was lost are all seen where they are read.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Faked

from shardlab.serve import BlockPool, Request, Scheduler, mixed, prefill_first


class Told:
    """Looks at each batch as those who compute it would."""

    def __init__(self, faked, requests):
        self.scheduler, self.slots = faked.scheduler, {}
        self.requests = {request.number: request for request in requests}
        self.computed, self.begun = Counter(), []

    def __call__(self, batch):
        size, written = self.scheduler.pool.block_size, set()
        running = {each.answer.request.number: each for each in self.scheduler.running}
        assert len({item.number for item in batch.items}) == len(batch.items) > 0
        for item in batch.items:
            answer = running[item.number].answer
            text = [*self.requests[item.number].prompt, *answer.tokens]
            stop = item.start + len(item.tokens)
            assert item.tokens and item.tokens == text[item.start : stop]
            assert item.samples == (stop == len(text))
            assert len(item.blocks) * size >= stop
            for at in range(item.start):
                assert self.slots[item.blocks[at // size], at % size] == text[: at + 1], "what is read is its own"
            for at in range(item.start, stop):
                block = item.blocks[at // size]
                assert self.scheduler.pool.users[block] == 1 and (block, at % size) not in written
                written.add((block, at % size))
            self.computed[item.number] += len(item.tokens)
            if item.number not in self.begun:
                self.begun.append(item.number)
        for item in batch.items:  # all at once, as tensors are
            text = [*self.requests[item.number].prompt, *running[item.number].answer.tokens]
            for at in range(item.start, item.start + len(item.tokens)):
                self.slots[item.blocks[at // size], at % size] = text[: at + 1]
        oldest = min((each.order for each in self.scheduler.waiting), default=float("inf"))
        assert all(each.order < oldest for each in self.scheduler.running), "first come, first served"
        assert len(self.scheduler.running) <= self.scheduler.most


REQUESTS = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 9),
                              st.integers(0, 12)), min_size=1, max_size=8)
BUDGETS = st.tuples(st.booleans(), st.integers(1, 12), st.integers(1, 20))


CASES = st.tuples(REQUESTS, BUDGETS, st.integers(1, 3), st.integers(1, 12), st.sampled_from([1, 2, 3, 256]),
                  st.sampled_from([0.0, 0.2, 0.9]))


@settings(max_examples=150)
@given(CASES)
def test_every_request_that_is_taken_is_answered(case):
    check(*case)


@pytest.mark.more
@settings(max_examples=4000)
@given(CASES)
def test_of_many_more_each_is_answered(case):
    check(*case)


def check(some, budgets, size, blocks, most, watermark):
    """Run them, and look at every batch and at what came of each."""
    some = [Request(i, prompt, new, arrival=float(when)) for i, (prompt, new, when) in enumerate(some)]
    mixes, budget, whole = budgets
    faked = Faked(blocks, size, mixed(budget, whole) if mixes else prefill_first(whole), most=most,
                  watermark=watermark)
    told, scheduler = Told(faked, some), faked.scheduler

    def look(batch):
        told(batch)
        decoding = {each.answer.request.number for each in scheduler.running if each.decoding}
        decodes = [item for item in batch.items if item.number in decoding]
        assert all(len(item.tokens) == 1 and item.samples for item in decodes)
        taken = sum(len(item.tokens) for item in batch.items) - len(decodes)
        if mixes:
            assert len(decodes) == len(decoding), "all that can"
            assert taken <= (max(0, budget - len(decodes)) if decodes else whole)
        else:
            assert taken <= whole and not (decodes and taken), "prompts before anything else"

    answers = faked.run(some, look, most=2000)
    fits = [request for request in some if -(-(len(request.prompt) + request.new_tokens - 1) // size) <= blocks]
    for request, answer in zip(some, answers, strict=True):
        if request not in fits:
            assert answer.refused and not answer.tokens and request.number not in told.computed
            continue
        assert not answer.refused and len(answer.tokens) == len(answer.times) == request.new_tokens
        assert answer.times == sorted(answer.times) and answer.times[0] > request.arrival
        if not answer.preempted:  # no token twice: the last made one is never read
            assert told.computed[request.number] + answer.cached == len(request.prompt) + request.new_tokens - 1
    by_arrival = sorted((request.arrival, request.number) for request in fits)
    assert told.begun == [number for _, number in by_arrival]
    assert scheduler.pool.free == blocks and not scheduler.busy
    assert scheduler.preempted == sum(answer.preempted for answer in answers)


def test_what_can_never_fit_is_refused_with_what_would():
    """FAULTS SV6: by prompt and new tokens, at once. vllm#52530: 1000 + 24 tokens, 1008 servable."""
    scheduler = Scheduler(BlockPool(63, 16))
    refused = scheduler.add(Request(0, [1] * 1000, 24))
    assert "1000 tokens and 24 new ones need 64 blocks, and there are 63: 1009 tokens in all" in refused.refused
    assert not scheduler.busy and scheduler.step() is None
    for prompt, new in ((1000, 9), (1008, 1), (1, 1008)):  # the last token made needs no place
        assert not scheduler.add(Request(1, [1] * prompt, new)).refused
    for prompt, new in ((1000, 10), (1009, 1), (2, 1008)):
        assert scheduler.add(Request(1, [1] * prompt, new)).refused


def test_a_pool_for_one_and_a_half():
    """FAULTS S13: two that each need 8 of 12 blocks. The younger gives way once, and is not begun again to give way
    again: it waits until it fits as a whole."""
    some = [Request(i, [i] * 20, 12) for i in range(2)]
    faked = Faked(12, 4, prefill_first())
    answers = faked.run(some, Told(faked, some), most=40)
    assert [len(answer.tokens) for answer in answers] == [12, 12]
    assert [answer.preempted for answer in answers] == [0, 1]
    assert len(faked.batches) <= 2 * 12 + 1


@pytest.mark.parametrize("policy", [prefill_first(), mixed(8)], ids=["prefill_first", "mixed"])
def test_the_youngest_gives_way(policy):
    some = [Request(i, [i] * 8, 20) for i in range(4)]
    faked = Faked(16, 4, policy)
    answers = faked.run(some, Told(faked, some), most=200)
    assert answers[0].preempted == 0 < answers[3].preempted
    ends = [answer.times[-1] for answer in answers]
    assert ends == sorted(ends)


def test_an_aborted_request_leaves_nothing():
    """Waiting, in the middle of its prompt, between two tokens, and while its batch is computed."""
    def fresh():
        scheduler = Scheduler(BlockPool(8, 4), prefill_first(4), most=1)
        answers = [scheduler.add(Request(i, [i] * 7, 5)) for i in range(2)]
        return scheduler, answers

    for steps in range(5):
        scheduler, answers = fresh()
        for _ in range(steps):
            batch = scheduler.step()
            scheduler.made(batch, {item.number: 9 for item in batch.items if item.samples}, 1.0)
        assert scheduler.abort(1) and not scheduler.abort(1)
        assert scheduler.abort(0) and scheduler.pool.free == 8 and not scheduler.busy and scheduler.step() is None
    scheduler = Scheduler(BlockPool(8, 4))
    answers = [scheduler.add(Request(i, [i] * 7, 5)) for i in range(2)]
    batch = scheduler.step()
    scheduler.abort(0)
    assert scheduler.made(batch, {0: 9, 1: 9}, 1.0) == []
    assert [answer.tokens for answer in answers] == [[], [9]], "the other goes on"
    assert scheduler.pool.share([0] * 7)[0] == [], "nothing is known of what was not computed"


def test_a_watermark_trades_waiting_for_steadiness():
    """As in vllm#44594: with some blocks left over at the door fewer give way, gaps between tokens are shorter, and
    the first token comes later."""
    some = [Request(i, [i % 11, i % 7, i] * 14, 60, arrival=0.05 * i) for i in range(60)]

    def run(watermark):
        faked = Faked(100, 4, prefill_first(), lambda work: 0.02 + 0.001 * sum(new for new, _ in work),
                      watermark=watermark)
        answers = faked.run(some)
        gaps = sorted(b - a for answer in answers for a, b in zip(answer.times, answer.times[1:], strict=False))
        first = sorted(answer.times[0] - answer.request.arrival for answer in answers)
        return faked.scheduler.preempted, sum(gaps[-len(gaps) // 100 :]), first[len(first) // 2]

    runs = [run(watermark) for watermark in (0.0, 0.1, 0.3)]
    preempted, tail, first = zip(*runs, strict=True)
    assert preempted[0] > preempted[1] > preempted[2]
    assert tail[0] > tail[2] and first[0] < first[2]


@pytest.mark.parametrize("watermark", [-0.1, 1.0, float("nan")])
def test_a_watermark_is_a_share(watermark):
    with pytest.raises(ValueError, match="from 0 to below 1"):
        Scheduler(BlockPool(8, 4), watermark=watermark)


def test_sizes_are_whole_numbers():
    for make in (lambda: prefill_first(0), lambda: mixed(0), lambda: mixed(8, 0),
                 lambda: Scheduler(BlockPool(8, 4), most=0), lambda: BlockPool(0, 4), lambda: BlockPool(4, 0)):
        with pytest.raises(ValueError):
            make()


def test_a_prompt_that_was_computed_elsewhere():
    """A request goes on from blocks that somebody has filled, those known first; it ends as any other."""
    scheduler = Scheduler(BlockPool(8, 4))
    answer = scheduler.add(Request(3, list(range(9)), 4))
    scheduler.abort(3)
    answer.tokens.append(50)
    blocks = scheduler.pool.take(3)
    scheduler.adopt(answer, blocks, 0, 0)
    batch = scheduler.step()
    assert batch.plan == ((3, 9, 1, tuple(blocks)),) and batch.items[0].tokens == [50]
    while batch is not None:
        scheduler.made(batch, {3: 60}, 2.0)
        batch = scheduler.step()
    assert answer.tokens == [50, 60, 60, 60] and scheduler.pool.free == 8
    assert len(scheduler.pool.share([*range(9), 50, 60, 60, 60])[0]) == 3
