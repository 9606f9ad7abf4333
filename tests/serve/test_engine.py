"""One process: whatever is cached, in chunks or not, beside others or alone, the text is the plain model's.

Tokens are equal, and so are the logits that they were chosen by, but for float32's rounding.
"""

from random import Random

import pytest
import torch
from served import KINDS, NEW, PROMPTS, apart, build, expected, plain, prompts, requests, serve, texts

from shardlab.serve import Engine, Request, VirtualClock, WallClock, mixed, prefill_first, sampled
from shardlab.serve.arrivals import gamma, mean_rate
from shardlab.serve.workload import synthetic

LONGEST = max(PROMPTS)
ROUNDING = 2e-5  # of the largest logit
POLICIES = {"whole prompts": prefill_first(), "chunks of 1": prefill_first(1), "chunks of 7": prefill_first(7),
            "one chunk for the longest": prefill_first(LONGEST), "one more": prefill_first(LONGEST + 1),
            "mixed, 8": mixed(8, 16), "mixed, 7 of chunks of 5": mixed(7, 5)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_mean_something(kind):
    """Of 12 tokens most are different ones, no two texts are alike, and no choice is so close that rounding makes it;
    the dense cache says the same."""
    tokens, logits = expected(kind)
    assert len(set(map(tuple, tokens))) == len(tokens) and min(len(set(each)) for each in tokens) >= 7
    best = torch.cat(logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 10 * ROUNDING * best.abs().max()
    model = build(kind)
    for request, text in zip(requests(), tokens, strict=True):
        assert model.generate(torch.tensor([request.prompt]), NEW)[0, len(request.prompt) :].tolist() == text


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_paged_and_in_chunks_it_is_the_plain_text(kind, policy):
    """FAULTS SV19: positions go on over chunks."""
    engine, answers, logits = serve(build(kind), requests(), blocks=80, block_size=4, policy=policy)
    tokens, theirs = expected(kind)
    assert texts(answers) == tokens
    assert apart(logits, theirs) < ROUNDING
    assert engine.pool.free == 80 and not engine.scheduler.preempted


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_with_blocks_of_any_size(block_size):
    _, answers, _ = serve(build(), requests(), blocks=-(-300 // block_size), block_size=block_size, policy=mixed(16))
    assert texts(answers) == expected()[0]


@pytest.mark.parametrize("policy", [prefill_first(), prefill_first(7), mixed(8)], ids=["whole", "chunks", "mixed"])
@pytest.mark.parametrize("kind", ["gqa", "mla", "mixture"])
def test_with_a_small_pool_requests_give_way_and_lose_nothing(kind, policy):
    """FAULTS S6: what was computed is computed again, prompt and made tokens, and nothing is said twice. The longest
    request needs 11 of the 12 blocks."""
    engine, answers, logits = serve(build(kind), requests(), blocks=12, block_size=4, policy=policy)
    tokens, theirs = expected(kind)
    assert texts(answers) == tokens and apart(logits, theirs) < ROUNDING
    assert engine.scheduler.preempted == sum(answer.preempted for answer in answers) > 0
    assert engine.pool.free == 12


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_known_beginning_is_read_and_not_computed(kind):
    """FAULTS S3, S5: the same prompt again, all of whole blocks; it with more behind it; another with the same
    beginning. Alone, all at once, and one after the other, each gets its own text."""
    model = build(kind)
    (prompt,) = prompts([24])
    some = [prompt, prompt, prompt + [7, 8, 9], prompt[:10] + [50] * 9, prompt[:12] + [3]]
    alone = [plain(model, request)[0] for request in requests(some)]
    assert len(set(map(tuple, alone))) == 4  # the first two are the same
    engine = Engine(model, blocks=60, block_size=4)
    together = engine.run(requests(some))
    again = engine.run(requests(some))
    assert texts(together) == texts(again) == alone
    assert [answer.cached for answer in together] == [0] * 5  # nothing was there when they began, all in one step
    assert [answer.cached for answer in again] == [20, 20, 24, 16, 12]
    assert engine.pool.free == 60


def test_a_made_text_is_known_too():
    """A conversation's next turn: prompt, answer and more."""
    model, turn = build(), requests()[1]
    engine = Engine(model, blocks=60, block_size=4)
    (said,) = engine.run([turn])
    following = Request(7, [*turn.prompt, *said.tokens, 5, 6], 9)
    (answer,) = engine.run([following])
    assert answer.tokens == plain(model, following)[0]
    assert answer.cached == 32  # of 24 + 12 all but the last is in the cache, in 8 whole blocks of 4


def test_a_text_ends_at_its_stop():
    model = build()
    tokens, _ = expected()
    given = [Request(r.number, r.prompt, r.new_tokens, stop=text[r.number]) for r, text in zip(requests(), tokens,
                                                                                              strict=True)]
    answers = Engine(model, blocks=80, block_size=4).run(given)
    for request, answer, text in zip(given, answers, tokens, strict=True):
        assert answer.tokens == text[: text.index(request.stop) + 1]
        assert answer.times == sorted(answer.times) and len(answer.times) == len(answer.tokens)


def test_one_token_may_be_all_that_is_wanted():
    answers = Engine(build(), blocks=80, block_size=4).run(requests(new=1))
    assert texts(answers) == [text[:1] for text in expected()[0]]


def test_a_cache_of_16_bits():
    """Of a model in float32, and of one in bfloat16 with the cache that is its own: close, and neither equal."""
    tokens, theirs = expected()
    _, answers, logits = serve(build(), requests(), blocks=80, block_size=4, dtype="bf16")
    first = [row[:1] for row in logits], [row[:1] for row in theirs]  # after these, texts may differ
    assert 1e-5 < apart(*first) < 2e-2
    assert sum(a[0] == b[0] for a, b in zip(texts(answers), tokens, strict=True)) >= 5
    engine, _, logits = serve(build().bfloat16(), requests(), blocks=80, block_size=4, policy=mixed(8))
    assert engine.cache.layout.dtype == "bf16" and engine.cache.layers[0].keys.data.dtype == torch.bfloat16
    assert 1e-4 < apart([row[:1].float() for row in logits], first[1]) < 5e-2


def test_by_a_virtual_clock_two_runs_are_the_same():
    """Plans with their block tables, tokens, and times, though the runs take other real times."""
    def run():
        clock = VirtualClock(lambda work: 0.01 + 0.002 * sum(new for new, _ in work))
        engine = Engine(build(), blocks=12, block_size=4, policy=mixed(8), clock=clock, choose=sampled(0.7, seed=1))
        given = [Request(r.number, r.prompt, r.new_tokens, arrival=0.03 * r.number) for r in requests()]
        answers = engine.run(given)
        assert [work for work, _ in engine.log] == [[(new, start + new) for _, start, new, _ in plan]
                                                    for plan in engine.plans]
        return engine.plans, texts(answers), [answer.times for answer in answers], engine.scheduler.preempted

    first = run()
    assert first == run() and first[3] > 0
    for answer_times, request in zip(first[2], requests(), strict=True):
        assert answer_times[0] >= 0.03 * request.number


def test_nobody_is_answered_before_they_come():
    """By the machine's own time: requests that are due later wait for it, and with nothing to do so does the engine."""
    clock = WallClock()
    given = [Request(0, [5, 6], 3), Request(1, [7], 3, arrival=0.3)]
    answers = Engine(build(), blocks=8, block_size=4, clock=clock).run(given)
    assert answers[1].times[0] >= 0.3 and answers[0].times[-1] < clock.now()


def test_a_virtual_clock_goes_by_steps_and_waits():
    """A prompt of 2 and two more tokens, a step of a second each; nobody for a while; then 1 and one more."""
    engine = Engine(build(), blocks=8, block_size=4, clock=VirtualClock(lambda work: 1.0))
    first, second = engine.run([Request(0, [5, 6], 3, arrival=0.5), Request(1, [7], 2, arrival=10.25)])
    assert first.times == [1.5, 2.5, 3.5] and second.times == [11.25, 12.25]


def test_of_those_that_come_at_once_the_first_is_first():
    engine = Engine(build(), blocks=80, block_size=4, policy=prefill_first(8), clock=VirtualClock(lambda work: 1.0))
    engine.run([*requests(), Request(9, [5], 2, arrival=40.0), Request(8, [6], 2, arrival=40.0)])
    begun = list(dict.fromkeys(number for plan in engine.plans for number, *_ in plan))
    assert begun == [0, 1, 2, 3, 4, 5, 9, 8]


def test_numbers_tell_requests_apart():
    with pytest.raises(ValueError, match="same number"):
        Engine(build(), blocks=8, block_size=4).run([Request(1, [5], 3), Request(1, [6], 3)])


def test_by_chance_with_a_seed():
    """The same seed says the same, another one something else; by temperature near 0 the likeliest is chosen."""
    def said(temperature, seed):
        engine = Engine(build(), blocks=80, block_size=4, choose=sampled(temperature, seed))
        return texts(engine.run(requests()))

    assert said(1.0, 1) == said(1.0, 1) != said(1.0, 2)
    assert said(1e-4, 1) == expected()[0]
    with pytest.raises(ValueError, match="likeliest"):
        sampled(0, 1)


class Jittery:
    """A clock that wakes up late, as sleeping does, and whose time goes on while a step is computed."""

    def __init__(self, now=0.0):
        self.time, self.random = now, Random(0)

    def begin(self):
        pass

    def now(self):
        return self.time

    def wait_until(self, when):
        self.time = max(self.time, when + self.random.uniform(0, 0.004))

    def spend(self, batch):
        self.time += self.random.uniform(0, 0.018)


def given(clock, requests):
    """(When each was due, when the engine took it), and the answers."""
    engine, taken = Engine(build(), blocks=400, block_size=4, clock=clock), []
    add = engine.scheduler.add

    def noted(request):
        taken.append((request.arrival, clock.now()))
        return add(request)

    engine.scheduler.add = noted
    return taken, engine.run(requests)


def test_requests_are_taken_at_the_rate_asked_for_however_late_the_engine_is():
    """9 ms of work between requests 10 ms apart, and sleeps that end late: gap by gap it would be half the rate."""
    taken, answers = given(Jittery(), synthetic(gamma(100.0, 0, 800), 1, 1, vocab=5))
    assert mean_rate([now for _, now in taken]) == pytest.approx(100.0, rel=0.01)
    assert all(now >= due for due, now in taken), "never early"
    assert max(now - due for due, now in taken) < 0.3, "late, but no later at the end than in between"
    assert all(len(answer.tokens) == 1 for answer in answers)


def test_they_are_taken_in_order_of_time_and_the_overdue_at_once():
    taken, _ = given(Jittery(5.0), [Request(i, [1], 1, t) for i, t in enumerate((9.0, 1.0, 7.0))])
    assert [due for due, _ in taken] == [1.0, 7.0, 9.0]
    assert taken[0][1] == 5.0 and 7.0 <= taken[1][1] < 7.1 and 9.0 <= taken[2][1] < 9.1


def test_a_second_run_counts_from_its_own_start():
    engine = Engine(build(), blocks=40, block_size=4, clock=VirtualClock(lambda work: 1.0))
    first, second = (engine.run([Request(i, [3, 5], 2)])[0] for i in range(2))
    assert first.times == second.times == [1.0, 2.0] and first.tokens == second.tokens


@pytest.mark.parametrize("token", [-1, 101, 2**65])
def test_a_token_that_there_is_not_is_refused_and_the_engine_goes_on(token):
    engine = Engine(build(), blocks=40, block_size=4)
    bad, good = engine.run([Request(0, [1, token], 2), Request(1, prompts()[0], 3)])
    assert f"token {token} of its prompt is outside the vocabulary of 101" in bad.refused and not bad.tokens
    assert good.tokens == expected()[0][0][:3] and engine.pool.free == 40


def test_a_prompt_may_be_a_tensor_and_is_known_again():
    ids = prompts()[5]
    engine = Engine(build(), blocks=80, block_size=4)
    answers = engine.run([Request(0, ids, 3)]) + engine.run([Request(1, torch.tensor(ids), 3)])
    assert answers[0].tokens == answers[1].tokens and answers[1].cached == (len(ids) - 1) // 4 * 4
    for wrong in ([1.5, 2.0], torch.tensor([[1, 2]]), torch.tensor([0.5]), "abc"):
        with pytest.raises(ValueError, match="whole numbers"):
            Request(2, wrong, 1)
