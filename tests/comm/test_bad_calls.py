"""What can't be right is refused before any rank waits, with the numbers and the remedy; so are ranks that disagree."""

import re

import pytest
import torch

from shardlab import comm

ALONE = 0  # the rank that makes the bad calls; the others don't take part, so that one which waits would hang


def said(fn):
    """The ValueError that `fn` raises, as text."""
    try:
        fn()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def tracked(group, way):
    x = torch.ones(4, requires_grad=True)
    calls = [lambda: comm.all_reduce(x, group=group), lambda: comm.reduce(x, 0, group=group),
             lambda: comm.reduce_scatter(x, group=group), lambda: comm.all_gather(x, group),
             lambda: comm.all_to_all(x, group=group), lambda: comm.broadcast(x, 0, group),
             lambda: comm.gather(x, 0, group), lambda: comm.scatter(x, torch.ones(8), 0, group),
             lambda: comm.send(x, 1, group), lambda: comm.recv(x, 1, group)]
    if group.rank() == ALONE:
        with comm.use(**way), comm.record() as ledger:
            return [*map(said, calls), str(len(ledger.entries))]


def test_a_tensor_that_autograd_tracks_is_refused_by_every_verb(pool, way):
    *texts, entered = pool(2).run(tracked, way)[ALONE]
    assert all("autograd tracks" in text and "comm.regions" in text for text in texts) and len(texts) == 10
    assert entered == "0"


def expanded(group, way):
    x = torch.ones(1, 3).expand(4, 3)
    calls = [lambda: comm.all_reduce(x, group=group), lambda: comm.reduce(x, 0, group=group),
             lambda: comm.broadcast(x, 0, group), lambda: comm.scatter(x, torch.ones(8, 3), 0, group),
             lambda: comm.recv(x, 1, group)]
    with comm.use(**way):
        alone = [said(call) for call in calls] if group.rank() == ALONE else None
        return alone, comm.all_gather(x, group).tolist(), comm.broadcast(torch.ones(2)[:1].expand(1), 0, group).tolist()


def test_a_tensor_whose_elements_are_one_in_memory_is_not_written_to(pool, way):
    (texts, gathered, one), _ = pool(2).run(expanded, way)
    assert all("(4, 3) is expanded, with strides (0, 1): clone() it" in text for text in texts) and len(texts) == 5
    assert gathered == [[1.0] * 3] * 8 and one == [1.0]  # reading is no harm, nor is one element


BAD = {
    "op": (lambda x, g: comm.all_reduce(x, "mean", g), r"no op 'mean'; use one of sum, max, min, product"),
    "op-reduce": (lambda x, g: comm.reduce(x, 0, "avg", g), r"reduce has no op 'avg'"),
    "op-reduce_scatter": (lambda x, g: comm.reduce_scatter(x, "", g), r"reduce_scatter has no op ''"),
    "odd": (lambda x, g: comm.reduce_scatter(x[:3], group=g), r"dim 0 of \(3, 2\) over 2 ranks: pad it to 2 × n"),
    "odd-all_to_all": (lambda x, g: comm.all_to_all(x[:3], group=g), r"all_to_all splits dim 0 of \(3, 2\) over 2"),
    "scalar": (lambda x, g: comm.reduce_scatter(x[0, 0], group=g), r"dim 0 of \(\) over 2 ranks"),
    "scalar-all_to_all": (lambda x, g: comm.all_to_all(x[0, 0], [1, 0], [1, 0], g), r"1 rows, and the tensor is \(\)"),
    "broadcast": (lambda x, g: comm.broadcast(x, 7, g), r"cannot broadcast from rank 7: the group has ranks \[0, 1\]"),
    "reduce": (lambda x, g: comm.reduce(x, -1, group=g), r"cannot reduce to rank -1: the group has ranks \[0, 1\]"),
    "gather": (lambda x, g: comm.gather(x, 2, g), r"cannot gather to rank 2: the group has ranks \[0, 1\]"),
    "scatter": (lambda x, g: comm.scatter(x, x, 9, g), r"cannot scatter from rank 9: the group has ranks \[0, 1\]"),
    "send": (lambda x, g: comm.send(x, 3, g), r"cannot send to rank 3: the group has ranks \[0, 1\]"),
    "recv": (lambda x, g: comm.recv(x, 3, g), r"cannot receive from rank 3: the group has ranks \[0, 1\]"),
    "self": (lambda x, g: comm.send(x, ALONE, g), r"rank 0 can't send to itself: copy the tensor"),
    "self-recv": (lambda x, g: comm.recv(x, ALONE, g), r"rank 0 can't recv from itself: copy the tensor"),
    "splits": (lambda x, g: comm.all_to_all(x, [1, 2], [1, 2], g), r"\[1, 2\] are 3 rows, and the tensor is \(4, 2\)"),
    "splits-number": (lambda x, g: comm.all_to_all(x, [4], [4], g), r"input_split_sizes = \[4\]: give 2 numbers"),
    "splits-negative": (lambda x, g: comm.all_to_all(x, [2, 2], [-1, 5], g), r"each of output_split_sizes .* not -1"),
    "splits-half": (lambda x, g: comm.all_to_all(x, [2, 2], None, g), r"output_split_sizes is missing: say how many"),
    "whole": (lambda x, g: comm.scatter(x, None, 0, g), r"scatter from rank 0: give the whole tensor there"),
    "whole-elsewhere": (lambda x, g: comm.scatter(x, x, 1, g), r"scatter from rank 1: give the whole tensor there"),
    "whole-shape": (lambda x, g: comm.scatter(x[:1], x, 0, g), r"fills \(1, 2\) torch.float32 from \(2, 2\), not from "
                                                               r"\(4, 2\) torch.float32"),
    "whole-dtype": (lambda x, g: comm.scatter(x[:2], x.int(), 0, g), r"not from \(4, 2\) torch.int32"),
    "float8": (lambda x, g: comm.all_reduce(x.to(torch.float8_e4m3fn), group=g),
               r"torch has no sum of float8_e4m3fn, so no all_reduce\(sum\) of it: convert the tensor"),
    "batch": (lambda x, g: comm.batch_isend_irecv([]), r"one or more messages of one group, not 0 of 0"),
    "batch-op": (lambda x, g: comm.P2POp("send", x, 1, g), r"P2POp has no op 'send'; use 'isend' or 'irecv'"),
    "batch-second": (lambda x, g: comm.batch_isend_irecv([comm.P2POp("isend", x, 1, g), comm.P2POp("irecv", x, 5, g)]),
                     r"cannot receive from rank 5"),
}


