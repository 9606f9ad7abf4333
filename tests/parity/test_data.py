"""Data parallelism against the plain model: every rank's gradients, norm, losses and weights, step by step."""

import pytest
import torch
from replicas import FROZEN, OPTIMIZERS, backward, batch, build, check, check_float32, compare

from shardlab import comm
from shardlab.parallel import data, grads

WORLDS = [2, 3, 4]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("p", WORLDS)
def test_replicas_are_the_plain_model(pool, p, optimizer):
    check(pool(p).run(compare, 0, optimizer, steps=5 if optimizer == "adamw" else 2))


@pytest.mark.parametrize("p", WORLDS)
def test_replicas_are_the_plain_model_through_shared_memory(pool, p):
    check(pool(p).run(compare, 0, transport="shm", steps=2))
    check_float32(pool(p).run(compare, 0, "sgd", "shm", torch.float32, steps=2))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_replicas_that_compute_again(pool, recompute):
    check(pool(2).run(compare, 0, recompute=recompute, steps=2))


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_tables_and_norms(pool, tied):
    for frozen in (("embed_tokens.weight", *FROZEN), ("norm.weight", "layers.1.mlp.down_proj.bias")):
        check(pool(2).run(compare, 0, frozen=frozen, tied=tied, steps=2))


def again(group):
    ways = ("backend", "shm", "backend", "shm", "backend")
    outcomes = [compare(group, 0, steps=2, transport=transport) for transport in ways]
    assert outcomes[0] == outcomes[2] == outcomes[4] and outcomes[1] == outcomes[3]
    return outcomes


def test_five_times_over(pool):
    for outcomes in pool(2).run(again):
        check(outcomes)


def counted(group, nbytes, holding):
    """The collectives of a step's backward passes, and of finish; and the sizes of what is trained."""
    twin = data.replicate(build(group.rank()), group, nbytes)
    tokens, labels = batch(group.size(), 0)
    with comm.record() as ledger:
        if holding:
            backward(twin, tokens[group.rank()], labels[group.rank()], group)
        else:
            twin.loss(tokens[0, 0], labels[0, 0], 50).backward()
    with comm.record() as finish:
        grads.finish(twin)
    sent = ledger.where(phase="backward").entries
    assert {each.op for each in sent} == {"all_reduce"}
    return len(sent), sum(each.payload for each in sent), [(each.op, each.payload) for each in finish.entries], [
        p.numel() for p in twin.parameters() if p.requires_grad]


def test_of_three_passes_two_send_nothing(pool):
    """FAULTS D2: inside no_sync, forward and backward both."""
    for nbytes in (1, 3000, 10**9):
        for holding in (False, True):
            for calls, payload, finish, sizes in pool(2).run(counted, nbytes, holding):
                assert payload == 8 * sum(sizes) and finish == [("all_reduce", len(sizes))]
                assert calls == {1: len(sizes), 10**9: 1}.get(nbytes, calls) and 1 <= calls <= len(sizes)


def early(group):
    """How many collectives have begun when backward comes to the first block, and in all."""
    twin = build(group.rank())
    twin.layers[1].unused.requires_grad_(False)  # or all that is after it would wait for it
    data.replicate(twin, group, 3000)
    tokens, labels = batch(group.size(), 0)
    then = []
    with comm.record() as ledger:
        twin.layers[0].register_full_backward_pre_hook(lambda *_: then.append(len(ledger.entries)))
        twin.loss(tokens[0, 0], labels[0, 0], 50).backward()
    grads.finish(twin)
    return then[0], len(ledger.entries)


def test_gradients_leave_while_backward_runs(pool):
    assert all(0.3 * count < before < 0.7 * count for before, count in pool(2).run(early))


def started(group):
    """Ranks begin with other weights and buffers; the loss is one number for all from the first step on."""
    model = build(group.rank())
    model.register_buffer("table", torch.full((3,), float(group.rank())))
    same = data.replicate(model, group) is model
    return same, model.table.tolist(), [p.detach().clone() for p in model.parameters()]


def test_replicas_begin_with_the_first_ones_weights_and_buffers(pool):
    outcomes = pool(3).run(started)
    for same, table, weights in outcomes:
        assert same and table == [0, 0, 0]
        assert all(map(torch.equal, weights, outcomes[0][2]))


def test_a_single_replica_is_the_model_itself(pool):
    def alone(group):
        with comm.record() as ledger:
            model = data.replicate(build(0), group)
        return hasattr(model, "reducer"), len(ledger.entries)

    assert pool(1).run(alone) == [(False, 0)]
