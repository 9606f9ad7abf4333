"""The pool of blocks: none is lost or had twice, and what is found is what was asked for, whatever happens between.

Any order of what users do is tried (hypothesis), beside a plain account of who has what, and of which tokens were
written into each block, behind which others. That is done with three hash functions: the pool's own, one with few
values, and one with a single value, for which all blocks look alike.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardlab.serve import BlockPool, kv_cache
from shardlab.serve.kv_cache import ROOT

BLOCKS, SIZE = 7, 2
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # few tokens, so that beginnings are the same


class User:
    """Has blocks for some tokens, of which the first `kept` blocks are known as content `parent`."""

    def __init__(self, tokens, blocks, kept, parent):
        self.tokens, self.blocks, self.kept, self.parent = tokens, blocks, kept, parent


class Pool(RuleBasedStateMachine):
    key = staticmethod(kv_cache.block_hash)

    def __init__(self):
        super().__init__()
        self.pool, self.users = BlockPool(BLOCKS, SIZE), []
        self.held = []  # by somebody who sends them
        self.written = [None] * BLOCKS  # all tokens up to the end of the block, where it is full
        self.texts = set()  # all that were ever written
        self.was, kv_cache.block_hash = kv_cache.block_hash, self.key

    def teardown(self):
        kv_cache.block_hash = self.was

    def counted(self):
        has = [block for user in self.users for block in user.blocks] + self.held
        return [has.count(block) for block in range(BLOCKS)]

    @rule(tokens=TEXT)
    def begin(self, tokens):
        """Share what is known, take the rest if there is enough, and write and keep some of it later."""
        pool, before, used = self.pool, self.pool.free, self.counted()
        found, parent = pool.share(tokens)
        assert len(found) * SIZE < len(tokens), "the last token is always computed"
        for i, block in enumerate(found):
            assert self.written[block] == tokens[: (i + 1) * SIZE]
        assert pool.free == before - sum(used[block] == 0 for block in found), "pinned at once"
        needed = pool.needed(len(tokens)) - len(found)
        if needed > pool.free:
            with pytest.raises(RuntimeError, match="are free"):
                pool.take(needed)
            pool.release(found)
            return
        new = pool.take(needed)
        for block in new:
            assert not used[block] and block not in found, "nobody else has it"
            self.written[block] = None
        assert len(set(new)) == needed
        self.users.append(User(tokens, found + new, len(found), parent))

    @precondition(lambda self: self.users)
    @rule(data=st.data(), count=st.integers(1, 4))
    def write(self, data, count):
        """Fill some more blocks of a user, and say so."""
        user = data.draw(st.sampled_from(self.users))
        kept, filled = user.kept, max(user.kept, min(user.kept + count, len(user.tokens) // SIZE))
        for i in range(kept, filled):
            self.written[user.blocks[i]] = user.tokens[: (i + 1) * SIZE]
            self.texts.add((*user.tokens[: (i + 1) * SIZE], 0))
        user.parent = self.pool.keep(user.blocks[kept:filled], user.parent, user.tokens[kept * SIZE : filled * SIZE])
        user.kept = filled

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def end(self, data):
        user = data.draw(st.sampled_from(self.users))
        self.users.remove(user)
        self.pool.release(user.blocks)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def hold(self, data):
        """Blocks that are read while their request ends."""
        blocks = data.draw(st.sampled_from(self.users)).blocks
        self.pool.hold(blocks)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data):
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block])

    @rule(data=st.data())
    def too_much(self, data):
        """What nobody has can't be released, kept or held; what is not full can't be kept."""
        used = self.counted()
        block = data.draw(st.integers(0, BLOCKS - 1))
        if not used[block]:
            with pytest.raises(RuntimeError, match="does not have it"):
                self.pool.release([block])
        if not used[block] or data.draw(st.booleans()):
            with pytest.raises(ValueError, match="only full blocks in use"):
                self.pool.keep([block], ROOT, (1,) * (SIZE - 1 if used[block] else SIZE))

    @invariant()
    def each_block_has_its_users(self):
        used = self.counted()
        assert self.pool.users == used
        assert self.pool.free == used.count(0)

    @invariant()
    def what_is_known_was_written_there(self):
        """What is found for any text that was ever here is that text's, though its blocks may be others' now (FAULTS
        S2): looked up, and given back."""
        for tokens in self.texts:
            found, _ = self.pool.share(tokens)
            for i, block in enumerate(found):
                assert self.written[block] == list(tokens[: (i + 1) * SIZE])
            self.pool.release(found)


class FewHashes(Pool):
    key = staticmethod(lambda parent, tokens: (parent + sum(tokens)) % 3)


class OneHash(Pool):
    """FAULTS S1."""

    key = staticmethod(lambda parent, tokens: 0)


for machine in (Pool, FewHashes, OneHash):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestPool, TestFewHashes, TestOneHash = Pool.TestCase, FewHashes.TestCase, OneHash.TestCase


def filled(pool, tokens):
    """One user's blocks of all these tokens, known, and given back."""
    found, parent = pool.share(tokens)
    blocks, size = found + pool.take(pool.needed(len(tokens)) - len(found)), pool.block_size
    full = len(tokens) // size
    pool.keep(blocks[len(found) : full], parent, tokens[len(found) * size : full * size])
    pool.release(blocks)
    return blocks


