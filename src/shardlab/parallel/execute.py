"""Runs a schedule: every rank does its list, action by action, and passes on what each has made.

There is no schedule in here. What is proved by `schedule.check`, drawn and priced is what runs, whoever wrote it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..comm import Handle, ops, phase, recv, send, work
from ..comm.settings import now
from ..model.head import IGNORED
from ..model.router import Routing
from ..model.transformer import Transformer
from ..schedule import Action, Orders, check, placement, size
from .agreement import agree
from .context import Own, own_of
from .data import no_sync
from .deferred import Deferred, deferring
from .pipeline import Pipeline, Stage
from .zigzag import join

MicroBatch = tuple[torch.Tensor, torch.Tensor]  # tokens and labels (batch, seq)
Key = tuple[str, int, int]  # what F or B of a stage has made of a micro-batch
End = Callable[[int, torch.Tensor], torch.Tensor]
Aside = Callable[[list[Routing]], torch.Tensor | None]
Root = torch.Tensor | GradientEdge | None  # None if nothing is trained up to there
AHEAD = 2  # messages that a rank has under way to another: with one, it would wait whenever that is at work


def run(model: Transformer, orders: Orders, parts: Sequence[MicroBatch], valid: int | None = None,
        routed: list[Routing] | None = None, real: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
    """Forward and backward of all micro-batches, or forward alone where the schedule has no backward.

    Every rank of the pipeline calls it, with the same schedule and micro-batches, whose sizes may differ. Returns, on
    every rank, the loss of them all: their sum ÷ `valid`, which is the number of their labels if it is None; see
    `head.cross_entropy`. Gradients add up in the parameters: call `grads.finish(model)` after the last `run` of a step.
    Of a mixture of experts, the load-balance losses of all stages are in it; what the layers here have chosen is added
    to `routed`, and `real` are, for each micro-batch, the tokens that are there: see `Transformer.loss`. Where
    the sequence is cut too, micro-batches are given whole, and the loss is this rank's tokens', all ranks' sum.
    Raises ValueError where the schedule is not right (`schedule.check`), is for other stages than the model was cut
    for, or for another number of micro-batches, where a micro-batch has not a label for every token, and where a data
    axis sums the gradients and `valid`, which only its ranks know together, is not given; in debug mode also where
    ranks have other schedules or micro-batches. Raises RuntimeError where there is backward and gradients are off.
    """
    trains = backward(orders)
    if trains and not torch.is_grad_enabled():
        raise RuntimeError("this schedule has backward passes, which need gradients: run it outside of torch.no_grad, "
                           "or take schedule.forward_only")
    for i, (tokens, labels) in enumerate(parts):
        if tokens.shape != labels.shape:
            raise ValueError(f"every token has a label: tokens {tuple(tokens.shape)}, labels {tuple(labels.shape)}, in "
                             f"micro-batch {i}")
    if valid is None:
        if trains and (reducer := getattr(model, "reducer", None)) is not None and reducer.group.size() > 1:
            raise ValueError(f"gradients are summed over {reducer.group.size()} ranks of the data axis, so give the "
                             "number of labels of all: valid = loss.valid_tokens(labels, group)")
        valid = sum(int((labels != IGNORED).sum()) for _, labels in parts)
    total = parts[0][0].new_zeros((), dtype=torch.float64) if parts else torch.zeros((), dtype=torch.float64)
    balances = model.spec.experts is not None and model.rules.balance > 0
    if real is not None and [each.shape for each in real] != [tokens.shape for tokens, _ in parts]:
        raise ValueError(f"real has {[tuple(each.shape) for each in real]}, the micro-batches "
                         f"{[tuple(tokens.shape) for tokens, _ in parts]}: give a bool for each token")
    context = getattr(model, "context", None)
    mine = [own_of(model, tokens, None if real is None else real[i]) for i, (tokens, _) in enumerate(parts)]

    def loss(i: int, stream: torch.Tensor) -> torch.Tensor:
        labels = parts[i][1] if context is None else context.own_labels(parts[i][1])
        each = model.lm_head(stream, labels, valid, mine[i].tokens.shape)
        total.add_(each.detach())
        return each

    def aside(chosen: list[Routing]) -> torch.Tensor | None:
        if routed is not None:
            routed.extend(chosen)
        if not (balances and chosen):
            return None
        each = model.balance(chosen, valid)
        total.add_(each.detach())
        return each

    if now().debug and hasattr(model, "pipeline"):
        plan = repr((orders, [tuple(tokens.shape) for tokens, _ in parts])).encode()
        batch = [each.cpu().numpy().tobytes() for part in (*parts, real or ()) for each in part]
        agree(b"".join([plan, *batch]), model.pipeline.group, "runs")  # type: ignore
    with no_sync(model), nullcontext() if trains else torch.no_grad():  # a data axis sums in grads.finish
        pipeline = _execute(model, orders, mine, loss, aside)
    if pipeline.group.size() == 1:
        return total
    if balances:  # each rank has a part of the loss
        return ops.all_reduce(total, group=pipeline.group)
    return ops.broadcast(total, pipeline.rank_of(pipeline.count - 1), pipeline.group)


def backward(orders: Orders) -> bool:
    """Whether the schedule has backward passes."""
    return any(action.kind in ("B", "I") for order in orders for action in order)


@torch.no_grad()
def logits(model: Transformer, orders: Orders, parts: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The logits (batch, seq, vocab) of each of the `parts`, token ids (batch, seq): on the rank of the last stage, on
    the others None. `orders` is a schedule without backward, such as `schedule.forward_only`. Raises as `run` does."""
    out: dict[int, torch.Tensor] = {}
    if backward(orders):
        raise ValueError("logits are for inference, and this schedule has backward passes: take schedule.forward_only")

    mine, context = [own_of(model, tokens) for tokens in parts], getattr(model, "context", None)

    def keep(i: int, stream: torch.Tensor) -> torch.Tensor:
        each = model.lm_head(stream, shape=mine[i].tokens.shape)
        out[i] = each if context is None else join(each, context.group, parts[i].shape[-1])
        return out[i]

    pipeline = _execute(model, orders, mine, keep)
    return [out[i] for i in range(len(parts))] if pipeline.count - 1 in pipeline.mine else None


