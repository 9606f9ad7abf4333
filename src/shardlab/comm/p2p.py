"""Single messages: send, receive, and several of both at once.

The messages of a pair of ranks arrive in the order in which they were sent, whatever their tags: NCCL has no tags. So
both sides must agree on the order, and in debug mode, or through shared memory, the receiver raises where they do not.
A message is sent when its receiver has taken it: two ranks that both send first, and wait, wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import message
from .groups import group_of, members, name_of, number_of
from .mark import Mark
from .settings import now
from .way import Handle, check_topology, flat_bytes, refuse, refuse_unwritable, stages, written

VERBS = {"isend": ("send", "to"), "irecv": ("recv", "from")}


@dataclass(frozen=True)
class P2POp:
    """One of the messages that `batch_isend_irecv` starts: `op` is "isend" or "irecv", `peer` a global rank."""

    op: str
    tensor: torch.Tensor
    peer: int
    group: Any = None
    tag: int | str = 0

    def __post_init__(self):
        if self.op not in VERBS:
            raise ValueError(f"P2POp has no op {self.op!r}; use 'isend' or 'irecv'")


def send(tensor: torch.Tensor, dst: int, group=None, async_op: bool = False, tag: int | str = 0):
    """Send `tensor` to global rank `dst`, which must `recv` the same shape and dtype; returns it when it is taken.

    `tag` names the message, for debug mode to check. With `async_op`, a Handle: keep the tensor unchanged until its
    `wait()`. Raises ValueError if `dst` is no member or this rank, or on a tensor that autograd tracks.
    """
    handle, = batch_isend_irecv([P2POp("isend", tensor, dst, group, tag)])
    return handle if async_op else handle.wait()


def recv(tensor: torch.Tensor, src: int, group=None, async_op: bool = False, tag: int | str = 0):
    """Fill `tensor` with what global rank `src` sends, in place. Raises as `send` does.

    In debug mode and through shared memory, raises ValueError where tag, shape or dtype are not what was sent. gloo
    looks at the bytes alone: it leaves the rest as it was where fewer have come, and ends the process where more.
    """
    handle, = batch_isend_irecv([P2POp("irecv", tensor, src, group, tag)])
    return handle if async_op else handle.wait()


def batch_isend_irecv(ops: Sequence[P2POp]) -> list[Handle]:
    """Start all of these messages, which may depend on one another; a Handle for each, in order.

    The way to exchange: two ranks that each send and then receive wait for ever, two that start both do not. All ops
    must name the same group. Raises as `send` does, and on an empty list.
    """
    if not ops or len({id(group_of(op.group)) for op in ops}) > 1:
        raise ValueError(f"batch_isend_irecv takes one or more messages of one group, not {len(ops)} of "
                         f"{len({id(op.group) for op in ops})}")
    group, settings = group_of(ops[0].group), now()
    check_topology(settings)
    for op in ops:
        _check(op, group)
    marks, parts = [], []
    for op in ops:
        verb, word = VERBS[op.op]
        mark = Mark(verb, op.tensor, group, f" {word} rank {op.peer}{f', tag {op.tag}' if op.tag else ''}")
        src, dst = (dist.get_rank(), op.peer) if verb == "send" else (op.peer, dist.get_rank())
        own = members(group).backends.get(op.tensor.device.type, "gloo")
        staged = stages(op.tensor, own, settings, by_messages=True)
        mark.goes("", "shm" if message.in_memory(src, dst, settings) else own, staged)
        what = f"{name_of(op.tensor.dtype)} {tuple(op.tensor.shape)}, tag {op.tag}{members(group).which}"
        marks.append(mark)
        parts.append(message.Part(op.op, flat_bytes(op.tensor, staged), op.peer, what, 0))
    together = "; ".join(mark.text for mark in marks)  # which of them stands still can depend on any other
    for mark in marks:
        mark.text = together
    marks[0].enter()
    try:
        started = message.start(parts, group, settings, marks, 0)
    except Exception:
        for mark in marks:
            mark.drop()
        raise
    marks[0].leave()
    return [Handle(pending, mark, _result(op, part)) for op, mark, part, pending in
            zip(ops, marks, parts, started, strict=True)]


def _result(op: P2POp, part: message.Part):
    """What the handle's wait gives: the tensor, filled where it was received."""
    if op.op == "isend":
        return lambda: op.tensor
    return lambda: written(part.x, op.tensor)


def _check(op: P2POp, group: dist.ProcessGroup) -> None:
    verb, word = VERBS[op.op]
    number_of(op.peer, group, f"{verb} {word}".replace("recv", "receive"))
    if op.peer == dist.get_rank():
        raise ValueError(f"rank {op.peer} can't {verb} {word} itself: copy the tensor")
    refuse(verb, op.tensor)
    refuse_unwritable(verb, op.tensor if verb == "recv" else None)
