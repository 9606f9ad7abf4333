"""What is asked of a process group: who is in it, along which axis of a mesh it lies, which backends it has."""

from __future__ import annotations

from functools import cache
from numbers import Integral
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist


def axis_of(group: dist.ProcessGroup) -> str:
    """The mesh axis that `group` lies along ("tp"), or "world" for the group of all ranks."""
    name = group.group_desc
    return name.removeprefix("mesh_") if name.startswith("mesh_") else "world" if name == "default_pg" else name


class Members(NamedTuple):
    """What is asked of a group at every call: its global ranks, its axis, this process's own global rank, and the
    backend for each type of device."""

    ranks: tuple[int, ...]
    axis: str
    rank: int
    backends: dict[str, str]
    where: str  # "on axis tp, ranks [0, 1]"
    which: str  # ", group 3", by the name that tells it from others of the same ranks; "" for the group of all ranks


_known: WeakKeyDictionary[dist.ProcessGroup, Members] = WeakKeyDictionary()


def members(group: dist.ProcessGroup) -> Members:
    """Who is in the group, looked up once: torch takes several microseconds."""
    try:
        return _known[group]
    except KeyError:
        ranks, axis = dist.get_process_group_ranks(group), axis_of(group)
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        which = "" if axis == "world" else f", group {group.group_name}"
        _known[group] = Members(tuple(ranks), axis, dist.get_rank(), backends, f"on axis {axis}, ranks {ranks}", which)
        return _known[group]


@cache
def name_of(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def group_of(group) -> dist.ProcessGroup:
    """`group`, or the group of all ranks for None.

    Raises ValueError outside of ranks and on a group that this rank is not in, TypeError on what is no group.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in this group, so it has no part in what the group does: "
                         "let only members call it")
    if group is not None:
        raise TypeError(f"group must be a process group, or None for all ranks, not {group!r}; of a DeviceMesh take "
                        "mesh.get_group(axis)")
    if not dist.is_initialized():
        raise ValueError("no process group here: run this function on ranks, with launch(fn, 4) from shardlab.launch")
    return dist.distributed_c10d._get_default_group()


def number_of(rank: int, group, what: str) -> int:
    """The number in the group of global rank `rank`. Raises ValueError if it is no member."""
    ranks = members(group_of(group)).ranks
    if isinstance(rank, bool) or not isinstance(rank, Integral) or rank not in ranks:
        raise ValueError(f"cannot {what} rank {rank!r}: the group has ranks {list(ranks)}")
    return ranks.index(int(rank))


def level(group: dist.ProcessGroup) -> None:
    """Have all ranks of `group`, which all call it, in equally many groups, before some of them make another.

    PyTorch names a group that only its members make by how many they are in before: ranks that are in different numbers
    of them, because a program has made groups of some ranks, would wait for each other for ever. Those that are in
    fewer get groups of their own, of one rank.
    """
    known = dist.distributed_c10d._world.pg_names
    counts = [0] * group.size()
    dist.all_gather_object(counts, len(known), group)
    for _ in range(max(counts) - len(known)):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
