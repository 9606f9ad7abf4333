"""What `check` refuses, and that it names rank and action; a second, naive simulator gives the same verdicts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lists import copied, made

from shardlab.schedule import Action, B, F, I, W, check, computing, gpipe, one_f_one_b, placement, with_transfers

PROVED = [orders for sizes in ((2, 4, 1), (3, 6, 1), (4, 8, 1), (2, 4, 2), (3, 3, 3)) for what, orders in made(*sizes)
          if what[0] != "forward_only"]
QUIET = [make(*sizes) for make in (gpipe,) for sizes in ((2, 4), (3, 6), (4, 8))]  # no two messages side by side
PASSES, KINDS = "FBIW", ["F", "B", "I", "W", "send F", "recv F", "send B", "recv B"]


def refused(orders, *words):
    with pytest.raises(ValueError) as error:
        check(orders)
    for word in ("rank", *words):
        assert word in str(error.value)


def some(orders, n, kinds=KINDS):
    """n (rank, place)s of actions of these kinds."""
    every = [(rank, place) for rank, order in enumerate(orders) for place, action in enumerate(order)
             if action.kind in kinds and not action.paired and not (place and order[place - 1].paired)]
    return random.Random(0).sample(every, min(n, len(every)))


def about(action):
    return f"stage {action.stage}, micro-batch {action.microbatch}"


@pytest.mark.parametrize("orders", PROVED)
def test_an_action_dropped_or_done_twice(orders):
    for rank, place in some(orders, 30):
        less, more = copied(orders), copied(orders)
        action = less[rank].pop(place)
        refused(less, about(action))
        more[rank].insert(place, action)
        refused(more, about(action))


@pytest.mark.parametrize("orders", PROVED)
def test_backward_in_the_place_of_its_forward(orders):
    for rank, place in some(orders, 20, "BI"):
        late = copied(orders)
        action = late[rank][place]
        forward = F(action.stage, action.microbatch)
        if forward in late[rank]:  # not paired
            late[rank][late[rank].index(forward)], late[rank][place] = action, forward
            refused(late, f"rank {rank} does {action} before it has ")


@pytest.mark.parametrize("orders", PROVED)
def test_a_message_received_after_its_use(orders):
    for rank, place in some(orders, 20, ("recv F", "recv B")):
        late = copied(orders)
        message, after = late[rank][place:place + 2]
        step = 1 if message.kind == "recv F" else -1
        if after.kind in "FBI" and (after.stage, after.microbatch) == (message.stage + step, message.microbatch):
            late[rank][place:place + 2] = after, message
            refused(late, f"rank {rank} does {after} before it has {message.kind[-1]} of {about(message)}")


def peer(orders, rank, message):
    kind = {"send": "recv", "recv": "send"}[message.kind[:4]] + message.kind[4:]
    return next(other for other, order in enumerate(orders) if message._replace(kind=kind) in order)


@pytest.mark.parametrize("orders", PROVED)
def test_two_messages_in_another_order_at_one_end(orders):
    seen = 0
    for rank, order in enumerate(orders):
        for place in range(len(order) - 1):
            two = order[place:place + 2]
            if all(action.kind not in PASSES for action in two) and len({peer(orders, rank, a) for a in two}) == 1:
                crossed = copied(orders)
                crossed[rank][place:place + 2] = two[::-1]
                refused(crossed, "deadlock", f"rank {rank} at {two[1]}", f"rank {peer(orders, rank, two[0])} at ")
                seen += 1
    assert seen or orders in QUIET


def test_a_deadlock_by_hand():
    """Both send first: each waits for a receiver that never comes."""
    good = one_f_one_b(2, 2)
    check(good)
    send = good[0].index(Action("send F", 0, 1))
    assert good[0][send + 1] == Action("recv B", 1, 0)
    good[0][send:send + 2] = good[0][send:send + 2][::-1]
    refused(good, "deadlock", "rank 0 at recv B of stage 1, micro-batch 0",
            "rank 1 at recv F of stage 0, micro-batch 1")


def test_passes_of_a_stage_on_two_ranks():
    moved = copied(one_f_one_b(2, 2))
    moved[0].append(moved[1].pop(moved[1].index(B(1, 1))))
    refused(moved, "rank 1 does F of stage 1, micro-batch 1, and rank 0 has done passes of that stage")
    again = copied(one_f_one_b(2, 2))
    again[1].append(F(0, 0))
    refused(again, "rank 1 does F of stage 0, micro-batch 0, and rank 0 has done passes")


@pytest.mark.parametrize("action", [Action("G", 0, 0), Action("send W", 0, 0), Action("recv", 0, 0), Action("", 0, 0),
                                    F(-1, 0), F(0, -1), F(0.5, 0), F(0, "1"), F(None, 0), Action(None, 0, 0),
                                    Action(["F"], 0, 0)])
def test_an_action_that_is_none(action):
    refused([[F(0, 0), B(0, 0)], [action]], "rank 1 has no action ", str(action))


@pytest.mark.parametrize("orders", [["F"], [[("F", 0, 0)]], [[None]], [F(0, 0), B(0, 0)], [[F(0, 0), "B"]]])
def test_what_is_no_action(orders):
    with pytest.raises(TypeError, match=r"rank 0 has .* which is no Action"):
        check(orders)


def paired(action):
    return action._replace(paired=True)


@pytest.mark.parametrize(("order", "why"), [
    ([paired(F(0, 0)), F(0, 1), B(0, 0), B(0, 1)], "rank 0 runs F of stage 0, micro-batch 0 paired with F of stage 0"),
    ([F(0, 0), F(0, 1), B(0, 0), paired(B(0, 1))], "rank 0 runs B of stage 0, micro-batch 1 paired with the next"),
    ([paired(F(0, 0)), B(0, 0), F(0, 1), B(0, 1)], "a pair is an F and a B, not of the same stage and micro-batch"),
    ([F(0, 0), paired(F(0, 1)), I(0, 0), W(0, 0), B(0, 1)], "paired with I of stage 0, micro-batch 0"),
    ([F(0, 0), paired(F(0, 1)), paired(B(0, 0)), F(0, 2), B(0, 1), B(0, 2)], "paired with B of stage 0"),
])
def test_a_pair_that_is_none(order, why):
    refused([order], why)


def test_a_pair_that_is_one():
    check([[F(0, 0), paired(F(0, 1)), B(0, 0), B(0, 1)]])
    check([[F(0, 0), paired(B(0, 0)), F(0, 1), B(0, 1)]])


def test_messages_that_nobody_needs():
    two = one_f_one_b(2, 1)
    refused([two[0], [Action("recv F", 1, 0), *two[1]]], "rank 1 does recv F of stage 1, micro-batch 0, which no pass")
    aside = [[*two[0], Action("send F", 0, 0)], two[1], [Action("recv F", 0, 0)]]
    refused(aside, "rank 2 does recv F of stage 0, micro-batch 0, which no pass of its needs")
    unmade = [[Action("send F", 0, 0), *two[0]], two[1]]
    refused(unmade, "rank 0 does send F of stage 0, micro-batch 0 before it has made it")
    passed_on = [two[0], [*two[1], Action("send F", 0, 0)], [Action("recv F", 0, 0)]]
    refused(passed_on, " of stage 0, micro-batch 0")
    to_itself = [[F(0, 0), Action("send F", 0, 0), Action("recv F", 0, 0), B(0, 0)]]
    refused(to_itself, "deadlock", "rank 0 at send F of stage 0, micro-batch 0")
    again = [two[0], [*two[1], Action("recv F", 0, 0)]]
    refused(again, "rank 1 does recv F of stage 0, micro-batch 0, which it has already")


def test_what_is_not_complete():
    for nothing in ([], [[]], [[Action("send F", 0, 0)]]):
        with pytest.raises(ValueError, match="a schedule needs forward passes, and this one has none"):
            check(nothing)
    refused([[B(0, 0)]], "rank 0 does B of stage 0, micro-batch 0: it takes one F")
    refused([[F(0, 0), F(2, 0)]], "no rank does F of stage 1, micro-batch 0: the stage is on none")
    refused([[F(0, 0), F(0, 2)]], "no rank does F of stage 0, micro-batch 1: the stage is on ranks [0]")
    refused([[F(10**9, 10**9)]], "no rank does F of stage 0, micro-batch 0")  # and at once
    refused([[F(0, 0), F(0, 0)]], "rank 0 does F, F of stage 0, micro-batch 0: it takes one F")
    refused([[F(0, 0), B(0, 0), F(0, 1)]], "rank 0 does F of stage 0, micro-batch 1: it takes one F, and one B or")
    refused([[F(0, 0), B(0, 0), B(0, 1)]], "rank 0 does B of stage 0, micro-batch 1")
    refused([[F(0, 0), I(0, 0)]], "rank 0 does F, I of stage 0, micro-batch 0")
    refused([[F(0, 0), I(0, 0), B(0, 0), W(0, 0)]], "rank 0 does F, I, B, W of stage 0")
    refused([[F(0, 0), W(0, 0), I(0, 0)]], "rank 0 does W of stage 0, micro-batch 0 before it has B of stage 0")


def test_a_rank_may_have_nothing_to_do():
    orders = [[], [F(0, 0), B(0, 0)], []]
    check(orders)
    assert placement(orders) == [[], [0], []] and with_transfers(orders) == computing(orders) == orders


# A second proof, as plain as can be: all heads are looked at again and again until nothing moves.

def strict(orders):
    """How the lists go: 'ends', 'early' (a pass or a send before what it needs) or 'waits'."""
    lists, last = copied(orders), max(action.stage for order in orders for action in order)
    have = [set() for _ in lists]
    moved = True
    while moved:
        moved = False
        for mine, order in zip(have, lists, strict=True):
            while order and order[0].kind in PASSES:
                kind, s, i, _ = order.pop(0)
                needed = {"F": {("F", s - 1, i)} if s else set(), "W": {("B", s, i)}}.get(
                    kind, {("F", s, i)} | ({("B", s + 1, i)} if s < last else set()))
                if not needed <= mine:
                    return "early"
                mine.add((kind.replace("I", "B"), s, i))
                moved = True
        for a, b in ((a, b) for a, _ in enumerate(lists) for b, _ in enumerate(lists)):
            if lists[a] and lists[a][0].kind[:4] == "send":
                send = lists[a][0]
                if (send.kind[-1], *send[1:3]) not in have[a]:
                    return "early"
                if lists[b] and lists[b][0] == send._replace(kind="recv" + send.kind[4:]):
                    have[b].add((send.kind[-1], *send[1:3]))
                    del lists[a][0], lists[b][0]
                    moved = True
    return "waits" if any(lists) else "ends"


def verdict(orders):
    try:
        check(orders)
    except ValueError as error:
        return "waits" if "deadlock" in str(error) else "early" if " before it has " in str(error) else str(error)
    return "ends"


def test_both_simulators_agree_on_lists_in_a_random_order():
    chance, seen = random.Random(6), []
    for _ in range(400):
        orders = copied(chance.choice([one for one in PROVED if not any(a.paired for o in one for a in o)]))
        for _ in range(chance.choice((1, 1, 2, 5))):
            order = chance.choice(orders)
            place = chance.randrange(len(order))
            order.insert(max(0, place + chance.choice((-3, -2, -1, 1, 2, 3))), order.pop(place))
        seen.append(verdict(orders))
        assert seen[-1] == strict(orders)
    assert {what for what in set(seen) if seen.count(what) >= 40} == {"ends", "early", "waits"} == set(seen)


anything = st.builds(Action, st.sampled_from([*KINDS, "F", "F", "B", "send W", None, 3]),
                     st.sampled_from([0, 0, 1, 1, 2, -1, 10**9, 0.5, None]), st.sampled_from([0, 0, 0, 1, -1, "0"]),
                     st.sampled_from([False, False, False, True, None]))
likely = st.builds(Action, st.sampled_from(["F", "F", "B", *KINDS]), st.integers(0, 1), st.just(0))


@settings(max_examples=300)
@given(st.lists(st.lists(likely, max_size=5), max_size=3)
       | st.lists(st.lists(anything | likely, max_size=8), max_size=4))
def test_any_lists_are_accepted_or_refused(orders):
    try:
        check(orders)
    except (ValueError, TypeError):
        return
    assert strict(orders) == "ends"


@pytest.mark.parametrize(("orders", "error", "words"), [
    ([[F(0, 0), F(0, 0), B(0, 0), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]], ValueError,
     "rank 0 does F, F, B of stage 0, micro-batch 0: it takes one F, and one B"),
    ([[F(0, 0), F(0, 1), B(0, 0), B(0, 1)], [F(1, 0), B(1, 0), F(1, 1)]], ValueError,
     "rank 1 does F of stage 1, micro-batch 1: it takes one F, and one B"),
    ([["F0", "B0"], ["F0", "B0"]], TypeError, "rank 0 has 'F0', which is no Action"),
])
def test_lists_that_wait_for_what_is_not_there_are_told_what_is_missing(orders, error, words):
    with pytest.raises(error, match=words):
        with_transfers(orders)
