"""Simulated replicas for `shardlab serve-bench`: a step's time from datasheets, planned as a run's are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from tqdm import tqdm

from ..cost.concurrency import concurrency
from ..cost.handover import kv_handed
from ..cost.serve_step import ServeStep, serve_step
from ..serve import Answer, BlockPool, Request, Scheduler, mixed, prefill_first
from ..serve.cluster import Cluster
from ..serve.events import Instance, Role
from ..serve.request import Limits
from ..serve.router import LeastOutstanding
from ..serve.simulate import Simulated, Wire
from ..specs import ClusterSpec, Layout, find_card, find_link
from ..specs.check import whole
from .plan import model_of

BLOCK, CONTEXT = 16, 4096  # tokens of a block; of a request, by which the cache's room is counted


@dataclass(frozen=True)
class Fleet:
    """So many replicas of each role, alike otherwise, with `blocks` of cache each."""

    roles: dict[Role, int]
    step: ServeStep
    wire: Wire
    blocks: int
    budget: int

    @classmethod
    def of(cls, model: str, card: str, tp: int, replicas: int, prefill: int, decode: int, link: str, budget: int,
           blocks: int | None) -> Fleet:
        """Replicas of a model on `tp` cards each; one that does both where no number is given. Raises ValueError on a
        prefill pool without a decode pool and the other way round, and on a model that does not fit."""
        roles: dict[Role, int] = {"both": replicas, "prefill": prefill, "decode": decode}
        for name, count in roles.items():
            whole(name, count, least=0)
        if bool(prefill) != bool(decode):
            raise ValueError(f"--prefill {prefill} and --decode {decode}: a cache goes from one to the other, so give "
                             "both, or neither")
        if not any(roles.values()):
            roles["both"] = 1
        spec, found, layout = model_of(model), find_card(card), Layout(tp=whole("tp", tp))
        whole("budget", budget)
        if blocks is None:
            room = concurrency(spec, found, layout, context=min(CONTEXT, spec.max_positions or CONTEXT))
            if not room.requests:
                raise ValueError(f"{spec.name} with a request of {room.context:,} tokens does not fit {tp} × "
                                 f"{found.name}: give a larger --tp, or a smaller model")
            blocks = room.tokens // BLOCK
        port = find_link(link)
        ports = replace(port, per_direction=tp * port.per_direction, headline=None)
        return cls(roles, serve_step(spec, layout, ClusterSpec.of(found, tp)),
                   Wire(ports, kv_handed(spec, 1, layout), spec.layers), whole("blocks", blocks), budget)

    @property
    def cards(self) -> int | dict[str, int]:
        """In all, or by role where nobody does both."""
        tp = self.step.layout.tp
        if self.roles["both"]:
            return tp * sum(self.roles.values())
        return {"prefill": tp * self.roles["prefill"], "decode": tp * self.roles["decode"]}

    @property
    def vocab(self) -> int:
        return self.step.spec.vocab

    @property
    def title(self) -> str:
        who = [f"{count} {role}" for role, count in self.roles.items() if count and role != "both"]
        if both := self.roles["both"]:
            who.insert(0, f"{both} replica{'s' * (both > 1)}")
        return (f"{self.step.spec.name}, simulated: {' + '.join(who)}, each {self.step.layout.tp} × "
                f"{self.step.cluster.card.name}")

    def answer(self, requests: Sequence[Request], seed: int) -> list[Answer]:
        """Simulate a run, with a progress bar."""
        instances = [Instance(f"{role} {i}", Scheduler(
            BlockPool(self.blocks, BLOCK), prefill_first() if role == "prefill" else mixed(self.budget),
            limits=Limits.of(self.step.spec)), role)
                     for role, count in self.roles.items() for i in range(count)]
        with tqdm(total=len(requests), unit="request", disable=None) as bar:
            cluster = Cluster(Simulated(lambda instance, work: self.step(work), self.wire), instances,
                              LeastOutstanding(Random(seed)),
                              watch=lambda instance, batch: bar.update(len(requests) - cluster.left - bar.n))
            answers = cluster.run(requests)
            bar.update(len(requests) - bar.n)
        return answers
