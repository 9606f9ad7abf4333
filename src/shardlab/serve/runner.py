"""What every rank of a replica does in a step: hear the plan, compute its part, hear which tokens were chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from ..comm import Handle, ops, recv, send
from ..comm.groups import members
from ..model.transformer import Transformer
from ..parallel.pipeline import Pipeline
from .batch import Batch, Item
from .pages import PagedCache

Choose = Callable[[torch.Tensor], torch.Tensor]  # logits (requests, vocab) → token ids (requests,)
END = -1  # in the place of a number of items


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Of logits (requests, vocab), each request's likeliest token (requests,)."""
    return logits.argmax(-1)


def sampled(temperature: float, seed: int) -> Choose:
    """A chooser by chance: softmax(logits ÷ temperature). Two with the same seed choose alike, given the same logits
    in the same order."""
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature!r} must be above 0; at 0 it is `likeliest`")
    chance = torch.Generator().manual_seed(seed)
    return lambda logits: torch.multinomial((logits.float().cpu() / temperature).softmax(-1), 1, generator=chance)[:, 0]


class Runner:
    """Runs batches on the ranks of `group` (None: on this one), over which `model` is cut, each with its `cache`.

    `together` are the ranks at this rank's place in other replicas, with whom it shares experts: they step together.
    Only one rank uses `choose`, and tells the others what it has chosen: each for itself could choose its own.
    """

    def __init__(self, model: Transformer, cache: PagedCache, group: dist.ProcessGroup | None = None,
                 together: dist.ProcessGroup | None = None, choose: Choose = likeliest):
        self.model, self.cache, self.group, self.together, self.choose = model, cache, group, together, choose
        self.pipeline: Pipeline | None = getattr(model, "pipeline", None)
        self.leads = group is None or group.rank() == 0
        self.device = next(model.parameters()).device
        ranks = [0] if group is None else members(group).ranks
        self.leader = ranks[0]
        chooser = torch.tensor([self.leader if self.pipeline is None else self.pipeline.rank_of(
            self.pipeline.count - 1)])
        self.chooser = int(self._from_leader(chooser))
        self.chooses = group is None or dist.get_rank() == self.chooser
        self.worked = False  # whether any of those that step together had something to compute

    @torch.no_grad()
    def run(self, batch: Batch | None) -> dict[int, int] | None:
        """Compute a batch, which the leader gives; every rank calls it. By request, the token that follows.

        The leader's None is its end: None comes back, on all its ranks, once all that step together have ended. Until
        then those with nothing to do join in the experts' messages with no tokens.
        """
        told = self._told(batch)
        self.worked = bool(told and told.items)
        if self.together is not None:
            state = torch.tensor([told is not None, self.worked], device=self.device, dtype=torch.long)
            goes_on, self.worked = map(bool, ops.all_reduce(state, "max", self.together).tolist())
            if goes_on:
                told = told or Batch([])
        if told is None:
            return None
        return self._compute(told) if self.worked else {}

    def _compute(self, batch: Batch) -> dict[int, int]:
        wanted = [item.number for item in batch.items if item.samples]
        logits = list[torch.Tensor]()
        sending = list[Handle]()
        for part in self._parts(batch.items):
            tokens, positions = self.cache.begin(Batch(part))
            x = self._stage(tokens, positions, sending)
            if x is not None and any(item.samples for item in part):
                logits.append(self._logits(x, part))
        for handle in sending:
            handle.wait()
        if not wanted:
            return {}
        chosen = (self.choose(torch.cat(logits)).to(self.device) if self.chooses
                  else torch.empty(len(wanted), dtype=torch.long, device=self.device))
        if self.group is not None:
            ops.broadcast(chosen, self.chooser, self.group)
        return dict(zip(wanted, chosen.tolist(), strict=True))

    def _stage(self, tokens: torch.Tensor, positions: torch.Tensor, sending: list[Handle]) -> torch.Tensor | None:
        """The stream of `tokens` (1, tokens) through the layers here: where they are the last, what the head takes;
        elsewhere it is on its way to the next rank."""
        model, pipeline = self.model, self.pipeline
        if pipeline is None:
            x = model.through(model.layers, model.embed_tokens(tokens), tokens.shape, positions, self.cache)  # type: ignore
            return model.norm(x)
        (stage,) = pipeline.mine.values()
        if stage.first:
            x = model.embed_tokens(tokens)
        else:
            x = pipeline.stream(model, tokens)
            if tokens.numel():
                x = recv(x, pipeline.rank_of(stage.number - 1), pipeline.group)
        x = model.through(model.layers.values(), x, tokens.shape, positions, self.cache)  # type: ignore
        if stage.last:
            return model.norm(x)
        if tokens.numel():
            sending.append(send(x, pipeline.rank_of(stage.number + 1), pipeline.group, async_op=True))
        return None

    def _logits(self, stream: torch.Tensor, part: list[Item]) -> torch.Tensor:
        """(requests that sample, vocab), of the last token of each."""
        ends, row = list[int](), 0
        for item in part:
            row += len(item.tokens)
            if item.samples:
                ends.append(row - 1)
        h = self.model.lm_head.whole(stream, torch.Size((1, row)))
        return self.model.lm_head(h[:, ends])[0]

    def _parts(self, items: list[Item]) -> Iterable[list[Item]]:
        """The items in as many parts as there are stages, so that all can work at once: with one, each would wait for
        all others. Some may be empty, and are gone through alike, for those who share experts count on them."""
        count = 1 if self.pipeline is None else self.pipeline.count
        for i in range(count):
            yield items[i * len(items) // count : (i + 1) * len(items) // count]

    def _told(self, batch: Batch | None) -> Batch | None:
        """The leader's batch, on every rank of the replica."""
        if self.group is None or self.group.size() == 1:
            return batch
        numbers = packed(batch) if self.leads else []
        length = int(self._from_leader(torch.tensor([len(numbers)])))
        told = self._from_leader(torch.tensor(numbers) if self.leads else torch.empty(length, dtype=torch.long))
        return batch if self.leads else unpacked(told.tolist())

    def _from_leader(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return x
        return ops.broadcast(x.to(self.device), self.leader, self.group).cpu()


def packed(batch: Batch | None) -> list[int]:
    """A batch as whole numbers: what a follower needs of it."""
    if batch is None:
        return [END]
    numbers = [len(batch.items)]
    for item in batch.items:
        numbers += [item.number, item.start, item.samples, len(item.tokens), len(item.blocks), *item.tokens,
                    *item.blocks]
    return numbers


def unpacked(numbers: list[int]) -> Batch | None:
    """The inverse of `packed`."""
    if numbers[0] == END:
        return None
    items, at = list[Item](), 1
    for _ in range(numbers[0]):
        number, start, samples, new, table = numbers[at : at + 5]
        tokens, blocks = at + 5 + new, at + 5 + new + table
        items.append(Item(number, start, numbers[at + 5 : tokens], numbers[tokens:blocks], bool(samples)))
        at = blocks
    return Batch(items)
