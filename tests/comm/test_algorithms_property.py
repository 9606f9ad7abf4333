"""Every algorithm against the backend's own op: same values, exactly the messages and bytes that `cost` says.

A case draws verb, algorithm, dtype, length, layout in memory, root, splits, nodes, and which ranks take part. Values
are distinct by rank and position (FAULTS C2). `make test-more` draws more cases, and larger ones.
"""

import hashlib
import math
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlab import comm
from shardlab.comm.algorithms import TABLE
from shardlab.cost import messages, wire
from shardlab.specs import LinkSpec, Topology

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory that ranks share wants Linux")
POOLS = [pytest.param(p, transport, id=f"{p}-{transport}", marks=[linux] if transport == "shm" else [])
         for transport in ("gloo", "shm") for p in range(1, 9)]
COMBINES = ("all_reduce", "reduce_scatter", "reduce")
DIVIDES = ("reduce_scatter", "all_to_all", "scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
DTYPES = ["int64", "int32", "uint8", "bool", "float32", "float64", "bfloat16"]
AT_ONCE = LinkSpec(name="at once", per_direction=1e15)  # a topology that places the ranks and slows nobody


@dataclass(frozen=True)
class Case:
    """One collective. `rows`: what one rank hands in, of `width` elements each (to a scatter: the root)."""

    verb: str
    algorithm: str
    members: tuple[int, ...]  # of all ranks of the pool
    rows: int
    dtype: str
    op: str = "sum"
    width: int = 1
    root: int = 0  # number among the members
    splits: tuple[tuple[int, ...], ...] | None = None  # rows, of an uneven all_to_all
    per_node: int | None = None  # ranks of the pool on a node; None: no topology
    strided: bool = False
    later: bool = False  # async_op
    debug: bool = False

    def handed(self, number):
        """Rows that the member of that number hands in."""
        return sum(self.splits[number]) if self.splits else self.rows

    def on_nodes(self):
        """How many members each node has."""
        return list(Counter(rank // (self.per_node or math.inf) for rank in self.members).values())


def values(case, number, rows):
    """What the member of that number hands in: (rows, width), no pattern in it, sums of floats are rounded."""
    raw = torch.arange(rows * case.width).view(rows, case.width) * 2_654_435_761 + (number + 1) * 40_503_977
    raw = raw % 1_000_003
    if case.dtype == "bool":
        return raw % 3 == 0
    dtype = getattr(torch, case.dtype)
    if not dtype.is_floating_point:
        return raw.to(dtype)
    return (raw / 1_000_003 + 0.5 if case.op == "product" else 4 * raw / 1_000_003 - 2).to(dtype)


def laid_out(x, strided):
    """(`x` as a tensor that may be every other column of another, and that other column, which must stay as it is)."""
    if not strided:
        return x.clone(), torch.full_like(x[:0], 5)
    both = torch.stack([x, torch.full_like(x, 5)], dim=-1)
    return both[..., 0], both[..., 1]


def call(case, group, x, whole):
    verb, root, number = getattr(comm, case.verb), case.members[case.root], group.rank()
    how = {"group": group} if case.verb == "barrier" else {"group": group, "async_op": case.later}
    if case.verb == "barrier":
        return verb(**how)
    if case.verb in COMBINES:
        how["op"] = case.op
    if case.verb in ROOTED:
        how["dst" if case.verb in ("reduce", "gather") else "src"] = root
    if case.verb == "scatter":
        how["whole"] = whole if number == case.root else None
    if case.splits:
        how |= {"input_split_sizes": case.splits[number], "output_split_sizes": [row[number] for row in case.splits]}
    result = verb(x, **how)
    return result.wait() if case.later else result


def run(case, group, p):
    """(what is wrong with the values, a digest of the result, the ledger's entry) of this rank."""
    number, q = group.rank(), group.size()
    mine = values(case, number, case.handed(number))
    given, beside = laid_out(values(case, number, case.rows // q) if case.verb == "scatter" else mine, case.strided)
    whole, _ = laid_out(mine, case.strided)
    before = given.clone()
    with comm.use("backend", transport="backend"):
        expected = call(case, group, given.clone(), whole)
    algorithm = "backend" if case.algorithm == "shared" else case.algorithm
    topology = case.per_node and Topology(nodes=p // case.per_node, per_node=case.per_node, between=AT_ONCE)
    with comm.use(algorithm, topology=topology, debug=case.debug), comm.record() as ledger:
        got = call(case, group, given, whole)
    entry, = ledger.entries
    if case.verb == "barrier":
        return "", "", entry
    in_place = case.verb in ("all_reduce", "broadcast", "scatter") or (case.verb == "reduce" and number == case.root)
    wrong = [differs(case, got, expected, number, q),
             "not in place" if in_place and got is not given else "",
             "its argument has changed" if not in_place and not torch.equal(given, before) else "",
             "the whole has changed" if not torch.equal(whole, mine) else "",
             "what lies beside has changed" if not torch.equal(beside, torch.full_like(beside, 5)) else ""]
    bits = got.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return "; ".join(filter(None, wrong)), hashlib.sha256(bits.numpy()).hexdigest(), entry


def differs(case, got, expected, number, q):
    """What is wrong with the values of `got`: floats that are added or multiplied may differ by their rounding."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{tuple(got.shape)} {got.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    if case.verb in COMBINES and case.op in ("sum", "product") and got.dtype.is_floating_point:
        inputs = torch.stack([values(case, other, case.rows).double().abs() for other in range(q)])
        size = inputs.sum(0) if case.op == "sum" else inputs.prod(0)
        if case.verb == "reduce_scatter":
            size = size.tensor_split(q)[number]
        allowed = q * torch.finfo(got.dtype).eps * size  # (q - 1) roundings, of half an eps each, on either side
        right = bool(((got.double() - expected.double()).abs() <= allowed * (q > 1)).all())
    else:
        right = torch.equal(got, expected)
    return "" if right else f"{got.flatten()[:8].tolist()} instead of {expected.flatten()[:8].tolist()}"


def run_all(group, transport, cases):
    """The `cases`, all of the same members, on a rank of a pool."""
    members, p, out = cases[0].members, group.size(), []
    some = group if len(members) == p else dist.new_group(members)
    with comm.use(transport="shm" if transport == "shm" else None):
        if group.rank() in members:
            out = [run(case, some, p) for case in cases]
        comm.barrier(group)
    if some is not group and out:
        dist.destroy_process_group(some)
    return out


def check(ranks, p, transport, cases):
    results = ranks.run(run_all, transport, cases)
    members = cases[0].members
    assert all(bool(results[rank]) == (rank in members) for rank in range(p))
    for case, of_case in zip(cases, zip(*(results[rank] for rank in members), strict=True), strict=True):
        assert [wrong for wrong, _, _ in of_case] == [""] * len(members), case
        if case.verb in ("all_reduce", "all_gather", "broadcast"):
            assert len({digest for _, digest, _ in of_case}) == 1, f"not the same bits on all ranks: {case}"
        for number, (_, _, entry) in enumerate(of_case):
            counted(case, number, entry, transport)


def counted(case, number, entry, transport):
    """The ledger's entry is what `cost` says, message by message."""
    q, nodes, itemsize = len(case.members), case.on_nodes(), getattr(torch, case.dtype).itemsize
    shape = dict(per_node=nodes[0] if case.algorithm == "two_level" else None, root=case.root,
                 splits=case.splits and [[rows * case.width for rows in row] for row in case.splits])
    said = [m for sent in messages(case.verb, case.algorithm, case.rows * case.width, itemsize, q, **shape)
            for m in sent if m.src == number]
    sent = [(case.members[m.src], case.members[m.dst], m.nbytes) for m in said]
    assert [(m.src, m.dst, m.nbytes) for m in entry.messages] == sent, case
    if case.verb in ("all_reduce", "reduce", "broadcast", "all_to_all"):  # whose tensor here is the one there
        assert [m.offset for m in entry.messages] == [m.offset for m in said], case
    assert entry.wire == wire(case.verb, case.algorithm, case.rows * case.width, itemsize, q, number, **shape), case
    assert case.algorithm == "shared" or entry.wire == sum(nbytes for _, _, nbytes in sent), case
    way = "gloo" if transport == "gloo" or len(nodes) == q > 1 else "shm" if len(nodes) == 1 else "gloo+shm"
    assert (entry.op, entry.algorithm, entry.transport) == (case.verb, case.algorithm, way), case
    assert not entry.derived and not entry.staged and entry.ranks == case.members and entry.rank == case.members[number]
    assert all(entry.start <= m.start <= m.end <= entry.end for m in entry.messages)


def ways(transport):
    """(verb, algorithm) of all that there are."""
    shared = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"] if transport == "shm" else []
    return [(verb, name) for verb in TABLE for name in TABLE[verb]] + [(verb, "shared") for verb in shared]


@pytest.mark.parametrize(("p", "transport"), POOLS)
def test_every_algorithm_at_every_world_size(pool, p, transport):
    """Lengths around the world size, and one that shared memory takes in shares: what drawn cases need not hit."""
    cases = []
    for i, (verb, algorithm) in enumerate(ways(transport)):
        per_node = p // 2 if algorithm == "two_level" and p % 2 == 0 else None
        for j, rows in enumerate((0, 1, p - 1, p, 4 * p + 3, 9_973)):
            dtype = DTYPES[(i + j) % len(DTYPES)] if rows < 9_973 else "float64"
            rows = -(-rows // p) * p if verb in DIVIDES else rows
            cases.append(Case(verb, algorithm, tuple(range(p)), rows, dtype, root=(i + j) % p, strided=j % 2 == 0,
                              per_node=per_node))
    check(pool(p), p, transport, cases)


@st.composite
def drawn(draw, p, transport, most):
    """Cases of the same members."""
    everybody = tuple(range(p))
    members = draw(st.sampled_from([everybody] * 3 + ["some"]))
    if members == "some":
        members = tuple(sorted(draw(st.sets(st.sampled_from(everybody), min_size=1))))
    return draw(st.lists(one(p, transport, members, most), min_size=1, max_size=8))


@st.composite
def one(draw, p, transport, members, most):
    q = len(members)
    verb, algorithm = draw(st.sampled_from(ways(transport)))
    width = draw(st.sampled_from([1, 1, 3]))
    rows = draw(st.one_of(st.integers(0, 2 * q + 1), st.integers(0, most // width)))
    splits = None
    if verb == "all_to_all" and draw(st.booleans()):
        splits = draw(st.lists(st.tuples(*[st.integers(0, 4)] * q), min_size=q, max_size=q).map(tuple))
    if verb in DIVIDES:
        rows = -(-rows // q) * q
    case = Case(verb, algorithm, members, 0 if splits else rows, draw(st.sampled_from(DTYPES)),
                op=draw(st.sampled_from(["sum", "sum", "max", "min", "product"])) if verb in COMBINES else "sum",
                width=width, root=draw(st.integers(0, q - 1)) if verb in ROOTED else 0, splits=splits,
                per_node=draw(st.sampled_from([None, *(k for k in range(1, p + 1) if p % k == 0)])),
                strided=draw(st.booleans()), later=draw(st.booleans()), debug=draw(st.booleans()))
    nodes = len(set(case.on_nodes())), len(case.on_nodes())
    if (algorithm == "two_level" and nodes[0] > 1) or (algorithm == "shared" and nodes[1] > 1):
        case = Case(**vars(case) | {"per_node": None})
    return case


PLAIN = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.parametrize(("p", "transport"), POOLS)
@settings(max_examples=12, derandomize=True, **PLAIN)
@given(data=st.data())
def test_drawn_cases(pool, p, transport, data):
    check(pool(p), p, transport, data.draw(drawn(p, transport, 10_000)))


@pytest.mark.more
@pytest.mark.parametrize(("p", "transport"), POOLS)
@settings(max_examples=15, **PLAIN)
@given(data=st.data())
def test_more_drawn_cases(pool, p, transport, data):
    check(pool(p), p, transport, data.draw(drawn(p, transport, 200_000)))
