"""A cache goes from one side to another, whatever the cuts of both: each number where it belongs, once, and compared.

Both sides are in this process, joined by real channels. Caches hold what tells where it belongs: layer, head, token.
"""

import socket
import threading
import time
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from served import SIZES, build

from shardlab.comm.channel import Channel, Pace
from shardlab.serve.inbox import Inbox
from shardlab.serve.outbox import Outbox, Reached
from shardlab.serve.pages import KVLayout, PagedCache, heads_of
from shardlab.serve.transport import Held, Order, checksum, overlap, sends, slots
from shardlab.specs import LinkSpec

LAYERS, TOKENS, WIDTH = 3, 23, 8
TAKEN, GIVEN = [7, 2, 9, 0, 5, 3], [4, 8, 1, 6, 11, 2, 9, 0]


def layout(rank=0, p=1, total=2, layers=range(LAYERS), **other):
    return KVLayout(layers, heads_of(rank, p, total), total, WIDTH, WIDTH, **{"block_size": 4, "dtype": "fp32"} | other)


def value(layers, heads, tokens):
    """(layers, heads, tokens): what is at each place of keys; of values it is negative."""
    grid = torch.meshgrid(torch.tensor(list(layers)), torch.tensor(list(heads)), torch.arange(tokens), indexing="ij")
    return (grid[0] * 10000 + grid[1] * 100 + grid[2]).double()


def filled(its, blocks=12):
    """A cache in which the tokens of table TAKEN say where they belong."""
    cache = PagedCache(its, blocks)
    at, offsets = slots(TAKEN, 0, TOKENS, its.block_size)
    for row, layer in zip(value(its.layers, its.heads, TOKENS), cache.layers, strict=True):
        for store, sign in ((layer.keys, 1), (layer.values, -1)):
            store.put(at, offsets, sign * row.unsqueeze(-1).expand(-1, -1, WIDTH))
    return cache


def held(cache, start=0):
    """(keys, values) of the tokens from `start` on that stand in table GIVEN: (layers, heads, tokens) of one number
    each, and that all the others there are the same."""
    at, offsets = slots(GIVEN, start, TOKENS, cache.layout.block_size)
    out = []
    for name in ("keys", "values"):
        rows = torch.stack([getattr(layer, name).data[at, :, offsets] for layer in cache.layers]).double()
        assert (rows == rows[..., :1]).all()
        out.append(rows[..., 0].transpose(1, 2))
    return out


class Sides:
    """The ranks of a source and of a target, each with its cache, and what they tell."""

    def __init__(self, sources, targets, p=None, **how):
        self.said = SimpleQueue()
        self.targets = [PagedCache(each, 12) for each in targets]
        self.inboxes = [Inbox(cache, lambda what, serial, why="", nbytes=0, rank=i: self.said.put(
            (f"target {rank}", what, serial, why)), self.broke)
                        for i, cache in enumerate(self.targets)]
        self.outboxes, self.ends = [], []
        for rank, its in enumerate(sources):
            cache, reached = filled(its), []
            for i, target in enumerate(targets):
                common = (overlap(its.layers, target.layers),
                          overlap(sends(its, rank % (p or len(sources)), p or len(sources)), target.heads))
                if common[0] and common[1]:
                    one, other = map(Channel, socket.socketpair())
                    self.ends += [one, other]
                    self.inboxes[i].open("source", rank, other)
                    reached.append(Reached(one, target, *common))
            if reached:
                self.outboxes.append(Outbox(cache, reached, lambda serial, rank=rank: self.said.put(
                    (f"source {rank}", "drained", serial, "")), broke=self.broke, **how))

    def broke(self, error):
        self.said.put(("broke", repr(error), 0, ""))

    def order(self, serial=1, start=0, stop=TOKENS, had=0, last=True, given=GIVEN):
        return Order(serial, 5, "target", had, TOKENS, TAKEN, given, start, stop, last)

    def put(self, *orders, layers=None):
        for order in orders:
            for outbox in self.outboxes:
                outbox.put(order, layers or outbox.cache.layout.layers)

    def hear(self, count, timeout=30):
        """The next so many things that are told, in the order of who told them."""
        return sorted(self.said.get(timeout=timeout) for _ in range(count))

    def close(self):
        for end in self.ends:
            end.close()