def _execute(model: Transformer, orders: Orders, parts: Sequence[Own], end: End, aside: Aside = lambda _: None
             ) -> Pipeline:
    """Do this rank's list. `end(i, stream)` is what the last stage makes of micro-batch i's stream,
    `aside(routed)` what a stage adds to the loss for what its experts were chosen for."""
    pipeline: Pipeline | None = getattr(model, "pipeline", None)
    if pipeline is None:
        raise ValueError("this model has no pipeline: pipeline.cut it first, for this schedule")
    check(orders)
    if placement(orders) != pipeline.stages:
        raise ValueError(f"the schedule has stages {placement(orders)} on the ranks, and the model was cut for "
                         f"{pipeline.stages}: give pipeline.cut the schedule that it is to run")
    if size(orders)[1] != len(parts):
        raise ValueError(f"the schedule is for {size(orders)[1]} micro-batches, and there are {len(parts)}")
    own = _Rank(model, pipeline, orders[pipeline.group.rank()], parts, end, aside)
    for action in own.order:
        own.do[action.kind](action)
    own.close()
    return pipeline


class _Rank:
    """What a rank holds while it does its list."""

    def __init__(self, model: Transformer, pipeline: Pipeline, order: Sequence[Action], parts: Sequence[Own], end: End,
                 aside: Aside):
        self.model, self.pipeline, self.order, self.parts = model, pipeline, order, parts
        self.end, self.aside = end, aside
        self.do = {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weights, "send F": self.send,
                   "send B": self.send, "recv F": self.recv, "recv B": self.recv}
        self.split = {(a.stage, a.microbatch) for a in order if a.kind == "I"}  # whose backward is in two halves
        self.made: dict[Key, torch.Tensor] = {}  # here, and neither used nor sent yet
        self.coming: dict[Key, Handle] = {}
        self.going: dict[int, deque[Handle]] = {}  # the messages to each rank that it may not have taken yet
        # of each forward pass whose backward is to come: its input, and where backward begins
        self.live: dict[tuple[int, int], tuple[torch.Tensor | None, Root, torch.Tensor | None]] = {}
        self.later: dict[tuple[int, int], Deferred] = {}

    def forward(self, action: Action) -> None:
        _, number, i, _ = action
        stage = self.pipeline.mine[number]
        x = None if stage.first else self.take("F", number - 1, i)
        trains = torch.is_grad_enabled()
        if x is not None and trains:
            x.requires_grad_()
        with work("F", number, i), self.deferring(number, i):
            out, balance = self.compute(stage, x, i)
        if trains:
            # the edge, not the tensor: what has been sent need not be kept
            root: Root = None
            if out.requires_grad:
                root = out if stage.last else get_gradient_edge(out)
            self.live[number, i] = x, root, balance
        if not stage.last:
            self.made["F", number, i] = out.detach()

    def compute(self, stage: Stage, x: torch.Tensor | None, i: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the stage puts out, and its part of the loss beside that."""
        model, (tokens, positions, real), chosen = self.model, self.parts[i], list[Routing]()
        x = model.embed_tokens(tokens) if x is None else x
        layers = (model.layers[str(layer)] for layer in stage.layers)  # type: ignore[call-overload]
        x = model.through(layers, x, tokens.shape, positions, routed=chosen, real=real)
        return self.end(i, model.norm(x)) if stage.last else x, self.aside(chosen)

    def backward(self, action: Action) -> None:
        """B, or I: with what is put off it is the same."""
        kind, number, i, _ = action
        last = self.pipeline.mine[number].last
        given = None if last else self.take("B", number + 1, i)
        x, root, balance = self.live.pop((number, i))
        roots = {} if root is None else {root: given}
        if balance is not None and balance.requires_grad:
            roots[balance] = None
        with work(kind, number, i), self.deferring(number, i):
            if roots:  # one pass from both, which share what lies before them
                torch.autograd.backward(list(roots), list(roots.values()))  # type: ignore[arg-type]
        if x is not None:
            assert x.grad is not None
            self.made["B", number, i] = x.grad

    def weights(self, action: Action) -> None:
        _, number, i, _ = action
        with work("W", number, i):
            self.later.pop((number, i)).compute()

    def deferring(self, number: int, i: int):
        if (number, i) not in self.split:
            return nullcontext()
        return deferring(self.later.setdefault((number, i), Deferred()))

    def recv(self, action: Action) -> None:
        what = kind, number, i = action.kind[-1], action.stage, action.microbatch
        source = self.pipeline.rank_of(number)
        room = self.pipeline.stream(self.model, self.parts[i].tokens)
        with _toward(kind):
            self.coming[what] = recv(room, source, self.pipeline.group, async_op=True, tag=_told(kind, number, i))

    def send(self, action: Action) -> None:
        what = kind, number, i = action.kind[-1], action.stage, action.microbatch
        to = self.pipeline.rank_of(number + 1 if kind == "F" else number - 1)
        going = self.going.setdefault(to, deque())
        if len(going) == AHEAD:
            going.popleft().wait()
        x, tag = self.made.pop(what), _told(kind, number, i)
        with _toward(kind):
            going.append(send(x, to, self.pipeline.group, async_op=True, tag=tag))

    def take(self, *what) -> torch.Tensor:
        """What another stage has made, here or on another rank."""
        return self.coming.pop(what).wait() if what in self.coming else self.made.pop(what)

    def close(self) -> None:
        for going in self.going.values():
            for handle in going:
                handle.wait()


def _toward(kind: str):
    """Gradients travel outside of autograd's backward pass, and belong to it."""
    return phase("backward") if kind == "B" else nullcontext()


def _told(kind: str, number: int, i: int) -> str:
    return str(Action(kind, number, i))
