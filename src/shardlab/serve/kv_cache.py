"""Which block of the KV cache is whose: a pool of blocks of equal size, as an operating system has pages of memory
(PagedAttention, arXiv:2309.06180, §4).

A request has a table of blocks, which need not be neighbours, so that none has to be kept free for what it may still
write. A filled block whose tokens, and all tokens before them, are those that another request begins with holds the
same keys and values: it is shared, not computed again. Blocks that nobody uses stay as they are until their room is
needed, and the one unused for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from ..specs.check import whole

ROOT = 0  # the content before the first block


def block_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """Where to look for a block of these tokens behind the content `parent`: the same tokens behind others differ."""
    return hash((parent, tokens))


class BlockPool:
    """`blocks` blocks for `block_size` tokens each, and who uses them; the tensors are elsewhere (`pages`).

    What a filled block holds is its content: its tokens, behind those of the content `parent`. A content has a number,
    given once and never again.
    """

    def __init__(self, blocks: int, block_size: int = 16):
        self.blocks, self.block_size = whole("blocks", blocks), whole("block_size", block_size)
        self.users = [0] * blocks
        self._empty = deque(range(blocks))
        self._unused: OrderedDict[int, None] = OrderedDict()  # with a content, unused for longest first
        self._number = [ROOT] * blocks  # of each block's content, ROOT where it has none
        self._parent, self._key, self._tokens = [ROOT] * blocks, [0] * blocks, [tuple[int, ...]()] * blocks
        self._known: dict[int, int] = {}  # block, by the hash of its content
        self._next = ROOT + 1

    @property
    def free(self) -> int:
        """Blocks that `take` can give: empty ones, and those with a content that nobody uses."""
        return len(self._empty) + len(self._unused)

    def needed(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """So many blocks for one new user, with whatever is in them. RuntimeError where fewer are free."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks asked for, and {self.free} of {self.blocks} are free: wait for a "
                               "request to end, or preempt one")
        empty, unused = self._empty, self._unused
        taken = [empty.popleft() for _ in range(min(count, len(empty)))]
        while len(taken) < count:
            block, _ = unused.popitem(last=False)
            self._forget(block)
            taken.append(block)
        for block in taken:
            self.users[block] = 1
        return taken

    def share(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The blocks that hold the longest known beginning of `tokens`, each with one user more, and the number of
        their last content.

        They are pinned at once: until they are released, `take` gives none of them away. The last token is never among
        those found, since somebody has to compute what follows it; nor is a block that is not filled.
        """
        blocks = list(self._beginning(tokens))
        self.hold(blocks)
        return blocks, self._number[blocks[-1]] if blocks else ROOT

    def known(self, tokens: Sequence[int]) -> int:
        """How many of the first of `tokens` `share` would find."""
        return self.block_size * sum(1 for _ in self._beginning(tokens))

    def _beginning(self, tokens: Sequence[int]) -> Iterator[int]:
        size, parent = self.block_size, ROOT
        for start in range(0, len(tokens) - size, size):
            filled = tuple(tokens[start : start + size])
            block = self._find(block_hash(parent, filled), parent, filled)
            if block is None:
                return
            parent = self._number[block]
            yield block

    def keep(self, blocks: Sequence[int], parent: int, tokens: Sequence[int]) -> int:
        """Say that these blocks, one after the other, are filled with `tokens`, behind the content `parent`; the number
        of the last one's content.

        Where another block holds the same already, that one stays the known one. Raises ValueError on blocks that are
        not full, and on one that nobody uses.
        """
        size, numbers, known = self.block_size, self._number, self._known
        if len(tokens) != size * len(blocks) or not all([self.users[block] for block in blocks]):
            raise ValueError(f"{len(tokens)} tokens in blocks {list(blocks)!r:.80} of {size}, which have "
                             f"{[self.users[block] for block in blocks]!r:.80} users: only full blocks in use are kept")
        for i, block in enumerate(blocks):
            filled = tuple(tokens[i * size : (i + 1) * size])
            key = block_hash(parent, filled)
            if (same := self._find(key, parent, filled)) is not None:
                parent = numbers[same]
                continue
            if numbers[block]:
                self._forget(block)
            self._parent[block], self._key[block], self._tokens[block] = parent, key, filled
            known[key] = block  # of two with one hash, the newer is found
            parent = numbers[block] = self._next
            self._next += 1
        return parent

    def hold(self, blocks: Sequence[int]) -> None:
        """One user more of each: somebody who reads or writes it, whatever becomes of the request."""
        for block in blocks:
            if not self.users[block]:
                if block in self._unused:
                    del self._unused[block]
                else:
                    raise ValueError(f"block {block} is empty and nobody's: take it")
            self.users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One user less of each. Of blocks that nobody uses then, the last are reused first: their beginnings serve
        more requests. RuntimeError where one has no user."""
        users, numbers = self.users, self._number
        for block in reversed(blocks):
            if not users[block]:
                raise RuntimeError(f"block {block} is released by somebody who does not have it")
            users[block] -= 1
            if users[block]:
                continue
            if numbers[block]:
                self._unused[block] = None
            else:
                self._empty.append(block)

    def _find(self, key: int, parent: int, tokens: tuple[int, ...]) -> int | None:
        """The block of these tokens behind `parent`, if one is known: what a hash finds is compared, for two contents
        can have the same."""
        block = self._known.get(key)
        if block is not None and self._parent[block] == parent and self._tokens[block] == tokens:
            return block
        return None

    def _forget(self, block: int) -> None:
        self._number[block] = ROOT
        if self._known.get(self._key[block]) == block:
            del self._known[self._key[block]]
