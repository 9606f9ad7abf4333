"""Continuous batching: before each step, which requests take part in it, and with how many tokens (Orca, OSDI '22).

A request's prompt is computed in one step or in chunks, then one token a step. What is computed together is a batch: it
reads the weights once. The scheduler knows blocks and tokens, and nothing of tensors, ranks or time: an engine and the
simulator run the same one.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence

from ..specs.check import whole
from .batch import Batch, Item
from .kv_cache import ROOT, BlockPool
from .request import Answer, Limits, Request


class Running:
    """A request that has blocks. `computed` of its tokens, prompt and made ones, are in the cache; the first `kept`
    blocks are known to the pool, the last of them as the content `parent`."""

    __slots__ = ("answer", "blocks", "computed", "decoding", "kept", "number", "order", "parent", "tokens")

    def __init__(self, order: int, answer: Answer):
        self.order, self.answer, self.number = order, answer, answer.request.number
        self.tokens = [*answer.request.prompt, *answer.tokens]
        self.blocks: list[int] = []
        self.computed, self.kept, self.parent, self.decoding = 0, 0, ROOT, False

    def __lt__(self, other: Running) -> bool:
        return self.order < other.order


Policy = Callable[["Scheduler"], list[Item]]


def prefill_first(max_tokens: int = 8192) -> Policy:
    """Prompts before anything else, up to `max_tokens` a step, a longer one in chunks; only when none waits, a token
    for each request that has its prompt behind it (vLLM's first policy, and nano-vllm's)."""
    whole("max_tokens", max_tokens)
    return lambda scheduler: scheduler.prompts(max_tokens) or scheduler.decodes()


def mixed(token_budget: int, max_tokens: int = 8192) -> Policy:
    """A token for each request that decodes, and what is left of `token_budget` for chunks of the oldest prompt
    (Sarathi-Serve, arXiv:2403.02310, §4). With nothing decoding nobody waits for a chunk's end, and prompts get
    `max_tokens`."""
    whole("token_budget", token_budget)
    whole("max_tokens", max_tokens)

    def plan(scheduler: Scheduler) -> list[Item]:
        items = scheduler.decodes()
        return items + scheduler.prompts(token_budget - len(items) if items else max_tokens)

    return plan


class Scheduler:
    """Requests that wait, requests that run, and the blocks of `pool` between them.

    First come, first served: a request begins when the whole of what it has to compute fits, at most `most` at once,
    and with the share `watermark` of all blocks left over, unless none runs. Where a running request needs a block and
    none is free, the youngest gives up its cache, and computes it again later: prompt and what it has made. `limits`
    are the model's, if it has some.
    """

    def __init__(self, pool: BlockPool, policy: Policy | None = None, *, most: int = 256, watermark: float = 0.0,
                 limits: Limits | None = None):
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark = {watermark!r} is a share of the pool's blocks: from 0 to below 1")
        self.pool, self.policy, self.most = pool, policy or prefill_first(), whole("most", most)
        self.spare, self.limits = int(watermark * pool.blocks), limits
        self.waiting: deque[Running] = deque()  # by age
        self.running: list[Running] = []  # by age
        self.preempted = 0
        self._added = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def short(self) -> bool:
        """Whether a request that was begun waits for blocks: it comes before new ones."""
        return bool(self.waiting) and bool(self.waiting[0].answer.tokens)

    def refusal(self, request: Request) -> str:
        """Why a request could never run to its end here; "" where it could."""
        if self.limits is not None and (why := self.limits.refusal(request)):
            return why
        tokens = len(request.prompt) + request.new_tokens - 1  # the last one made is not read again
        if self.pool.needed(tokens) <= self.pool.blocks:
            return ""
        return (f"{len(request.prompt)} tokens and {request.new_tokens} new ones need {self.pool.needed(tokens)} "
                f"blocks, and there are {self.pool.blocks}: {self.pool.blocks * self.pool.block_size + 1} tokens in "
                "all would fit")

    def add(self, request: Request, answer: Answer | None = None) -> Answer:
        """Let a request wait for its turn, or the rest of one whose `answer` was begun elsewhere. One that could never
        run to its end is refused: its answer says why."""
        answer = answer or Answer(request)
        answer.refused = self.refusal(request)
        if not answer.refused:
            self.waiting.append(Running(self._order(), answer))
        return answer

    def reserve(self, tokens: Sequence[int]) -> tuple[list[int], int, int] | None:
        """Blocks for all of these tokens, of which the pool knows the first few: (blocks, number of the last known
        content, how many blocks are known). None where a new request has no room yet."""
        shared, parent = self.pool.share(tokens)
        needed = self.pool.needed(len(tokens)) - len(shared)
        if needed + (self.spare if self.running else 0) > self.pool.free:
            self.pool.release(shared)
            return None
        return shared + self.pool.take(needed), parent, len(shared)

    def adopt(self, answer: Answer, blocks: list[int], parent: int, kept: int) -> None:
        """Go on with a request whose prompt was computed elsewhere: `blocks`, reserved for it here, hold all its tokens
        but the last; the first `kept` are known as content `parent`. It runs at once, even beyond `most`."""
        running = Running(self._order(), answer)
        running.blocks, running.parent, running.kept = list(blocks), parent, kept
        running.computed, running.decoding = len(running.tokens) - 1, True
        insort(self.running, running)
        self._keep(running)

    def step(self) -> Batch | None:
        """What the next step computes, or None where nothing can be done before a request comes."""
        items = self.policy(self)
        return Batch(items) if items else None

    def made(self, batch: Batch, tokens: dict[int, int], now: float = 0.0) -> list[Answer]:
        """Take in that the batch was computed by the time `now`, and the token that followed each item which samples;
        the answers that are complete. Of requests that were aborted meanwhile nothing is kept."""
        complete, size = list[Answer](), self.pool.block_size
        running = {each.number: each for each in self.running}
        for number, _, computed, _, samples in batch.items:
            each = running.get(number)
            if each is None:
                continue
            each.computed += len(computed)
            if each.computed >= (each.kept + 1) * size:
                self._keep(each)
            if not samples:
                continue
            answer, token = each.answer, tokens[number]
            answer.tokens.append(token)
            answer.times.append(now)
            each.tokens.append(token)
            each.decoding = True
            request = answer.request
            if len(answer.tokens) == request.new_tokens or token == request.stop:
                complete.append(answer)
                self._end(each)
        return complete

    def abort(self, number: int) -> bool:
        """Forget a request, whatever it is at, and free its blocks; False where it is not here any more."""
        for each in (*self.running, *self.waiting):
            if each.number == number:
                if each in self.waiting:
                    self.waiting.remove(each)
                else:
                    self._end(each)
                return True
        return False

    def decodes(self) -> list[Item]:
        """One token for each request that is past its prompt; the youngest give way where blocks are short."""
        items, size = list[Item](), self.pool.block_size
        for each in list(self.running):
            if not each.decoding:
                continue
            while each.computed == len(each.blocks) * size:
                if self.pool.free:
                    each.blocks += self.pool.take(1)
                else:
                    youngest = self.running[-1]
                    self._preempt(youngest)
                    if youngest is each:
                        return items  # all that come after it are younger
            new = each.tokens[each.computed :]
            items.append(Item(each.number, each.computed, new, each.blocks, True))
        return items

    def prompts(self, room: int) -> list[Item]:
        """Up to `room` tokens of prompts: those begun first, then those that wait and fit."""
        items = list[Item]()
        for each in self.running:
            if not each.decoding and room > 0:
                items.append(self._chunk(each, room))
                room -= len(items[-1].tokens)
        while room > 0 and self.waiting and len(self.running) < self.most and self._begin(self.waiting[0]):
            each = self.waiting.popleft()
            insort(self.running, each)
            items.append(self._chunk(each, room))
            room -= len(items[-1].tokens)
        return items

    def _chunk(self, each: Running, room: int) -> Item:
        tokens = each.tokens[each.computed : each.computed + room]
        last = each.computed + len(tokens) == len(each.tokens)
        return Item(each.number, each.computed, tokens, each.blocks, last)

    def _begin(self, each: Running) -> bool:
        """Give the request blocks for all its tokens, shared ones first; whether there were enough."""
        if (room := self.reserve(each.tokens)) is None:
            return False
        each.blocks, each.parent, each.kept = room
        each.computed = each.kept * self.pool.block_size
        each.answer.cached += each.computed if not each.answer.preempted else 0
        return True

    def _keep(self, each: Running) -> None:
        """Tell the pool what the blocks hold that were filled since."""
        size, kept, filled = self.pool.block_size, each.kept, each.computed // self.pool.block_size
        each.parent = self.pool.keep(each.blocks[kept:filled], each.parent, each.tokens[kept * size : filled * size])
        each.kept = filled

    def _preempt(self, each: Running) -> None:
        self._end(each)
        again = Running(each.order, each.answer)
        again.answer.preempted += 1
        self.preempted += 1
        insort(self.waiting, again)

    def _end(self, each: Running) -> None:
        self.running.remove(each)
        each.decoding = False
        self.pool.release(each.blocks)

    def _order(self) -> int:
        self._added += 1
        return self._added