@pytest.fixture
def sides():
    made = []

    def make(*args, **how):
        made.append(Sides(*args, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ranks(p, total=2, **other):
    return [layout(rank, p, total, **other) for rank in range(p)]


# where it goes


@pytest.mark.parametrize("total", [1, 2, 4])
@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (4, 4)])
def test_each_head_goes_where_it_belongs(sides, p, q, total):
    """FAULTS S11, SV24: cuts of both sides, more ranks than heads among them. Each rank of the target gets what it
    holds, and each number once. `total` 1 is latent attention too, which every rank holds all of."""
    both = sides(ranks(p, total), ranks(q, total))
    both.put(both.order())
    assert both.hear(q) == [(f"target {i}", "acked", 1, "") for i in range(q)]
    for cache in both.targets:
        keys, values = held(cache)
        want = value(cache.layout.layers, cache.layout.heads, TOKENS)
        assert torch.equal(keys, want) and torch.equal(values, -want)
    heads = [head for outbox in both.outboxes for each in outbox.reached for head in each.heads]
    assert len(heads) == sum(len(cache.layout.heads) for cache in both.targets)


def test_whole_numbers_of_heads_on_both_sides_are_the_models():
    """Rank 3 of 4 with 2 heads holds the model's head 1, and rank 2 sends it."""
    assert [list(heads_of(rank, 4, 2)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(sends(layout(rank, 4), rank, 4)) for rank in range(4)] == [[0], [], [1], []]
    assert [list(sends(layout(rank, 2, 4), rank, 2)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert list(overlap(range(0, 4), range(2, 9))) == [2, 3] and not overlap(range(0, 2), range(2, 4))


def test_layers_of_stages_go_to_whoever_has_them(sides):
    """Two stages send to one rank, and to two that are divided elsewhere."""
    stages = [layout(layers=range(0, 1)), layout(layers=range(1, 3))]
    for targets in ([layout()], [layout(layers=range(0, 2)), layout(layers=range(2, 3))]):
        both = sides(stages, targets, p=1)
        both.put(both.order())
        assert {what for _, what, _, _ in both.hear(len(targets))} == {"acked"}
        for cache in both.targets:
            assert torch.equal(held(cache)[0], value(cache.layout.layers, range(2), TOKENS))


@pytest.mark.parametrize(("ours", "theirs"), [(4, 3), (4, 8), (5, 16)])
def test_blocks_may_be_of_different_sizes(sides, ours, theirs):
    both = sides([layout(block_size=ours)], [layout(block_size=theirs)])
    both.put(both.order())
    assert both.hear(1) == [("target 0", "acked", 1, "")]
    assert torch.equal(held(both.targets[0])[1], -value(range(LAYERS), range(2), TOKENS))


def test_only_the_tail_goes_where_a_beginning_is_known(sides):
    """What was there stays as it was."""
    both = sides(ranks(2), ranks(1))
    both.put(both.order(start=8, had=8))
    assert both.hear(1) == [("target 0", "acked", 1, "")]
    assert torch.equal(held(both.targets[0], 8)[0], value(range(LAYERS), range(2), TOKENS)[:, :, 8:])
    at, offsets = slots(GIVEN, 0, 8, 4)
    assert not both.targets[0].layers[0].keys.data[at, :, offsets].any()


def test_chunks_and_layers_in_any_order_make_a_whole(sides):
    """Chunks of the prompt, layer by layer, of two transfers at once."""
    both = sides(ranks(1), ranks(2))
    other = [10, 3, 5, 7, 4, 0]
    for start, stop in ((0, 5), (5, 6), (6, TOKENS)):
        for layer in range(LAYERS):
            both.put(both.order(1, start, stop, last=stop == TOKENS), layers=[layer])
        both.put(both.order(2, start, stop, last=stop == TOKENS, given=other))
    said = both.hear(4)
    assert {what for _, what, _, _ in said} == {"acked"} and sorted(serial for _, _, serial, _ in said) == [1, 1, 2, 2]


# what is wrong is seen


def spoiled(layer, how):
    """Damage that layer's message as `how(header, parts)` does, which says whether it is sent."""
    return lambda header, parts: how(header, parts) if header["layer"] == layer else True


def flip(header, parts):
    parts[1].view(-1)[3] += 1
    return True


def shorten(header, parts):
    header["stop"] -= 1
    parts[:] = [part[:-1] for part in parts]
    header["checksum"] = checksum(parts)
    return True


@pytest.mark.parametrize(("how", "says"), [
    (flip, "layer 1 of tokens 0 to 23 is not what was sent: its checksum differs"),
    (lambda header, parts: False, "rank 0 of the source has sent 3 messages, and 2 have come"),
    (shorten, "layer 1, head 0, token 22 has come 0 times, and 1 more like it"),
])
def test_a_damaged_layer_is_never_acked(sides, how, says):
    """FAULTS SV26, S9: a changed byte, a message that is missing, one that is too short."""
    both = sides(ranks(1), ranks(1), spoil=spoiled(1, how))
    both.put(both.order())
    assert both.hear(1) == [("target 0", "failed", 1, says)]


def test_what_comes_twice_is_seen(sides):
    both = sides(ranks(1), ranks(1))
    both.put(both.order(last=False), layers=[1])
    both.put(both.order())
    assert both.hear(1) == [("target 0", "failed", 1, "layer 1, head 0, token 0 has come 2 times, and 45 more like it")]


def test_the_rest_of_a_rank_that_is_gone_is_missed(sides):
    """One of two ranks has sent all of it, the other is closed before: what it has not sent is not there."""
    both = sides(ranks(2), ranks(1))
    both.outboxes[1].reached[0].channel.close()
    both.outboxes[0].put(both.order(), range(LAYERS))
    ((_, what, _, why),) = both.hear(1)
    assert what == "failed" and "layer 0, head 1, token 0 has come 0 times" in why


@pytest.mark.parametrize(("other", "says"), [
    (dict(dtype="int8"), "numbers of fp32, the other int8"),
    (dict(total=4), "KV heads: 2, the other 4"),
    (dict(width=12), "numbers a key: 8, the other 12"),
])
def test_sides_that_do_not_fit_say_so(other, says):
    """FAULTS SV24: before anything is sent."""
    width, total = other.pop("width", WIDTH), other.pop("total", 2)
    ours, theirs = layout(), replace(layout(total=total, **other), key=width)
    assert not Held("model", ours).unlike(Held("model", layout(1, 2, block_size=16)))
    assert says in Held("model", ours).unlike(Held("model", theirs))
    assert "one serves this, the other that" in Held("this", ours).unlike(Held("that", ours))
    assert Held.heard(Held("model", theirs).told()) == Held("model", theirs)


# given up


def wait_for(condition, limit=30):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("first", ["source", "target"])
def test_behind_a_cancel_nothing_is_written(sides, first, tmp_path):
    """FAULTS S8: slow transfer, given up, blocks filled with something else as soon as all say they are done: it stays
    there. Whoever hears of it first."""
    pace = Pace(LinkSpec(name="slow", per_direction=2 * 23 * 2 * 8 * 4 / 0.3), tmp_path / "clocks")  # 0.3 s a layer
    both = sides(ranks(2), ranks(1), pace=pace)
    both.put(both.order())
    wait_for(lambda: both.targets[0].layers[0].keys.data.any())

    def cancel_at_source():
        for outbox in both.outboxes:
            outbox.cancel(1)

    def cancel_at_target():
        both.inboxes[0].cancel(1, "source")

    begun = time.monotonic()
    for cancel in (cancel_at_source, cancel_at_target) if first == "source" else (cancel_at_target, cancel_at_source):
        cancel()
    assert both.hear(3) == [("source 0", "drained", 1, ""), ("source 1", "drained", 1, ""),
                            ("target 0", "drained", 1, "")]
    assert time.monotonic() - begun < 0.6  # not the rest of the transfer: a message a rank
    for layer in both.targets[0].layers:
        layer.keys.data.fill_(77)
    both.put(both.order())  # a chunk that was computed meanwhile
    both.put(both.order(serial=2, given=[0, 3, 5, 7, 9, 10]))  # the next one is not held up by it
    assert both.hear(1) == [("target 0", "acked", 2, "")]
    assert all((layer.keys.data[GIVEN[:6]] == 77).all() for layer in both.targets[0].layers)
    pace._nics._file.close()


def test_a_target_is_drained_once_every_source_has_cancelled_or_ended(sides):
    both = sides(ranks(2), ranks(1))
    both.put(both.order(last=False), layers=[0])
    both.inboxes[0].cancel(1, "source")
    both.outboxes[0].cancel(1)
    assert both.hear(1) == [("source 0", "drained", 1, "")]
    time.sleep(0.05)
    assert both.said.empty()
    both.outboxes[1].reached[0].channel.close()
    assert both.hear(1) == [("target 0", "drained", 1, "")]


def test_one_that_was_acked_meanwhile_is_drained_too(sides):
    both = sides(ranks(1), ranks(1))
    both.put(both.order())
    assert both.hear(1) == [("target 0", "acked", 1, "")]
    both.outboxes[0].cancel(1)
    both.inboxes[0].cancel(1, "source")
    assert both.hear(2) == [("source 0", "drained", 1, ""), ("target 0", "drained", 1, "")]
    assert not both.inboxes[0]._incoming and not both.inboxes[0]._draining and not both.inboxes[0]._ended


def test_a_target_that_is_gone_holds_up_nobody(sides):
    """What was meant for it goes nowhere, and a cancel is answered; the other rank gets its own."""
    both = sides(ranks(1), ranks(2))
    both.ends[1].close()
    both.put(both.order())
    assert both.hear(1) == [("target 1", "acked", 1, "")]
    both.outboxes[0].cancel(2)
    assert both.hear(1) == [("source 0", "drained", 2, "")]


# bytes


def sent_bytes(both):
    """Bytes of the tensors that are sent from now on, one entry a message."""
    sizes, lock = [], threading.Lock()
    for outbox in both.outboxes:
        for each in outbox.reached:
            def send(header, tensors=(), due=(0.0, 0.0), its=each.channel.send):
                if tensors:
                    with lock:
                        sizes.append(sum(x.nbytes for x in tensors))
                its(header, tensors, due)

            each.channel.send = send
    return sizes


@pytest.mark.parametrize(("dtype", "wire", "each"), [
    ("fp32", None, 4 * WIDTH), ("bf16", None, 2 * WIDTH), ("int8", None, WIDTH + 2), ("fp32", "int8", WIDTH + 2),
    ("bf16", "int8", WIDTH + 2), ("int8", "int8", WIDTH + 2),
])
def test_what_a_token_takes(sides, dtype, wire, each):
    """Numbers, and for int8 a scale of two bytes for each token and head, 0.508 of bf16 at 128 and not 0.5: of a cache
    that holds them, and of one that does not. A message a layer; the seal carries none."""
    both = sides(ranks(1, dtype=dtype), ranks(1, dtype=dtype), wire=wire)
    sizes = sent_bytes(both)
    both.put(both.order())
    assert both.hear(1) == [("target 0", "acked", 1, "")]
    assert sizes == [TOKENS * 2 * 2 * each] * LAYERS
    if dtype == "int8" or wire is None:  # as it is there
        ours, theirs = slots(TAKEN, 0, TOKENS, 4), slots(GIVEN, 0, TOKENS, 4)
        for a, b in zip(both.outboxes[0].cache.layers, both.targets[0].layers, strict=True):
            for name in ("keys", "values"):
                sent, came = (getattr(layer, name).read(*at, slice(None)) for layer, at in ((a, ours), (b, theirs)))
                assert len(sent) == (2 if dtype == "int8" else 1) and all(map(torch.equal, sent, came))
    else:
        want = value(range(LAYERS), range(2), TOKENS)
        assert (held(both.targets[0])[0] - want).abs().max() <= want.max() * 2**-7


def test_a_layout_is_that_of_the_cut_model():
    whole = KVLayout.of(build(), 4)
    assert (whole.heads, whole.total_heads, whole.key, len(whole.layers)) == (range(2), 2, SIZES["head_dim"], 3)
    assert KVLayout.of(build("mla"), 4).total_heads == 1
