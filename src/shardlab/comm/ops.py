"""The verbs: the only place where tensors cross ranks.

Names and meaning are torch.distributed's; four things are added. Strided tensors are made contiguous and copied back
(gloo is silently wrong on them, pytorch/pytorch#192920). Every call is recorded. The result tensor is always returned,
or, with `async_op=True`, a handle whose `wait()` returns it. A tensor that autograd tracks is refused, since a
collective would cut it out of the graph without a word: `comm.regions` has the differentiable ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from .ledger import Mark

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
           "product": dist.ReduceOp.PRODUCT}


@dataclass(frozen=True)
class Settings:
    """How the verbs run. `debug`: ranks first tell each other what they are about to do, and raise if they differ."""

    debug: bool = False


_settings = [Settings()]  # the innermost `use` last


@contextmanager
def use(**changes) -> Iterator[None]:
    """Run the verbs in the block with other settings: `with comm.use(debug=True): …`; TypeError on unknown ones."""
    _settings.append(replace(_settings[-1], **changes))
    try:
        yield
    finally:
        _settings.pop()


class Handle:
    """A collective under way. Keep neither reading nor writing its tensors until `wait()` has returned the result."""

    def __init__(self, work: dist.Work | None, mark: Mark, result: Callable[[], torch.Tensor]):
        self._work, self._mark, self._result = work, mark, result

    def wait(self) -> torch.Tensor:
        """Block until the collective is done; the result tensor. Further calls return it again."""
        if self._work is not None:
            self._mark.enter()
            try:
                self._work.wait()
            except Exception:
                self._mark.drop()
                raise
            self._mark.leave()
            self._work = None
            self._value = self._result()
        return self._value


def all_reduce(tensor: torch.Tensor, op: str = "sum", group=None, async_op: bool = False):
    """Combine `tensor` (any shape, the same on all ranks) over the group, in place; every rank gets the result.

    `op` is sum, max, min or product. Raises ValueError on another op or on a tensor that autograd tracks.
    """
    if op not in _REDUCE:
        raise ValueError(f"all_reduce has no op {op!r}; use one of {', '.join(_REDUCE)}")
    return _run("all_reduce", tensor, group, async_op, detail=f"({op})",
                start=lambda flat, g: (dist.all_reduce(flat, _REDUCE[op], g, async_op=True), flat), back=tensor)


def all_gather(tensor: torch.Tensor, group=None, async_op: bool = False):
    """Every rank's `tensor` (d0, …), the same shape on all ranks, joined along dim 0 in rank order: (p·d0, …).

    A zero-dimensional tensor gives shape (p,). Raises ValueError on a tensor that autograd tracks.
    """
    def start(flat, group):
        p = group.size()
        out = flat.new_empty((p * flat.shape[0], *flat.shape[1:]) if flat.dim() else (p,))
        return _ALL_GATHER(out.view(-1), flat.view(-1), group=group, async_op=True), out

    return _run("all_gather", tensor, group, async_op, start=start)


def reduce_scatter(tensor: torch.Tensor, op: str = "sum", group=None, async_op: bool = False):
    """Combine `tensor` (p·d0, …) over the group; rank r gets rows r·d0 to (r+1)·d0 of the result: (d0, …).

    Raises ValueError where dim 0 does not divide by the group's size, on an unknown op, or on a tracked tensor.
    """
    if op not in _REDUCE:
        raise ValueError(f"reduce_scatter has no op {op!r}; use one of {', '.join(_REDUCE)}")
    p = _group(group).size()
    if tensor.dim() == 0 or tensor.shape[0] % p:
        raise ValueError(f"reduce_scatter splits dim 0 of {tuple(tensor.shape)} over {p} ranks: pad it to {p} × n")

    def start(flat, group):
        out = flat.new_empty((flat.shape[0] // p, *flat.shape[1:]))
        return _REDUCE_SCATTER(out.view(-1), flat.view(-1), op=_REDUCE[op], group=group, async_op=True), out

    return _run("reduce_scatter", tensor, group, async_op, start=start, detail=f"({op})")


def broadcast(tensor: torch.Tensor, src: int, group=None, async_op: bool = False):
    """Overwrite `tensor` on every rank with that of global rank `src`, in place. ValueError if src is no member."""
    _member(src, group, "broadcast from")
    return _run("broadcast", tensor, group, async_op, detail=f" from rank {src}",
                start=lambda flat, g: (dist.broadcast(flat, src, g, async_op=True), flat), back=tensor)


def send(tensor: torch.Tensor, dst: int, group=None, async_op: bool = False):
    """Send `tensor` to global rank `dst`, which must `recv` the same shape and dtype."""
    _member(dst, group, "send to")
    return _run("send", tensor, group, async_op, detail=f" to rank {dst}", peer=True,
                start=lambda flat, g: (dist.isend(flat, dst, g), flat))


def recv(tensor: torch.Tensor, src: int, group=None, async_op: bool = False):
    """Fill `tensor` with what global rank `src` sends, in place."""
    _member(src, group, "receive from")
    return _run("recv", tensor, group, async_op, detail=f" from rank {src}", peer=True,
                start=lambda flat, g: (dist.irecv(flat, src, g), flat), back=tensor)


def barrier(group=None) -> None:
    """Wait until every rank of the group is here."""
    group = _group(group)
    mark = Mark("barrier", None, group)
    mark.enter()
    _agree("barrier", group)
    dist.barrier(group)
    mark.leave()


# torch 2.13 renamed these two; the names before are deprecated there and the only ones before it
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _run(name, tensor, group, async_op, *, start, detail="", back=None, peer=False):
    """Check, mark and start one collective; `start(contiguous, group)` gives (work, result).

    Where `back` is given the verb is in place: the result is copied into it if a contiguous copy had to be made.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} on a tensor that autograd tracks would drop its gradient: "
                         "use comm.regions, or detach() it first")
    group = _group(group)
    mark = Mark(name, tensor, group, detail)
    mark.enter()
    if not peer:
        _agree(mark.text, group)
    try:
        with torch.no_grad():
            work, result = start(tensor.detach().contiguous(), group)
    except Exception:
        mark.drop()
        raise

    def finish():
        if back is None:
            return result
        if result.data_ptr() != back.data_ptr():  # `back` is strided: a copy took part
            with torch.no_grad():
                back.copy_(result)
        torch.autograd.graph.increment_version(back)  # so that a backward which needs the old values says so
        return back

    handle = Handle(work, mark, finish)
    if not async_op:
        return handle.wait()
    mark.leave()
    return handle


def _agree(text: str, group: dist.ProcessGroup) -> None:
    """In debug mode, raise on every rank alike where the ranks of the group are not about to do the same thing."""
    if not _settings[-1].debug:
        return
    said: list = [None] * group.size()
    dist.all_gather_object(said, text, group)
    if len(set(said)) > 1:
        lines = [f"  rank {r}: {s}" for r, s in zip(dist.get_process_group_ranks(group), said, strict=True)]
        raise ValueError("the ranks disagree on the collective they enter:\n" + "\n".join(lines))


def _group(group) -> dist.ProcessGroup:
    if group is None and not dist.is_initialized():
        raise ValueError("no process group here: run this function on ranks, with launch(fn, 4) from shardlab.launch")
    return group or dist.distributed_c10d._get_default_group()


def _member(rank: int, group, what: str) -> None:
    ranks = dist.get_process_group_ranks(_group(group))
    if rank not in ranks:
        raise ValueError(f"cannot {what} rank {rank}: the group has ranks {ranks}")
