"""What can't be meant is refused at once, in a sentence, on the rank that says it."""

import numpy
import pytest
import torch
import torch.distributed as dist

from shardlab import comm

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def said(fn):
    try:
        return str(fn())
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def no_tensors(group):
    return [said(lambda v=verb, x=thing: getattr(comm, v)(x, group=group))
            for verb in VERBS for thing in (numpy.ones(2), [1.0, 2.0], 3.0, None)]


def test_what_is_no_tensor(pool):
    for lines in pool(2).run(no_tensors):
        assert len(lines) == 16
        assert all(" takes a tensor, not " in line and line.startswith("TypeError") for line in lines)


def odd_tensors(group):
    rank = group.rank()
    tracked = torch.ones(4, requires_grad=True)
    with torch.inference_mode():
        frozen = torch.ones(2)
    return [said(lambda: comm.all_reduce(torch.ones(2, device="meta"), group=group)),
            said(lambda: comm.all_gather(torch.ones(2).to_sparse(), group)),
            said(lambda: comm.scatter(torch.zeros(2), tracked if rank == 0 else None, 0, group)) if rank == 0 else "",
            said(lambda: comm.all_reduce(frozen, group=group))]


def test_tensors_without_values_of_their_own(pool):
    meta, sparse, tracked, frozen = pool(2).run(odd_tensors)[0]
    assert "on the meta device" in meta and "torch.sparse_coo" in sparse
    assert "autograd tracks" in tracked and "made in inference mode" in frozen


def inferring(group):
    with torch.inference_mode():
        sums = [comm.all_reduce(torch.ones(4)[::2], group=group)]
        for way in ({"algorithm": "ring"}, {"transport": "shm"}):
            with comm.use(**way):
                sums.append(comm.all_reduce(torch.ones(2), group=group))
    return [x.tolist() for x in sums]


def test_inside_inference_mode_all_goes_on(pool):
    assert pool(2).run(inferring) == [[[2.0, 2.0]] * 3] * 2


def odd_groups(group):
    x, alone = torch.ones(2), dist.new_group([0])
    return [said(lambda: comm.all_reduce(x, group=0)), said(lambda: comm.all_reduce(x, group=[])),
            said(lambda: comm.all_reduce(x, group=alone)) if group.rank() == 1 else "",
            said(lambda: comm.broadcast(x, True, group)), said(lambda: comm.broadcast(x, "1", group)),
            said(lambda: comm.half_round_trips(group, [8], repeats=0)),
            said(lambda: comm.half_round_trips(group, [1.5])),
            said(lambda: comm.all_to_all(x, [1.9, 0.1], [1, 1], group))]


def test_groups_ranks_and_counts(pool):
    number, empty, other, flag, text, none, part, split = pool(2).run(odd_groups)[1]
    assert number.startswith("TypeError: group must be a process group, or None") and "not []" in empty
    assert other.startswith("ValueError: rank 1 is not in this group")
    assert "from rank True" in flag and "from rank '1'" in text
    assert "repeats must be a whole number of at least 1, not 0" in none and "not 1.5" in part
    assert "each of input_split_sizes must be a whole number of at least 0, not 1.9" in split


def test_numbers_of_numpy_are_numbers(pool):
    from shardlab.cost import messages
    assert messages("all_reduce", "ring", numpy.int64(5), 4, numpy.int32(2)) == messages("all_reduce", "ring", 5, 4, 2)


@pytest.mark.parametrize("wrong", ["no", 1, 0.0])
def test_debug_is_true_or_false(wrong):
    with pytest.raises(ValueError, match="debug must be true or false"):
        with comm.use(debug=wrong):
            pass
