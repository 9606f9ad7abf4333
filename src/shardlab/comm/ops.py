"""The verbs: the only place where tensors cross ranks.

Names and meaning are torch.distributed's; five things are added. Strided tensors are made contiguous and copied back
(gloo is silently wrong on them, pytorch/pytorch#192920). Every dtype moves, and bool combines. Every call is recorded.
The result tensor is always returned, or, with `async_op=True`, a handle whose `wait()` returns it. A tensor that
autograd tracks is refused, since a collective would cut it out of the graph without a word: `comm.regions` has the
differentiable ones. `comm.use` says which way they go.
"""

from __future__ import annotations

import math

import torch

from ..specs import check
from .groups import group_of, name_of, number_of
from .made import COMBINE
from .way import collective, refuse


def all_reduce(tensor: torch.Tensor, op: str = "sum", group=None, async_op: bool = False):
    """Combine `tensor` (any shape, the same on all ranks) over the group, in place; every rank gets the result.

    `op` is sum, max, min or product; of bools, sum is "any" and product "all". Raises ValueError on another op, on a
    dtype that gloo can't combine, or on a tensor that autograd tracks.
    """
    return collective("all_reduce", tensor, group, async_op, combines=True, back=tensor, detail=f"({op})",
                      op=_known("all_reduce", op, tensor))


def reduce(tensor: torch.Tensor, dst: int, op: str = "sum", group=None, async_op: bool = False):
    """Combine `tensor` over the group, in place, on global rank `dst` alone; the others' tensors stay as they are.

    Raises ValueError as `all_reduce` does, and if `dst` is no member.
    """
    operation = _known("reduce", op, tensor)
    root = number_of(dst, group, "reduce to")
    mine = group_of(group).rank() == root
    return collective("reduce", tensor if mine else tensor.clone(), group, async_op, combines=True,
                      back=tensor if mine else None, gives=None if mine else tensor, detail=f"({op}) to rank {dst}",
                      op=operation, root=root)