def bad_calls(group, way):
    if group.rank() == ALONE:
        with comm.use(**way), comm.record() as ledger:
            return [said(lambda bad=bad: bad(torch.ones(4, 2), group)) for bad, _ in BAD.values()], len(ledger.entries)


def test_bad_calls_are_refused_with_their_numbers_and_not_counted(pool, way):
    texts, entered = pool(2).run(bad_calls, way)[ALONE]
    for (name, (_, words)), text in zip(BAD.items(), texts, strict=True):
        assert re.search(words, text), f"{name}: {text}"
    assert entered == 0


def gloo_alone(group):
    def refused(x):
        return [said(lambda: comm.all_reduce(x, group=group)), said(lambda: comm.reduce(x, 0, group=group)),
                said(lambda: comm.reduce_scatter(x, group=group))]

    return refused(torch.ones(2, dtype=torch.int16)) if group.rank() == ALONE else None


def test_what_gloo_cannot_add_is_refused_with_the_algorithm_that_can(pool):
    texts = pool(2).run(gloo_alone)[ALONE]
    for verb, text in zip(("all_reduce", "reduce", "reduce_scatter"), texts, strict=True):
        assert f"gloo has no {verb} of int16" in text and "comm.use('ring')" in text


def refused_in_two_groups(group):
    both = [torch.distributed.new_group([0, 1]) for _ in range(2)]
    text = said(lambda: comm.batch_isend_irecv([comm.P2POp("isend", torch.ones(1), 1 - group.rank(), each)
                                                for each in both]))
    comm.barrier(group)  # or the first to destroy one cuts off the other, which is still connecting
    for each in both:
        torch.distributed.destroy_process_group(each)
    return text


def test_a_batch_is_of_one_group(pool):
    assert all("not 2 of 2" in text for text in pool(2).run(refused_in_two_groups))


@pytest.mark.parametrize("verb", [
    lambda: comm.all_reduce(torch.ones(1)), lambda: comm.barrier(), lambda: comm.broadcast(torch.ones(1), 0),
    lambda: comm.reduce_scatter(torch.ones(1)), lambda: comm.send(torch.ones(1), 0),
    lambda: comm.batch_isend_irecv([comm.P2POp("isend", torch.ones(1), 0)])])
def test_outside_ranks_the_error_names_the_launcher(verb):
    assert "shardlab.launch" in said(verb)


def disagree(group, way):
    r, x = group.rank(), torch.ones(4)
    with comm.use(**way, debug=True):
        return [said(lambda: comm.all_reduce(torch.ones(4 + r), group=group)),
                said(lambda: comm.all_reduce(x.double() if r else x, group=group)),
                said(lambda: comm.all_reduce(x, "max" if r else "sum", group)),
                said(lambda: comm.broadcast(x, 0, group) if r else comm.all_reduce(x, group=group)),
                said(lambda: comm.barrier(group) if r else comm.all_gather(x, group)),
                said(lambda: comm.broadcast(x, r, group)),
                said(lambda: comm.gather(x, r, group))]


def test_debug_mode_raises_on_every_rank_where_the_ranks_disagree(pool, way):
    """FAULTS C8 among them: without the check, mixed dtypes abort the process. Shared memory checks without it."""
    for shape, dtype, op, verb, order, source, to in pool(2).run(disagree, way):
        assert "(4,)" in shape and "(5,)" in shape and "rank 0" in shape and "rank 1" in shape
        assert "float32" in dtype and "float64" in dtype
        assert "all_reduce(max)" in op and "all_reduce(sum)" in op
        assert "broadcast" in verb and "all_reduce" in verb
        assert "barrier" in order and "all_gather" in order
        assert "broadcast from rank 0" in source and "broadcast from rank 1" in source
        assert "gather to rank 0" in to and "gather to rank 1" in to


def after_a_disagreement(group, way):
    with comm.use(**way, debug=True):
        said(lambda: comm.all_reduce(torch.ones(4 + group.rank()), group=group))
        return comm.all_reduce(torch.arange(2) + 10 * group.rank(), group=group).tolist()


def test_who_has_caught_it_can_go_on(pool, way):
    assert pool(2).run(after_a_disagreement, way) == [[10, 12]] * 2
