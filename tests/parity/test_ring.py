"""Ring attention against attention in one process: which pairs it computes, what it gives, and what it sends."""

import pytest
import torch
import torch.nn.functional as F

from shardlab import comm
from shardlab.model.attention import attend
from shardlab.parallel import ring
from shardlab.parallel.zigzag import join, places, share

HEADS = [(4, 2, 4, 4), (3, 3, 6, 4), (4, 1, 2, 6)]  # heads, KV heads, head_dim of q and k, head_dim of v


def inputs(n, heads, kv_heads, d, e, batch=2):
    """q, k, v and the gradient of what comes out, of `n` tokens."""
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(batch, h, n, width, generator=generator, dtype=torch.float64)
            for h, width in ((heads, d), (kv_heads, d), (kv_heads, e), (heads, e))]


def distances(group, n, heads, causal, tile, scale=None, transport="backend"):
    """How far out, dq, dk and dv, put together, are from those of attention over the whole."""
    *given, grad = inputs(n, *heads)
    whole = [x.clone().requires_grad_() for x in given]
    expected = attend(*whole, scale) if causal else F.scaled_dot_product_attention(*whole, scale=scale, enable_gqa=True)
    expected.backward(grad)
    own = [share(x, group, 7.0, 2).requires_grad_() for x in given]  # padding that would be seen
    before, ring.TILE = ring.TILE, tile
    try:
        with comm.use(transport=transport):
            out = ring.attend(*own, scale, group=group, causal=causal, length=n)
            out.backward(share(grad, group, 0.0, 2))
    finally:
        ring.TILE = before
    ours = [join(x, group, n, 2) for x in (out.detach(), *(x.grad for x in own))]
    theirs = [expected.detach(), *(x.grad for x in whole)]
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_ring_gives_what_one_process_gives(pool, p, causal):
    """FAULTS X4: out, dq, dk and dv, of as many tokens as divide or not, with KV heads that are shared or not, and with
    values of another size than keys."""
    for i, n in enumerate((1, 2 * p, 4 * p + 1, 23)):
        for seen in pool(p).run(distances, n, HEADS[i % 3], causal, (256, 3)[i % 2], (None, 0.3)[i % 2]):
            assert seen < 1e-12, (n, seen)


@pytest.mark.parametrize("p", [2, 3])
def test_a_ring_through_shared_memory(pool, p):
    assert max(pool(p).run(distances, 23, HEADS[0], True, 256, None, "shm")) < 1e-12


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("tile", [2, 3, 256])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_pair_is_computed_once_and_each_rank_computes_as_many_a_step(p, tile, causal, monkeypatch):
    monkeypatch.setattr(ring, "TILE", tile)
    for n in range(4 * p + 2):
        order = places(n, p)
        own, real = order.shape[1], (order < n).sum(1).tolist()
        pairs, work = [], []
        for step in range(p):
            work.append([0] * p)
            for r in range(p):
                for rows, keys, hidden in ring._tiles(r, (r - step) % p, own, real, causal):
                    for i in range(rows.start, rows.stop):
                        for j in range(keys):
                            if hidden is None or not hidden[i - rows.start, j]:
                                pairs.append((int(order[r, i]), int(order[(r - step) % p, j])))
                                work[-1][r] += 1
        assert sorted(pairs) == [(i, j) for i in range(n) for j in range(i + 1 if causal else n)]
        assert n % (2 * p) or all(len(set(each)) == 1 for each in work), work


def sent(group, dtype, causal=True):
    """What a forward and a backward hand to each verb: (phase, op, shape, bytes)."""
    *given, _ = inputs(8 * group.size(), 4, 2, 6, 5)
    own = [share(x.to(dtype), group, 0, 2).requires_grad_() for x in given]
    with comm.record() as ledger:
        ring.attend(*own, group=group, causal=causal).sum().backward()
    return [(e.phase, e.op, e.shape, e.payload) for e in ledger.entries]


@pytest.mark.parametrize("dtype,size,wide", [(torch.float64, 8, 8), (torch.bfloat16, 2, 4)], ids=["f64", "bf16"])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_rank_sends_p_less_1_times_its_keys_and_values_and_their_gradients(pool, p, dtype, size, wide):
    """KV heads as they are, 2 of 4; gradients in float32 at least."""
    k, v = (2, 2, 8, 6), (2, 2, 8, 5)
    for entries in pool(p).run(sent, dtype):
        for op in ("send", "recv"):
            of_phase = {phase: [entry[2:] for entry in entries if entry[:2] == (phase, op)]
                        for phase in ("forward", "backward")}
            hop = [(shape, size * torch.Size(shape).numel()) for shape in (k, v)]
            home = [(shape, wide * torch.Size(shape).numel()) for shape in (k, v)]
            assert of_phase["forward"] == (p - 1) * hop
            assert sorted(of_phase["backward"]) == sorted((p - 1) * (hop + home))
        assert len(entries) == 12 * (p - 1)


def late(group):
    """Whether the next keys are under way while this rank computes: sends that have begun before the first product."""
    *given, _ = inputs(8 * group.size(), 4, 2, 6, 5)
    own, then, scores = [share(x, group, 0, 2) for x in given], [], ring._scores
    with comm.record() as ledger:
        ring._scores = lambda *args: (then.append(sum(e.op == "send" for e in ledger.entries)), scores(*args))[1]
        try:
            ring.attend(*own, group=group)
        finally:
            ring._scores = scores
    return then


def test_the_next_keys_leave_before_those_at_hand_are_computed_with(pool):
    assert pool(3).run(late) == [[2, 4, 4]] * 3


def wrong(group):
    q = torch.zeros(1, 2, 3, 4)
    said = []
    for other in (q, torch.zeros(1, 2, 4, 4)):
        with pytest.raises(ValueError) as caught:
            ring.attend(q, other, other, group=group)
        said.append(str(caught.value))
    return said


def test_tokens_that_are_not_two_chunks_and_a_cache_are_refused(pool):
    for odd, cache in pool(2).run(wrong):
        assert odd.startswith("3 tokens a rank are not two chunks") and "here are 3, 4 and 4" in cache


def ends(group, n):
    x = torch.arange(2 * n).view(1, 2, n)
    own = share(x, group, -1)
    return own.tolist(), torch.equal(join(own.double(), group, n, 2), x.double())


@pytest.mark.parametrize("p", [1, 2, 3])
def test_join_is_the_inverse_of_share(pool, p):
    for n in (0, 1, 2 * p, 2 * p + 1):
        outcomes = pool(p).run(ends, n)
        assert all(same for _, same in outcomes)
        tokens = sorted(t for (rows,), _ in outcomes for t in rows[0])
        assert tokens == [-1] * (-n % (2 * p)) + list(range(n))