def reduce_scatter(tensor: torch.Tensor, op: str = "sum", group=None, async_op: bool = False,
                   out: torch.Tensor | None = None):
    """Combine `tensor` (p·d0, …) over the group; rank r gets rows r·d0 to (r+1)·d0 of the result: (d0, …).

    `out` (d0, …), contiguous, is where it goes, if given: memory that is there already is faster than new memory. It
    may be this rank's own rows of `tensor`, whose other rows are left as they were. Raises ValueError where dim 0 does
    not divide by the group's size, on an `out` of another shape or dtype, and as `all_reduce` does.
    """
    _rows("reduce_scatter", tensor, group_of(group).size())
    shape = (tensor.shape[0] // group_of(group).size(), *tensor.shape[1:])
    return collective("reduce_scatter", tensor, group, async_op, combines=True, detail=f"({op})",
                      shape=shape, back=_into("reduce_scatter", out, shape, tensor), place=out,
                      op=_known("reduce_scatter", op, tensor))


def all_gather(tensor: torch.Tensor, group=None, async_op: bool = False, out: torch.Tensor | None = None):
    """Every rank's `tensor` (d0, …), the same shape on all ranks, joined along dim 0 in rank order: (p·d0, …).

    `out` (p·d0, …), contiguous, is where it goes, if given; `tensor` may be this rank's own rows of it. A
    zero-dimensional tensor gives shape (p,). Raises ValueError on a tensor that autograd tracks, and on an `out` of
    another shape or dtype.
    """
    refuse("all_gather", tensor)
    shape = _joined(tensor, group_of(group).size())
    return collective("all_gather", tensor, group, async_op, shape=shape,
                      back=_into("all_gather", out, shape, tensor), place=out)


def all_to_all(tensor: torch.Tensor, input_split_sizes: list[int] | None = None,
               output_split_sizes: list[int] | None = None, group=None, async_op: bool = False):
    """Rows of `tensor` (d0, …) to every rank, theirs joined in rank order: (sum of what each sends here, …).

    Rank r gets the r-th block of rows of each rank. Blocks are equal, or as long as `input_split_sizes` says (rows for
    each rank), and then `output_split_sizes` must say how many rows come from each. Raises ValueError where dim 0 does
    not divide, on sizes that do not add up, and on a tensor that autograd tracks.
    """
    refuse("all_to_all", tensor)
    p = group_of(group).size()
    if input_split_sizes is None and output_split_sizes is None:
        _rows("all_to_all", tensor, p)
        input_split_sizes = output_split_sizes = [tensor.shape[0] // p] * p
    given = _sizes("input_split_sizes", input_split_sizes, p)
    taken = _sizes("output_split_sizes", output_split_sizes, p)
    if tensor.dim() == 0 or sum(given) != tensor.shape[0]:
        raise ValueError(f"input_split_sizes {given} are {sum(given)} rows, and the tensor is {tuple(tensor.shape)}")
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    return collective("all_to_all", tensor, group, async_op,
                      shape=(sum(taken), *tensor.shape[1:]),
                      common=f"{name_of(tensor.dtype)} rows of {tuple(tensor.shape[1:])}",
                      given=[rows * row for rows in given], taken=[rows * row for rows in taken])


def broadcast(tensor: torch.Tensor, src: int, group=None, async_op: bool = False):
    """Overwrite `tensor` on every rank with that of global rank `src`, in place. ValueError if src is no member."""
    return collective("broadcast", tensor, group, async_op, back=tensor, detail=f" from rank {src}",
                      root=number_of(src, group, "broadcast from"))


def gather(tensor: torch.Tensor, dst: int, group=None, async_op: bool = False):
    """Every rank's `tensor` (d0, …) joined along dim 0 on global rank `dst`: (p·d0, …); on the others empty, (0, …).

    Raises ValueError if `dst` is no member, or on a tensor that autograd tracks.
    """
    refuse("gather", tensor)
    root = number_of(dst, group, "gather to")
    rows = group_of(group).size() if group_of(group).rank() == root else 0
    return collective("gather", tensor, group, async_op, detail=f" to rank {dst}", root=root,
                      shape=_joined(tensor, rows))


def scatter(tensor: torch.Tensor, whole: torch.Tensor | None = None, src: int = 0, group=None, async_op: bool = False):
    """Fill `tensor` (d0, …) with this rank's rows of `whole` (p·d0, …), which is given on global rank `src` alone.

    Raises ValueError where `whole` is given elsewhere, or missing there, or of another shape or dtype.
    """
    refuse("scatter", tensor)
    if whole is not None:
        refuse("scatter", whole)
    root, p = number_of(src, group, "scatter from"), group_of(group).size()
    here = group_of(group).rank() == root
    if here != (whole is not None):
        raise ValueError(f"scatter from rank {src}: give the whole tensor there, and on no other rank")
    if whole is not None and (whole.dtype != tensor.dtype or tuple(whole.shape) != _joined(tensor, p)):
        raise ValueError(f"scatter over {p} ranks fills {tuple(tensor.shape)} {tensor.dtype} from "
                         f"{_joined(tensor, p)}, not from {tuple(whole.shape)} {whole.dtype}")
    return collective("scatter", tensor, group, async_op, back=tensor, detail=f" from rank {src}",
                      handed=whole if whole is not None else tensor[:0] if tensor.dim() else tensor.new_empty(0),
                      common=f"{name_of(tensor.dtype)} {tuple(tensor.shape)} each", root=root, whole=whole)


def barrier(group=None) -> None:
    """Wait until every rank of the group is here."""
    collective("barrier", None, group, False)


def _into(verb: str, out: torch.Tensor | None, shape: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor | None:
    """`out`, or None if none is given. Raises ValueError where it can't hold the result."""
    if out is None:
        return None
    refuse(verb, out)
    if tuple(out.shape) != shape or out.dtype != tensor.dtype or out.device != tensor.device or not out.is_contiguous():
        raise ValueError(f"{verb} gives a contiguous {shape} {tensor.dtype} on {tensor.device}, and out is "
                         f"{tuple(out.shape)} {out.dtype} on {out.device}"
                         + ("" if out.is_contiguous() else f" with strides {out.stride()}"))
    return out


def _known(verb: str, op: str, tensor: torch.Tensor) -> str:
    """`op`, or the one that does the same to bools seen as bytes. Raises ValueError on one that there is not."""
    refuse(verb, tensor)
    if op not in COMBINE:
        raise ValueError(f"{verb} has no op {op!r}; use one of {', '.join(COMBINE)}")
    return {"sum": "max", "product": "min"}.get(op, op) if tensor.dtype == torch.bool else op


def _rows(verb: str, tensor: torch.Tensor, p: int) -> None:
    """Raise ValueError where dim 0 does not divide over `p` ranks."""
    refuse(verb, tensor)
    if tensor.dim() == 0 or tensor.shape[0] % p:
        raise ValueError(f"{verb} splits dim 0 of {tuple(tensor.shape)} over {p} ranks: pad it to {p} × n")


def _joined(tensor: torch.Tensor, p: int) -> tuple[int, ...]:
    """The shape of `p` such tensors joined along dim 0."""
    return (p * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (p,)


def _sizes(name: str, sizes: list[int] | None, p: int) -> list[int]:
    """The split sizes as whole numbers. Raises ValueError unless they are `p` numbers of rows."""
    if sizes is None:
        raise ValueError(f"{name} is missing: say how many rows go to each rank, and how many come from each")
    sizes = [check.whole(f"each of {name}", size, least=0) for size in sizes]
    if len(sizes) != p:
        raise ValueError(f"{name} = {sizes}: give {p} numbers of rows, one for each rank")
    return sizes