def test_the_longest_beginning_is_found():
    pool = BlockPool(20, 4)
    text = list(range(14))
    blocks = filled(pool, text)  # 3 whole blocks and 2 tokens
    for other, known in ((text, 3), (text[:13], 3), (text[:12], 2), (text[:9], 2), (text[:8], 1), (text[:4], 0),
                         ([*text[:12], 99], 3), ([*text[:11], 99, 99], 2), ([99, *text[1:]], 0)):
        found, _ = pool.share(other)
        assert found == blocks[:known], other
        pool.release(found)


def test_the_same_tokens_behind_others_are_other_blocks():
    """What a token's key is depends on all before it. FAULTS S1."""
    pool = BlockPool(20, 4)
    filled(pool, [1, 1, 1, 1, 5, 6, 7, 8, 0])
    assert pool.share([2, 2, 2, 2, 5, 6, 7, 8, 0])[0] == []
    assert pool.share([5, 6, 7, 8, 0])[0] == []


def test_a_block_that_is_used_again_is_forgotten():
    """FAULTS S2: filled, given back, taken by another and not yet filled: not found. What was not taken still is."""
    pool = BlockPool(4, 4)
    blocks = filled(pool, list(range(12)))
    taken = pool.take(2)
    assert taken == [3, blocks[2]], "first what is empty, then the end of a text"
    found, _ = pool.share([*range(12), 99])
    assert found == blocks[:2]
    pool.release(found)
    pool.release(taken)
    assert pool.take(2) == taken[::-1], "without a content again, they are empty: before those that have one"


def test_what_is_unused_for_longest_goes_first():
    pool = BlockPool(4, 2)
    first, second = filled(pool, [1, 2, 3]), filled(pool, [4, 5, 6, 7])
    found, _ = pool.share([1, 2, 0])  # used again
    pool.release(found)
    pool.take(2)  # the empty one, and of what is known the older end
    assert pool.share([4, 5, 6, 7, 0])[0] == second[:1] and pool.share([1, 2, 0])[0] == first[:1]


def test_what_two_have_computed_is_known_once():
    """The second's block is its own, without a name; what follows it is found behind the first's."""
    pool = BlockPool(6, 2)
    one, other = pool.take(1), pool.take(2)
    number = pool.keep(one, ROOT, (1, 2))
    assert pool.keep(other[:1], ROOT, (1, 2)) == number
    pool.keep(other[1:], number, (3, 4))
    assert pool.share([1, 2, 3, 4, 5])[0] == [one[0], other[1]]


def test_of_two_with_one_hash_the_newer_is_found_though_the_older_goes(monkeypatch):
    monkeypatch.setattr(kv_cache, "block_hash", lambda parent, tokens: 0)
    pool = BlockPool(2, 2)
    older, newer = pool.take(1), pool.take(1)
    pool.keep(older, ROOT, (1, 2))
    pool.keep(newer, ROOT, (3, 4))
    pool.release(older)
    assert pool.share([1, 2, 0])[0] == [] and pool.take(1) == older
    assert pool.share([3, 4, 0])[0] == newer


def test_an_empty_block_can_not_be_held():
    pool = BlockPool(2, 2)
    with pytest.raises(ValueError, match="take it"):
        pool.hold([0])
    with pytest.raises(RuntimeError, match="3 blocks asked for, and 2 of 2 are free"):
        pool.take(3)
